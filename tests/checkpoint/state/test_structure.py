"""State dicts come back as they were: containers, keys and values of every kind."""

from __future__ import annotations

import collections
import copy
import enum
import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as dcp
from dtckpt.errors import CheckpointError, LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from .. import golden

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers()
)
keys = st.text(max_size=5) | st.integers()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equality that tells int from bool from float, -0.0 from 0.0, and knows NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            type(k) is type(m) and same(a[k], b[m]) for k, m in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(keys, trees, max_size=4))
def test_values_and_containers_survive(state: dict[Any, Any]) -> None:
    store = MemoryStore()
    dcp.save(state, store)
    assert same(dcp.open(store).state_dict(), state)
    loaded = dict.fromkeys(state)
    dcp.load(loaded, store)
    assert same(loaded, state)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(keys, min_size=1, max_size=3), min_size=1, max_size=6))
def test_different_paths_have_different_names(paths: list[list[Any]]) -> None:
    state: dict[Any, Any] = {}
    count = 0
    for path in paths:
        inner: Any = state
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                break
        if isinstance(inner, dict) and path[-1] not in inner:
            inner[path[-1]] = torch.tensor(count)
            count += 1
    store = MemoryStore()
    dcp.save(state, store)
    checkpoint = dcp.open(store)
    assert len(checkpoint) == count
    assert sorted(int(t[...]) for t in checkpoint.values()) == list(range(count))


def test_keys_that_look_like_paths_do_not_collide() -> None:
    state = {
        "a": {"b": torch.tensor(0), "b/c": torch.tensor(1)},
        "a.b": torch.tensor(2),
        "a/b": torch.tensor(3),
        "a%2Fb": torch.tensor(4),
        "": torch.tensor(5),
        "w": torch.tensor([6]),
        "w[0:1]": torch.tensor([7]),
        "__metadata__": torch.tensor(8),
        "__dtckpt_blocks__": torch.tensor(9),
        "@0": torch.tensor(10),
        "#3": torch.tensor(11),
        3: torch.tensor(12),
    }
    store = MemoryStore()
    dcp.save(state, store)
    loaded = {k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, torch.Tensor)}
    loaded["a"] = {"b": torch.tensor(-1), "b/c": torch.tensor(-1)}  # pyright: ignore[reportArgumentType]
    dcp.load(loaded, store)
    assert {k: v for k, v in loaded.items() if k != "a"} == {
        k: v for k, v in state.items() if k != "a"
    }
    assert loaded["a"] == state["a"]


def test_torch_and_numpy_values() -> None:
    state = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "size": torch.Size([2, 3]),
        "f32": np.float32(1.1),
        "i8": np.int8(-3),
        "bool": np.bool_(True),
        "time": np.datetime64("2026-01-02"),
        "nan": [float("nan"), float("inf"), -0.0],
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    store = MemoryStore()
    dcp.save(state, store)
    loaded = dcp.open(store).state_dict()
    assert repr({k: v for k, v in loaded.items() if k != "ordered"}) == repr(
        {k: v for k, v in state.items() if k != "ordered"}
    )
    assert list(loaded["ordered"].items()) == [("b", 1), ("a", 2)]


def test_numpy_arrays_come_back_in_place() -> None:
    state = {"x": np.arange(6.0).reshape(2, 3)[:, ::2], "empty": np.zeros((0, 2), dtype=np.int16)}
    store = MemoryStore()
    dcp.save(state, store)
    loaded = {"x": np.zeros((2, 2)), "empty": np.zeros((0, 2), dtype=np.int16)}
    kept = loaded["x"]
    dcp.load(loaded, store)
    assert loaded["x"] is kept
    assert np.array_equal(kept, state["x"])


def test_an_array_that_cannot_be_filled_is_refused() -> None:
    store = MemoryStore()
    dcp.save({"x": np.arange(4.0)[::-1]}, store)
    assert dcp.open(store)["x"][...].tolist() == [3, 2, 1, 0]
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    for into in (fixed, np.zeros(4)[::-1]):
        with pytest.raises(LayoutMismatch, match="read-only or runs backwards"):
            dcp.load({"x": into}, store)


def test_a_state_of_values_loads_into_itself() -> None:
    store = MemoryStore()
    dcp.save({"v": golden.VALUES}, store)
    into = {"v": copy.deepcopy(golden.VALUES)}
    dcp.load(into, store)
    assert repr(into["v"]) == repr(golden.VALUES)


