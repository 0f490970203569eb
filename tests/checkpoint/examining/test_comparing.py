from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import compare
from dtckpt.checkpoint.examining import comparing
from dtckpt.checkpoint.examining.drift import drift_of
from dtckpt.checkpoint.tensors.dtypes import DTYPES, DType, items_of
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch

from .test_verifying import flip


def _dtype(tensor: torch.Tensor) -> DType:
    name = str(tensor.dtype).removeprefix("torch.")
    return next(dtype for dtype in DTYPES.values() if dtype.torch_name == name)


def _items(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy().view(items_of(tensor.element_size()))


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {
            "w": torch.randn(64, 48, generator=generator),
            "layers": [{"b": torch.randn(7, generator=generator)} for _ in range(2)],
        },
        "ids": torch.arange(9),
        "step": 3,
        "none": None,
    }


def test_arrays_and_tensors_within_values_are_compared(tmp_path: Path) -> None:
    def state(by: int) -> dict[str, Any]:
        pair = torch.arange(3) + by, {"k": np.arange(2) + by, "n": 1}
        return {"array": np.arange(4) + by, "pair": pair, "list": [1, np.ones(2) + by], "v": (1, 2)}

    for by in (0, 1):
        dcp.save(state(by), tmp_path / str(by))
    found = compare(tmp_path / "0", tmp_path / "1")
    names = {"array", "pair/0", "pair/1/k", "list/1"}
    assert set(found.tensors) == names
    assert all(each.drift and each.drift.num_beyond for each in found.tensors.values())
    assert (found.values, found.only, found.only_values) == ({}, ((), ()), ((), ()))
    dcp.save(state(0), tmp_path / "same")
    found = compare(tmp_path / "0", tmp_path / "same")
    assert {each.by for each in found.tensors.values()} == {"checksums"}
    tensors = {
        "array": torch.arange(4) + 2,
        "pair": (torch.arange(3), 5),
        "list": [1, 2],
        "v": (1, 2),
    }
    dcp.save(tensors, tmp_path / "other")
    found = compare(tmp_path / "0", tmp_path / "other")
    assert set(found.values) == {"pair", "list"}
    assert found.tensors["array"].drift
    assert not (drift := found.tensors["pair/0"].drift) or not drift.num_beyond
    dcp.save({"x": (torch.ones(1),), "x.0": torch.ones(1)}, tmp_path / "two")
    with pytest.raises(LayoutMismatch, match="would both be called"):
        compare(tmp_path / "two", tmp_path / "0")


def test_values_have_the_names_that_they_have_elsewhere(tmp_path: Path) -> None:
    def state(by: int) -> dict[str, Any]:
        return {
            "a": {"b": 1 + by},
            "a/b": 2 + by,
            "opt": {0: {"m": torch.ones(2), "step": by}},
            "own": dcp.PerRank({"seed": by}),
            **({"c/d": 1} if by else {}),
        }

    for by in (0, 1):
        dcp.save(state(by), tmp_path / str(by))
    found = compare(tmp_path / "0", tmp_path / "1")
    assert found.values == {
        "a/b": (1, 2),
        "a%2Fb": (2, 3),
        "opt/#0/step": (0, 1),
        "own/@0/seed": (0, 1),
    }
    assert found.only_values == ((), ("c%2Fd",))
    chosen = compare(tmp_path / "0", tmp_path / "1", "opt/#0")
    assert (set(chosen.values), set(chosen.tensors)) == ({"opt/#0/step"}, {"opt/#0/m"})


@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "float32")])
def test_drift_is_what_torch_says(kinds: tuple[str, str]) -> None:
    one = torch.randn(70_001).to(getattr(torch, kinds[0]))
    other = one.float().clone()
    other[100:300] += 0.25
    other = other.to(getattr(torch, kinds[1]))
    found = drift_of((_dtype(one), _dtype(other)), (_items(one), _items(other)), rtol=0, atol=0.3)
    a, b = one.double(), other.double()
    assert found.num_values == 70_001
    assert found.num_changed == int((a != b).sum()) >= 190
    assert found.num_beyond == 0
    assert found.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()))
    assert found.max_abs == float((a - b).abs().max())
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=0)
    assert found.cosine == pytest.approx(float(cosine))


