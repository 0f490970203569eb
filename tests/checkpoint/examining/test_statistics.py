from __future__ import annotations

import math
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.examining import statistics as module
from dtckpt.checkpoint.examining.histogram import NUM_BINS
from dtckpt.checkpoint.examining.moments import Moments
from dtckpt.checkpoint.examining.numbers import numbers
from dtckpt.checkpoint.tensors.dtypes import DTYPES, DType
from dtckpt.dtensor import Mesh
from dtckpt.errors import Corrupt, LayoutMismatch

SMALL = [d for d in DTYPES.values() if d.itemsize <= 2 and d.packed == 1]


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.code)
def test_numbers_of_all_codes_are_those_of_torch(dtype: DType) -> None:
    codes = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}")
    if dtype.code == "BOOL":
        codes = codes[:2]
    as_ints = torch.from_numpy(codes.view(f"i{dtype.itemsize}").copy())
    expected = as_ints.view(getattr(torch, dtype.torch_name)).double()
    with np.errstate(invalid="ignore"):  # signalling NaN
        found = torch.from_numpy(numbers(dtype, codes).astype(np.float64))
    assert torch.equal(expected.nan_to_num(7e9), found.nan_to_num(7e9))


def told(tensor: torch.Tensor, place: str = "memory://statistics/any") -> ckpt.TensorStatistics:
    ckpt.save({"t": tensor}, place, overwrite=True)
    return ckpt.statistics(place)["t"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP_ELEMENTS", 1000)
    values = (torch.randn(70, 90) * 3 + 100).to(dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    found = told(torch.cat([values.flatten(), special]))
    kept = np.append(values.double().numpy().ravel(), [0.0, 0.0])
    assert (found.num_values, found.num_nan) == (6306, 1)
    assert (found.num_posinf, found.num_neginf, found.num_zero) == (1, 2, 2)
    assert (found.min, found.max) == (kept.min(), kept.max())
    assert found.mean == pytest.approx(kept.mean(), rel=1e-14)
    assert found.std == pytest.approx(kept.std(), rel=1e-12)
    assert found.histogram is not None
    expected, _ = np.histogram(kept, np.array(found.histogram.edges))
    assert found.histogram.counts == tuple(expected)
    assert NUM_BINS // 2 < len(expected) <= NUM_BINS


def test_integers_are_exact() -> None:
    values = torch.tensor([-(2**63), 2**63 - 1, 2**62 + 1, -5, 0], dtype=torch.int64)
    found = told(values)
    assert (found.min, found.max, found.num_zero) == (-(2**63), 2**63 - 1, 1)
    assert found.mean == (2**62 - 5) / 5
    close = torch.arange(100_000, dtype=torch.int64) % 3 + 2**62
    assert told(close).std == pytest.approx((close - 2**62).double().std(correction=0).item())
    wide = np.array([2**64 - 1, 2**64 - 3], dtype=np.uint64)
    ckpt.save({"t": wide}, "memory://statistics/unsigned")
    found = ckpt.statistics("memory://statistics/unsigned")["t"]
    assert (found.min, found.max, found.mean) == (2**64 - 3, 2**64 - 1, float(2**64 - 2))
    assert found.histogram is not None
    assert found.histogram.edges == tuple(2**64 - 3 + i for i in range(4))
    assert found.histogram.counts == (1, 0, 1)
    assert told(torch.tensor([250, 7], dtype=torch.uint8)).mean == 128.5


def test_other_types() -> None:
    assert told(torch.tensor([True, False, True, True])).mean == 0.75
    found = told(torch.tensor([3 + 4j, 0, complex(math.nan, 1)]))
    assert (found.max, found.mean, found.num_nan, found.num_zero) == (5, 2.5, 1, 1)
    packed = torch.tensor([0xA5, 0x00], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found = told(packed)
    assert (found.num_values, found.min, found.max, found.num_zero) == (4, -1.0, 3.0, 2)
    signalling = torch.tensor([0x7FA0], dtype=torch.int16).view(torch.bfloat16)
    assert told(signalling).num_nan == 1
    signalling = torch.tensor([0x7FA00000], dtype=torch.int32).view(torch.float32)
    assert told(signalling).num_nan == 1
    for empty in (torch.empty(0, 3), torch.tensor([math.nan])):
        found = told(empty)
        assert [found.min, found.max, found.mean, found.std, found.histogram] == [None] * 5
    assert told(torch.full((), 2.5)).histogram == ckpt.Histogram(edges=(2.5, 2.5), counts=(1,))


def test_extremes_of_the_range() -> None:
    found = told(torch.tensor([1.7e308, -1.7e308, 1.7e308, 1.7e308], dtype=torch.float64))
    assert found.mean == pytest.approx(0.85e308)
    assert found.std == pytest.approx(1.7e308 * math.sqrt(0.75))
    assert found.histogram is not None
    assert sum(found.histogram.counts) == 4
    tiny = told(torch.tensor([1e-300, 3e-300], dtype=torch.float64))
    assert (tiny.mean, tiny.std) == (pytest.approx(2e-300), pytest.approx(1e-300))
    mixed = told(torch.tensor([-5e-324, 1e300], dtype=torch.float64)).histogram
    assert mixed is not None
    assert (mixed.edges[1], mixed.counts[0]) == (0, 1)


FLOATS = st.lists(st.floats() | st.sampled_from([0.0, -0.0, 1e-5, 5e-324]), max_size=6)
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)


@given(parts=st.lists(FLOATS, min_size=1) | st.lists(INTS, min_size=1), order=st.randoms())
def test_parts_may_come_in_any_order(parts: list[list[Any]], order: Any) -> None:
    is_int = any(isinstance(value, int) for part in parts for value in part)
    kind = np.int64 if is_int else np.float64
    whole = Moments.of(np.array(list(chain.from_iterable(parts)), dtype=kind))
    order.shuffle(parts)
    merged = Moments()
    for part in parts:
        merged = merged.merged(Moments.of(np.array(part, dtype=kind)))
    assert (merged.low, merged.high, merged.total) == (whole.low, whole.high, whole.total)
    assert (merged.num_nan, merged.num_finite) == (whole.num_nan, whole.num_finite)
    if whole.bins is None or merged.bins is None:
        assert whole.bins is merged.bins
        return
    histogram = whole.bins.histogram(whole.low, whole.high)
    assert merged.bins.histogram(merged.low, merged.high) == histogram
    assert sum(histogram.counts) == whole.num_finite
    if whole.low < whole.high:
        assert histogram.edges[0] <= whole.low < histogram.edges[1]
        assert histogram.edges[-2] <= whole.high <= histogram.edges[-1]
        assert all(low < high for low, high in pairwise(histogram.edges))


def test_names_ties_formats_and_progress(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    state = {"model": {"a": weight, "tied": weight}, "b": torch.ones(3)}
    ckpt.save(state, tmp_path / "ours")
    seen: list[tuple[int, int]] = []

    def remember(done: int, total: int) -> None:
        seen.append((done, total))

    chosen = ckpt.statistics(tmp_path / "ours", "model", on_progress=remember)
    assert [(found.name, found.mean) for found in chosen.values()] == [
        ("model/a", 2.5),
        ("model/tied", 2.5),
    ]
    assert seen[-1] == (24, 24)
    with pytest.raises(LayoutMismatch, match="modle"):
        ckpt.statistics(tmp_path / "ours", "modle")
    save_file({"x": weight.bfloat16()}, str(tmp_path / "model.safetensors"))
    assert ckpt.statistics(tmp_path / "model.safetensors")["x"].max == 5


def test_damage_is_found_and_torch_is_not_needed(tmp_path: Path) -> None:
    ckpt.save({"a": torch.ones(3000)}, tmp_path)
    code = (
        f"import sys, dtckpt.checkpoint as c; assert c.statistics({str(tmp_path)!r})['a'].std == 0"
        "; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    (file,) = tmp_path.glob("data/*/*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-4000] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(Corrupt, match="belong to a"):
        ckpt.statistics(tmp_path)


def test_values_are_the_same_however_they_are_stored(tmp_path: Path) -> None:
    state = {"a": torch.randn(64, 50), "b": torch.randn(333).bfloat16(), "c": torch.arange(70)}
    ckpt.save(state, tmp_path / "whole")
    found = ckpt.statistics(tmp_path / "whole")
    rules = ckpt.parse_rules("a=S(1),S(0); *=S(0),R")
    mesh = Mesh((3, 2))
    ckpt.reshard(tmp_path / "whole", tmp_path / "parts", mesh=mesh, rules=rules, compress="zstd")
    ckpt.save(state | {"c": torch.zeros(1)}, tmp_path / "next", base=tmp_path / "whole")
    others = (ckpt.statistics(tmp_path / "parts"), ckpt.statistics(tmp_path / "next", ["a", "b"]))
    for other in others:
        for name, told in other.items():
            assert told.histogram == found[name].histogram
            assert (told.min, told.max) == (found[name].min, found[name].max)
            assert told.mean == pytest.approx(found[name].mean, rel=1e-12)
            assert told.std == pytest.approx(found[name].std, rel=1e-12)
    split = [ckpt.Split("a", ("x", "y"), dim=0)]
    halves = ckpt.statistics(tmp_path / "whole", ["x", "y"], mapping=split)
    assert max(half.max or 0 for half in halves.values()) == found["a"].max