def test_tensors_are_filled_in_place_inside_of_tuples_and_lists() -> None:
    store = MemoryStore()
    dcp.save({"t": (torch.ones(2), 5), "l": [torch.ones(3), "x"]}, store)
    inner = torch.zeros(3)
    loaded = {"t": (torch.zeros(2), 0), "l": [inner, ""]}
    outer = loaded["l"]
    dcp.load(loaded, store)
    assert loaded["l"] is outer
    assert outer[0] is inner
    assert inner.tolist() == [1, 1, 1]
    assert loaded["t"][1] == 5


@dcp.register_enum
class Colour(enum.Enum):
    """An enum that may be saved."""

    RED = 1


class Unknown(enum.Enum):
    """An enum that nobody registered."""

    X = 1


class Thing:
    """A value that the format does not hold."""

    def __init__(self) -> None:
        self.x = 1


def test_registered_enums() -> None:
    store = MemoryStore()
    dcp.save({"c": Colour.RED}, store)
    assert dcp.open(store).state_dict() == {"c": Colour.RED}


class Pair(NamedTuple):
    """A tuple type, which a plain tuple would not restore."""

    a: int
    b: int


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        Unknown.X,
        object,
        Pair(1, 2),
        torch.zeros(2, device="meta"),
        torch.ones(2, dtype=torch.half).view(torch.complex32),
        torch.eye(2).to_sparse(),
        np.array(["text"]),
        {(1, 2): 3},
        {1.5: 2},
    ],
    ids=[
        "object",
        "enum",
        "class",
        "namedtuple",
        "meta",
        "complex32",
        "sparse",
        "text",
        "tuple-key",
        "float-key",
    ],
)
def test_what_cannot_be_written_is_refused_by_name(value: object) -> None:
    store = MemoryStore()
    with pytest.raises(Unsavable, match=r"model/blocks/1"):
        dcp.save({"model": {"blocks": [0, value]}}, store)
    assert list(store.list()) == []


class Config(dict[str, Any]):
    """A dict by another name."""


class Registry(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, **items: Any) -> None:
        self.items_of = items

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


def test_mappings_of_all_kinds() -> None:
    def state(value: int) -> dict[str, Any]:
        return {
            "config": Config(n=value, w=torch.full((2,), value)),
            "proxy": MappingProxyType({"n": value, "w": torch.full((2,), value)}),
            "registry": Registry(inner=Registry(n=value)),
            "user": collections.UserDict(a=value),
            "chain": collections.ChainMap({"a": value}, {"b": value}),
        }

    store = MemoryStore()
    dcp.save(MappingProxyType(state(1)), store)
    assert dcp.open(store).state_dict()["config"]["n"] == 1
    into = state(0)
    kept = into["config"], into["user"]
    tensors = into["config"]["w"], into["proxy"]["w"]
    dcp.load(into, store)
    assert (into["config"], into["user"]) == kept
    assert into["config"] is kept[0]
    assert type(into["user"]) is collections.UserDict
    assert [part["n"] for part in (into["config"], into["proxy"], into["registry"]["inner"])] == [
        1
    ] * 3
    assert all(tensor.tolist() == [1, 1] for tensor in tensors)
    assert into["proxy"]["w"] is tensors[1]
    assert dict(into["chain"]) == {"a": 1, "b": 1}


def test_a_mapping_that_cannot_be_changed_takes_tensors_only() -> None:
    store = MemoryStore()
    dcp.save({"w": torch.ones(2), "n": 1}, store)
    weight = torch.zeros(2)
    with pytest.raises(LayoutMismatch, match=r"values were saved \(n\), and a Registry cannot"):
        dcp.load(Registry(w=weight, n=0), store)
    assert weight.tolist() == [0, 0]
    dcp.load(Registry(w=weight), store, select="w")
    assert weight.tolist() == [1, 1]


def test_streams_of_bytes() -> None:
    store = MemoryStore()
    stream = io.BytesIO(b"extra\x00state")
    stream.seek(3)
    dcp.save({"s": stream, "t": stream}, store)
    into: dict[str, Any] = {"s": io.BytesIO(), "t": None}
    dcp.load(into, store)
    assert into["s"].read() == b"extra\x00state"
    assert into["t"] == b"extra\x00state"
    assert stream.tell() == 3