def test_integers_are_compared_exactly() -> None:
    one = torch.tensor([2**62, -(2**62), 2**63 - 1, 5])
    other = torch.tensor([2**62 + 1, -(2**62), 2**63 - 1, 5])
    dtypes = _dtype(one), _dtype(other)
    found = drift_of(dtypes, (_items(one), _items(other)), rtol=0, atol=0)
    assert (found.num_changed, found.num_beyond, found.changed_bytes, found.max_abs) == (1, 1, 1, 1)


@pytest.mark.parametrize("scale", [1e-200, 5e-324, 1e200, 8e307])
def test_floats_whose_squares_are_none(scale: float) -> None:
    pair = torch.tensor([[2.0, -1.0], [2.0, 1.0]], dtype=torch.float64) * scale
    one, other = torch.cat([pair, pair.new_zeros(2, 70_000)], 1).unbind()
    found = drift_of((_dtype(one), _dtype(one)), (_items(one), _items(other)), rtol=0, atol=0)
    assert found.relative_l2 == pytest.approx(math.sqrt(0.8))
    assert found.cosine == pytest.approx(0.6)
    assert found.num_beyond == 1


def test_a_change_that_is_too_small_for_a_square_is_some_drift() -> None:
    one, other = torch.tensor([[1.0, 1e-200], [1.0, 3e-200]], dtype=torch.float64).unbind()
    found = drift_of((_dtype(one), _dtype(one)), (_items(one), _items(other)), rtol=0, atol=0)
    assert 0 < found.relative_l2 < 1e-199


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_tolerance(value: float) -> None:
    with pytest.raises(ValueError, match="rtol="):
        compare("memory://none", "memory://none", rtol=value)
    with pytest.raises(ValueError, match="atol="):
        compare("memory://none", "memory://none", atol=value)


def test_nan_and_infinities_count_and_no_tolerance_covers_them() -> None:
    nan, inf = math.nan, math.inf
    one = torch.tensor([nan, nan, inf, inf, -inf, 1.0, 0.0])
    other = torch.tensor([nan, 1.0, inf, -inf, 0.0, 1.0, -0.0])
    dtypes = _dtype(one), _dtype(other)
    found = drift_of(dtypes, (_items(one), _items(other)), rtol=1e9, atol=1e9)
    assert (found.num_nan, found.num_inf) == ((2, 1), (3, 2))
    assert (found.num_changed, found.num_beyond, found.num_odd) == (3, 3, 3)
    assert found.relative_l2 == found.max_abs == 0
    assert found.changed_bytes > 0
    nothing = drift_of(dtypes, (_items(one[:0]), _items(other[:0])), rtol=0, atol=0)
    assert (nothing.num_values, nothing.relative_l2, nothing.cosine) == (0, 0, None)


def test_parts_of_complex_numbers_are_compared_beside_nan() -> None:
    def drift(one: complex, other: complex) -> Any:
        tensors = [torch.tensor([each, 1j]) for each in (one, other)]
        items = _items(tensors[0]), _items(tensors[1])
        dtypes = _dtype(tensors[0]), _dtype(tensors[1])
        return drift_of(dtypes, items, rtol=0.0, atol=0.0)

    nan = math.nan
    for one, other in ((complex(nan, 1), complex(nan, 2)), (complex(1, nan), complex(nan, 1))):
        found = drift(one, other)
        assert (found.num_changed, found.num_odd, found.num_beyond) == (1, 1, 1)
    assert drift(complex(nan, 1), complex(nan, 1)).num_changed == 0
    assert drift(complex(nan, nan), complex(nan, nan)).num_changed == 0


