"""The checkpoint says what the state of an object is: a fresh one may hold less, or others."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, Shard, distribute_tensor
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import run_on_mesh
from ...ranks import RanksFailed


class Holder:
    """An object whose state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state."""
        self.value = state["value"]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        same = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return same and bool((one == other).all())
    if isinstance(one, dict):
        keys = type(one) is type(other) and list(one) == list(other)
        return keys and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        lengths = type(one) is type(other) and len(one) == len(other)  # pyright: ignore
        return lengths and all(map(_same, one, other))  # pyright: ignore
    return type(one) is type(other) and one == other


_STATES: dict[str, tuple[Any, Any]] = {
    "a buffer that grows": (torch.ones(5, 3), torch.zeros(0, 3)),
    "another dtype": (torch.ones(5, dtype=torch.bfloat16), torch.zeros(5)),
    "an array": (np.arange(4, dtype=np.int16), np.zeros(0)),
    "nothing yet": ({"pos": 7, "seen": [1, 2], "mean": torch.ones(2)}, None),
    "an empty dict": ({"a": torch.ones(2), "b": {"c": 1}}, {}),
    "an empty list": ([torch.ones(2), [3.0]], []),
    "a longer list": ([1.0, 2.0], [0.0]),
    "a shorter list of tensors": ([torch.ones(2)], [torch.zeros(2), torch.zeros(3)]),
    "other keys": ({"x": 1, "t": torch.ones(1)}, {"old": 1, "gone": torch.ones(3)}),
    "a tuple for a list": (([1], torch.ones(2)), [[0], torch.zeros(2)]),
    "a number for a tensor": (5, torch.zeros(2)),
    "a tensor for a number": (torch.ones(2), 5),
    "None": (None, {"a": torch.zeros(2)}),
}


@pytest.mark.parametrize("name", _STATES)
def test_an_object_is_given_what_was_saved(name: str) -> None:
    saved, fresh = _STATES[name]
    store = MemoryStore()
    dcp.save({"o": Holder(saved)}, store)
    for value in (fresh, saved):
        loaded = Holder(value)
        dcp.load({"o": loaded}, store)
        assert _same(loaded.value, saved), loaded.value


def test_tensors_of_an_object_that_fit_are_filled_in_place() -> None:
    store = MemoryStore()
    dcp.save({"o": Holder([torch.ones(3), torch.ones(2)])}, store)
    live = torch.zeros(3)
    loaded = Holder([live, torch.zeros(7)])
    dcp.load({"o": loaded}, store)
    assert loaded.value[0] is live
    assert live.tolist() == [1.0, 1.0, 1.0]


class Lookahead:
    """A wrapper of an optimizer, which has its state and some of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.slow: list[torch.Tensor] | None = None

    def step(self) -> None:
        """Step, and keep slow weights from then on."""
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.slow = [p.detach() * 0.5 for p in self.optimizer.param_groups[0]["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both."""
        return {"inner": self.optimizer.state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of both."""
        self.optimizer.load_state_dict(state["inner"])
        self.slow = state["slow"]


def test_wrappers_of_optimizers() -> None:
    def make() -> Lookahead:
        torch.manual_seed(0)
        return Lookahead(torch.optim.AdamW(nn.Linear(2, 3).parameters()))

    store, used, fresh = MemoryStore(), make(), make()
    used.step()
    dcp.save({"o": used}, store)
    dcp.load({"o": fresh}, store)
    assert fresh.slow is not None
    assert used.slow is not None
    assert all(map(torch.equal, fresh.slow, used.slow))
    found, wanted = (o.optimizer.state_dict()["state"] for o in (fresh, used))
    assert found.keys() == wanted.keys() == {0, 1}
    for number, entry in wanted.items():
        assert all(found[number][name].equal(value) for name, value in entry.items())


class OfRank:
    """An object whose state has a name of the rank, and passes over that of others."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state."""
        self.state = state


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("fresh", [b"", {"t": torch.zeros(2)}])
def test_what_an_object_has_and_the_checkpoint_has_not_is_missing(
    fresh: Any, is_packed: bool
) -> None:
    store, history = MemoryStore(), list(range(2000)) if is_packed else [0]
    dcp.save({"data": OfRank({"rank_0": b"7", "history": history})}, store)
    loaded = OfRank({"rank_1": fresh, "history": []})
    with pytest.raises(LayoutMismatch, match="data/rank_1"):
        dcp.load({"data": loaded}, store)
    assert loaded.state["rank_1"] is fresh
    report = dcp.load({"data": loaded}, store, strict=False)
    assert all(name.startswith("data/rank_1") for name in report.missing)
    assert report.missing
    assert loaded.state == {"rank_0": b"7", "rank_1": fresh, "history": history}


def test_schedulers_of_other_versions_have_other_names() -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        return lr_scheduler.StepLR(optimizer, 2)

    store = MemoryStore()
    dcp.save({"s": make()}, store)
    later = make()
    later.of_a_later_version = 3
    dcp.load({"s": later}, store)
    assert later.of_a_later_version == 3


def test_names_are_changed_by_patterns() -> None:
    store = MemoryStore()
    saved = {f"layers.{i}.w": torch.full((2,), float(i)) for i in range(3)}
    dcp.save({"net": saved | {"head": torch.ones(1)}, "ema": saved, "step": 7}, store)
    state: dict[str, Any] = {
        "model": {f"h.{i}.w": torch.zeros(2) for i in range(3)} | {"head": torch.zeros(1)},
        "step": 0,
    }
    rename = {"model/h.{i}.{rest*}": "net/layers.{i}.{rest*}", "model": "net"}
    report = dcp.load(state, store, rename=rename, strict=False)
    assert not report.missing
    assert all(state["model"][f"h.{i}.w"].eq(i).all() for i in range(3))
    assert state["model"]["head"].item() == 1
    assert state["step"] == 7
    other = {"model": nn.ParameterDict({f"layers_{i}": torch.zeros(2) for i in range(3)})}
    rename = {"model/layers_{i}": "ema/layers.{i}.w", "model/{rest*}": "ema/{rest*}"}
    dcp.load(other, store, rename=rename, strict=False)
    assert all(other["model"][f"layers_{i}"].eq(i).all() for i in range(3))
    with pytest.raises(LayoutMismatch, match=r"has no names|are no names in the state"):
        dcp.load({"step": 0}, store, rename={"modell/{rest*}": "net/{rest*}"}, strict=False)
    with pytest.raises(LayoutMismatch, match=r"has layer, which the first has not"):
        dcp.load({"step": 0}, store, rename={"h.{i}": "l.{layer}"}, strict=False)


def test_an_object_that_is_renamed_to_the_root_takes_its_own_names() -> None:
    """What else lies in the root is of other parts of the state."""
    store = MemoryStore()
    dcp.save({"w": torch.ones(2), "optimizer": {"m": torch.full((2,), 2.0), "n": 3}}, store)
    state: dict[str, Any] = {
        "model": OfRank({"w": torch.zeros(2)}),
        "optimizer": OfRank({"m": torch.zeros(2), "n": 0}),
    }
    dcp.load(state, store, rename={"model": ""}, strict="state")
    assert list(state["model"].state) == ["w"]
    assert state["model"].state["w"].tolist() == [1.0, 1.0]
    assert state["optimizer"].state["m"].tolist() == [2.0, 2.0]
    assert state["optimizer"].state["n"] == 3


def test_a_part_of_an_object_that_is_renamed() -> None:
    store = MemoryStore()
    dcp.save({"o": OfRank({"old": torch.ones(2), "n": 3, "in": {"old": 4}})}, store)
    loaded = OfRank({"new": torch.zeros(2), "n": 0, "in": {"new": 0}})
    dcp.load({"o": loaded}, store, rename={"o/new": "o/old", "o/in/new": "o/in/old"})
    assert _same(loaded.state, {"new": torch.ones(2), "n": 3, "in": {"new": 4}})


@pytest.mark.parametrize("fresh", [None, {}])
def test_best_weights_that_there_are_not_yet(fresh: Any) -> None:
    store = MemoryStore()
    best = {"w": torch.ones(2), "score": 0.5}
    dcp.save({"best": best, "n": 3}, store)
    state: dict[str, Any] = {"best": fresh, "n": 0}
    dcp.load(state, store)
    assert _same(state["best"], best)


_EXTRA: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "tensor": (
        lambda b: torch.tensor(list(b), dtype=torch.uint8),
        lambda v: bytes(v.tolist()),
    ),
    "bytesio": (io.BytesIO, lambda v: v.getvalue()),
    "bytes": (bytes, bytes),
    "none": (lambda b: b or None, bytes),
    "dict": (
        lambda b: {"amax": torch.tensor(list(b)), "n": 3} if b else {},
        lambda v: bytes(v["amax"].tolist()),
    ),
    "list": (lambda b: [torch.tensor(list(b))] if b else [], lambda v: bytes(v[0].tolist())),
}


@pytest.mark.parametrize("kind", _EXTRA)
def test_extra_state_of_another_size(kind: str) -> None:
    make, read = _EXTRA[kind]

    class Scaled(nn.Module):
        def __init__(self, extra: bytes) -> None:
            super().__init__()
            self.weight, self.extra = nn.Parameter(torch.zeros(4)), extra
            self.got: Any = None

        def get_extra_state(self) -> Any:
            return make(self.extra)

        def set_extra_state(self, state: Any) -> None:
            self.got = state

    store = MemoryStore()
    dcp.save({"model": nn.Sequential(Scaled(bytes(range(20))))}, store)
    loaded = Scaled(b"")
    dcp.load({"model": nn.Sequential(loaded)}, store)
    assert read(loaded.got) == bytes(range(20))


def test_parameters_and_buffers_of_modules_have_to_agree() -> None:
    store = MemoryStore()
    dcp.save({"model": nn.BatchNorm1d(3)}, store)
    with pytest.raises(LayoutMismatch, match=r"model/running_mean: saved as float32\[3\]"):
        dcp.load({"model": nn.BatchNorm1d(4)}, store)


@pytest.mark.parametrize("order", ["mos", "som"])
@pytest.mark.parametrize("groups", [1, 2])
def test_schedulers_of_rates_that_are_tensors(order: str, groups: int) -> None:
    """A fresh ``SequentialLR`` holds one tensor in places that were saved apart."""

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model, rate = nn.Linear(2, 2), torch.tensor(0.1)
        params: list[Any] = [{"params": [model.weight]}, {"params": [model.bias], "lr": rate * 2}]
        given = params if groups == 2 else model.parameters()
        optimizer = torch.optim.Adam(given, lr=rate, foreach=False)
        parts: list[Any] = [
            lr_scheduler.LinearLR(optimizer, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ]
        schedule = lr_scheduler.SequentialLR(optimizer, parts, [3])
        return {"m": model, "o": optimizer, "s": schedule}

    def rates(state: dict[str, Any], steps: int) -> list[float]:
        found: list[float] = []
        for _ in range(steps):
            state["m"](torch.ones(2)).sum().backward()
            state["o"].step()
            state["s"].step()
            found += [float(group["lr"]) for group in state["o"].param_groups]
        return found

    was, store = make(), MemoryStore()
    rates(was, 7)
    dcp.save({key: was[key] for key in order}, store)
    now = make()
    dcp.load({key: now[key] for key in order}, store)
    assert rates(now, 9) == rates(was, 9)


def test_a_distributed_tensor_that_an_object_has_not_yet_is_refused() -> None:
    store = MemoryStore()

    def run(mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        weights = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        dcp.save({"o": Holder([weights])}, store, process_group=group)
        loaded = Holder([distribute_tensor(torch.zeros(4), mesh, [Shard(0)])])
        dcp.load({"o": loaded}, store, process_group=group)
        assert loaded.value[0].full_tensor().tolist() == [1.0] * 4
        dcp.load({"o": Holder([])}, store, process_group=group)

    with pytest.raises(RanksFailed, match="it was a distributed tensor, and the object has none"):
        run_on_mesh((2,), run)