@pytest.mark.parametrize("state", [None, [torch.ones(1)], torch.ones(1), 3])
def test_what_is_no_state_is_refused_and_replaces_nothing(state: Any) -> None:
    store = MemoryStore()
    dcp.save({"a": 1}, store)
    with pytest.raises(Unsavable, match="a state to save is a dict, or an object with state_dict"):
        dcp.save(state, store, overwrite=True)
    with pytest.raises(LayoutMismatch, match="a state to load into is a dict, or an object"):
        dcp.load(state, store)
    assert dcp.open(store).state_dict() == {"a": 1}


def test_an_object_alone() -> None:
    net, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    store = MemoryStore()
    dcp.save(net, store)
    assert set(dcp.load(fresh, store).loaded) == {"weight", "bias"}
    assert torch.equal(fresh.weight, net.weight)
    optimizer = torch.optim.Adam(net.named_parameters(), lr=0.5)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store = MemoryStore()
    dcp.save(optimizer, store)
    assert "state/bias/exp_avg" in dcp.open(store)
    other = torch.optim.Adam(reversed(list(fresh.named_parameters())))
    dcp.load(other, store)
    assert other.param_groups[0]["lr"] == 0.5
    assert torch.equal(other.state[fresh.bias]["exp_avg"], optimizer.state[net.bias]["exp_avg"])


def test_no_path_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (dcp.save, dcp.load):
        with pytest.raises(CheckpointError, match="the path of a store is empty"):
            call({"a": 1}, "")
    assert list(tmp_path.iterdir()) == []


def test_a_container_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(Unsavable, match="holds itself"):
        dcp.save(state, MemoryStore())


def test_pickle_only_for_those_who_insist_twice() -> None:
    store = MemoryStore()
    dcp.save({"thing": Thing(), "step": 3}, store, allow_pickle=True)
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        dcp.load({"thing": None, "step": 0}, store)
    loaded: dict[str, Any] = {"thing": None, "step": 0}
    dcp.load(loaded, store, allow_pickle=True)
    assert loaded["thing"].x == 1


def test_no_pickle_runs_on_a_default_save_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit hook sees every unpickling by C code; pickling has no event and is made to fail."""
    seen: list[str] = []
    active = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if active and event.startswith("pickle."):
            seen.append(event)

    sys.addaudithook(hook)  # cannot be removed, hence the switch

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was pickled")

    monkeypatch.setattr("pickle.dumps", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"m": model, "o": optimizer, "t": (1, b"x", {5: None}), "np": np.arange(3)}
    store = MemoryStore()
    dcp.save(state, store)
    fresh = torch.nn.Linear(3, 2)
    dcp.load(
        {
            "m": fresh,
            "o": torch.optim.AdamW(fresh.parameters()),
            "t": (0, b"", {5: 1}),
            "np": np.zeros(3, dtype=int),
        },
        store,
    )
    active = False
    assert torch.equal(fresh.weight, model.weight)
    assert seen == []


def test_views_are_saved_as_views() -> None:
    base = torch.arange(1_000_000.0)
    store = MemoryStore()
    dcp.save({"v": base[10:20], "t": base[:6].reshape(2, 3).T, "e": torch.ones(1).expand(4)}, store)
    assert sum(info.size for info in store.list()) < 10_000
    checkpoint = dcp.open(store)
    assert torch.equal(checkpoint["v"][...], base[10:20])
    assert torch.equal(checkpoint["t"][...], base[:6].reshape(2, 3).T)
    assert checkpoint["e"][...].tolist() == [1, 1, 1, 1]


def test_conjugate_and_negative_views() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    store = MemoryStore()
    dcp.save({"c": z.conj(), "n": z.conj().imag}, store)
    into = {"c": torch.zeros(3, dtype=torch.complex64).conj(), "n": torch.zeros(3)}
    dcp.load(into, store)
    assert torch.equal(into["c"].resolve_conj(), z.conj().resolve_conj())
    assert torch.equal(into["n"], z.conj().imag.resolve_neg())


def test_strict_reports_what_is_missing_and_what_is_left_over() -> None:
    store = MemoryStore()
    dcp.save({"a": torch.ones(2), "b": {"c": torch.ones(1), "d": 4}}, store)
    state: dict[str, Any] = {"a": torch.zeros(2), "x": {"y": torch.zeros(1), "z": 0}}
    with pytest.raises(LayoutMismatch, match=r"x/y, x/z.*b/c, b/d"):
        dcp.load(state, store)
    assert state["a"].tolist() == [0, 0], "nothing was loaded"
    report = dcp.load(state, store, strict=False)
    assert state["a"].tolist() == [1, 1]
    assert report.missing == ("x/y", "x/z")
    assert report.unexpected == ("b/c", "b/d")
    assert report.loaded == ("a",)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (torch.zeros(3), r"a: saved as float32\[2\], wanted as float32\[3\]"),
        (torch.zeros(2, dtype=torch.float64), "wanted as float64"),
        (5, "tensors were saved"),
        ({"inner": 1}, "a dict is wanted"),
    ],
)
def test_a_leaf_that_does_not_fit_is_refused_before_anything_changes(
    wanted: Any, message: str
) -> None:
    store = MemoryStore()
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, store)
    state: dict[str, Any] = {"b": torch.zeros(2), "a": wanted}
    with pytest.raises(LayoutMismatch, match=message):
        dcp.load(state, store, strict=False)
    assert state["b"].tolist() == [0, 0]


def test_a_destination_that_overlaps_itself_is_refused() -> None:
    store = MemoryStore()
    dcp.save({"a": torch.ones(4)}, store)
    with pytest.raises(LayoutMismatch, match="overlaps itself"):
        dcp.load({"a": torch.zeros(1).expand(4)}, store)


def test_loading_is_seen_by_autograd() -> None:
    store = MemoryStore()
    dcp.save({"w": torch.ones(2)}, store)
    w = torch.zeros(2, requires_grad=True)
    out = (w * w).sum()
    dcp.load({"w": w}, store)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_lazy_slices_are_those_of_numpy() -> None:
    x = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    store = MemoryStore()
    dcp.save({"x": x}, store)
    lazy = dcp.open(store)["x"]
    for index in [
        ...,
        0,
        -1,
        slice(None, None, 2),
        (slice(1), ..., -1),
        (1, slice(-2, None), slice(0, 4, 3)),
        (slice(5, 2), 0),
        (0, 0, 0),
        (..., slice(1, 3)),
    ]:
        assert torch.equal(lazy[index], x[index]), index  # pyright: ignore[reportArgumentType]
    for bad in [2, (0, 0, 0, 0), (..., ...)]:
        with pytest.raises(IndexError):
            lazy[bad]  # pyright: ignore[reportArgumentType]
    with pytest.raises(LayoutMismatch, match="positive step"):
        lazy[::-1]
    with pytest.raises(KeyError, match="no tensor"):
        dcp.open(store)["y"]


def opened(state: dict[str, Any]) -> dcp.Checkpoint:
    """An open checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return dcp.open(store)