def test_what_is_in_one_alone_and_what_differs(tmp_path: Path) -> None:
    state = _state()
    dcp.save(state, tmp_path / "a")
    state["model"]["w"] = state["model"]["w"] * 1.5
    state["ids"] = torch.arange(10)
    state["step"] = torch.tensor(3)
    state["new"] = 1
    del state["none"]
    dcp.save(state, tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.only == ((), ("step",))
    assert sorted(found.only_values[0]) == ["none", "step"]
    assert found.only_values[1] == ("new",)
    assert not found.values
    w = found.tensors["model/w"]
    assert w.drift is not None
    assert w.drift.relative_l2 == pytest.approx(0.5)
    assert not w.is_within(0.4)
    assert w.is_within(0.6)
    assert found.tensors["ids"].by == "nothing"
    assert not found.tensors["ids"].is_within(9.0)
    assert found.tensors["model/layers/0/b"].by == "checksums"
    some = compare(tmp_path / "a", tmp_path / "b", "model")
    assert list(some.tensors) == [n for n in found.tensors if n.startswith("model/")]
    assert not any((*some.only, *some.only_values))
    with pytest.raises(LayoutMismatch, match="selects nothing"):
        compare(tmp_path / "a", tmp_path / "b", "modle")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_layouts_and_formats_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_GROUP_BYTES", 1000)  # so that tensors are read in parts
    state = _state()
    dcp.save(state, tmp_path / "a")
    dcp.reshard(tmp_path / "a", tmp_path / "b", Mesh((3,)), dcp.parse_rules("model/w=S(1);*=S(0)"))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert not any((*found.only, *found.only_values, found.values))
    assert all(each.is_same for each in found.tensors.values())
    assert found.tensors["model/w"].by == "values"

    torch_save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = compare(tmp_path / "a", tmp_path / "dcp")
    assert len(found.tensors) == 4
    assert not any(found.only)
    assert all(each.is_same for each in found.tensors.values())

    flat = {
        "w": state["model"]["w"].bfloat16(),
        "layers.0.b": state["model"]["layers"][0]["b"],
        "layers.1.b": state["model"]["layers"][1]["b"].flip(0),
    }
    (tmp_path / "hf").mkdir()
    save_file(flat, tmp_path / "hf" / "model.safetensors")
    found = compare(tmp_path / "a", tmp_path / "hf", rename={"model/{rest*}": "{rest*}"})
    assert found.only == (("ids",), ())
    w = found.tensors["w"]
    assert w.dtypes == ("float32", "bfloat16")
    assert w.drift is not None
    assert not w.is_same
    exact = state["model"]["w"].double()
    expected = (exact - flat["w"].double()).norm() / exact.norm()
    assert w.drift.relative_l2 == pytest.approx(float(expected))
    assert found.tensors["layers/0/b"].is_same
    assert not found.tensors["layers/1/b"].is_within(None)
    loose = compare(tmp_path / "a", tmp_path / "hf", rename={"model/{rest*}": "{rest*}"}, rtol=0.01)
    assert loose.tensors["w"].is_within(None)


def test_equal_checksums_are_believed_and_nothing_read(tmp_path: Path) -> None:
    dcp.save(_state(), tmp_path / "a")
    dcp.save(_state(), tmp_path / "b")
    [file] = tmp_path.glob("b/data/*/*")
    flip(file, 4096 + 10)
    calls: list[int] = []
    found = compare(tmp_path / "a", tmp_path / "b", on_progress=lambda done, _: calls.append(done))
    assert {each.by for each in found.tensors.values()} == {"checksums"}
    assert calls == []


def test_the_first_error_stops_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.zeros(10_000)}, tmp_path / "a")
    dcp.save({"w": torch.ones(10_000)}, tmp_path / "b")
    monkeypatch.setattr(comparing, "_GROUP_BYTES", 200)
    has_failed = threading.Event()
    read, calls = comparing._read, itertools.count()  # pyright: ignore[reportPrivateUsage]

    def fails_beside_others(*args: Any) -> Any:
        number = next(calls)
        if number == 0:
            assert has_failed.wait(30)
        elif number == 1:
            has_failed.set()
            raise dcp.Corrupt("damaged")
        time.sleep(0.005)
        return read(*args)

    monkeypatch.setattr(comparing, "_read", fails_beside_others)
    with pytest.raises(dcp.Corrupt):
        compare(tmp_path / "a", tmp_path / "b")
    assert next(calls) < 200  # of 400


def test_damage_is_no_difference(tmp_path: Path) -> None:
    state = _state()
    dcp.save(state, tmp_path / "a")
    dcp.save({**state, "model": {**state["model"], "w": torch.zeros(64, 48)}}, tmp_path / "b")
    for file in tmp_path.glob("a/data/*/*"):
        data = np.fromfile(file, np.uint8)
        data[4096:20000] ^= 1
        data.tofile(file)
    with pytest.raises(dcp.Corrupt):
        compare(tmp_path / "a", tmp_path / "b")