def test_lazy_lists_and_masks_read_their_rows_only() -> None:
    state = {"w": torch.arange(60.0).reshape(10, 6), "s": torch.tensor(3.0)}
    lazy = opened(state)["w"]
    whole = state["w"]
    rows = torch.arange(10) % 3 == 0
    masks = (rows, rows.numpy(), rows.tolist())
    lists = ([7, 0, 1, -1], torch.tensor([7, 7]), np.array([2, 9]), [], torch.zeros(10).bool())
    for index in (*masks, *lists):
        expected = whole[torch.as_tensor(index, dtype=None if len(index) else torch.long)]
        assert torch.equal(lazy[index], expected)
    assert torch.equal(lazy[2:9:3, [5, 0]], whole[2:9:3, [5, 0]])
    assert torch.equal(
        lazy[
            ...,
            [1],
        ],
        whole[..., [1]],
    )
    assert torch.equal(lazy[3, [1, 4]], whole[3, [1, 4]])
    for bad in ([10], [True] * 9, ([0], [0])):
        with pytest.raises(IndexError, match="'w'"):
            lazy[bad]
    strange: tuple[Any, ...] = ("a", [[0, 1]], [0.5], None)
    for index in strange:
        with pytest.raises(TypeError, match="'w'"):
            lazy[index]


def test_lazy_tensors_are_like_tensors() -> None:
    state = {"w": torch.arange(60).reshape(10, 6), "h": torch.ones(3, dtype=torch.bfloat16)}
    checkpoint = opened(state)
    lazy = checkpoint["w"]
    assert (lazy.numel(), lazy.nbytes, lazy.ndim) == (60, 480, 2)
    assert np.array_equal(np.asarray(lazy), state["w"].numpy())
    assert np.asarray(lazy, dtype=np.float32).dtype == np.float32
    assert lazy.to(torch.float32).dtype == torch.float32
    assert checkpoint["h"].to("cpu", torch.float64).sum() == 3
