"""Objects that stand for their state dict: when they are asked, and what they are handed."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.tensors.visiting import after_its_parts, visit
from dtckpt.errors import RankFailed, Unsavable
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks


class Together:
    """An object whose state is worked out, and handed out, by all ranks together."""

    def __init__(self, size: int, group: Any, start: float) -> None:
        self.group = group
        self.state = torch.full((size,), start)

    def added(self) -> torch.Tensor:
        """The sum over the ranks; ranks that bring another object get an error, or wait."""
        total = self.state.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The sum of the ranks' states."""
        return {"sum": self.added()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, and look whether others have the same."""
        self.state = state_dict["sum"]
        assert torch.equal(self.added(), self.state * dist.get_world_size(self.group))


def test_ranks_that_list_their_objects_in_another_order() -> None:
    store = MemoryStore()

    def state(rank: int, group: Any, start: float) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "b": Together(3, group, start),
            "a": {"y": Together(5, group, start), "x": Together(7, group, start)},
            "c": [Together(2, group, start)],
        }
        turned = dict(reversed(parts.items()))
        turned["a"] = dict(reversed(parts["a"].items()))
        return turned if rank else parts

    def run(rank: int, group: Any) -> None:
        dcp.save(state(rank, group, 1.0 + rank), store, process_group=group)
        loaded = state(rank, group, 0.0)
        dcp.load(loaded, store, process_group=group)
        for part in (loaded["a"]["x"], loaded["a"]["y"], loaded["b"], loaded["c"][0]):
            assert part.state.tolist() == [3.0] * len(part.state)

    run_ranks(2, run, timeout=timedelta(seconds=60))


def test_a_rank_that_is_stuck_in_an_object_is_named() -> None:
    store = MemoryStore()
    release = threading.Event()

    class Stuck:
        def __init__(self, at: str) -> None:
            self.at = at

        def state_dict(self) -> dict[str, Any]:
            if self.at == "save":
                release.wait(120)
            return {"n": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if self.at == "load":
                release.wait(120)

    def run(rank: int, group: Any, at: str) -> None:
        part = Stuck(at if rank else "nowhere")
        options: dict[str, Any] = {
            "process_group": group,
            "timeout": timedelta(seconds=0.5),
        }
        try:
            if at == "save":
                dcp.save({"part": part}, MemoryStore(), **options)
            else:
                dcp.load({"part": part}, store, **options)
        finally:
            release.set()

    dcp.save({"part": Stuck("nowhere")}, store)
    for at in ("load", "save"):
        release.clear()
        with pytest.raises(RanksFailed) as failed:
            run_ranks(2, lambda rank, group, at=at: run(rank, group, at))
        assert isinstance(failed.value.errors[0], RankFailed)
        assert "rank 1" in str(failed.value.errors[0])


def test_objects_within_objects() -> None:
    calls: list[str] = []

    class Part:
        def __init__(self, name: str, **parts: Any) -> None:
            self.name = name
            self.parts = parts

        def state_dict(self) -> dict[str, Any]:
            calls.append(f"get {self.name}")
            return {**self.parts, "n": len(self.name)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            calls.append(f"set {self.name}")
            assert state_dict["n"] == len(self.name)

    state = {"z": Part("z"), "m": Part("m", y=Part("m/y"), x=Part("m/x")), "m.": Part("m.")}
    store = MemoryStore()
    dcp.save(state, store)
    assert calls == ["get m", "get m/x", "get m/y", "get m.", "get z"]
    calls.clear()
    dcp.load(state, store)
    assert calls[5:] == ["set m.", "set m/x", "set m/y", "set m", "set z"]
    assert sorted(["a/b", "a", "a.b", "a/b/c"], key=after_its_parts) == [
        "a.b",
        "a/b/c",
        "a/b",
        "a",
    ]


def test_containers_that_hold_themselves() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    twice = {"x": 1}
    assert visit({"a": twice, "b": [twice, twice]}, 0).objects == {}
    with pytest.raises(Unsavable, match="a/1/again: the container holds itself"):
        dcp.save({"a": loop}, MemoryStore())


class Keeper:
    """Hands out its own containers, as schedulers do."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def state_dict(self) -> dict[str, Any]:
        """The attributes."""
        return {"first": self.values, "second": self.values, "deep": {"values": self.values}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was given."""
        assert self.values == [0], "changed before"
        self.given = state_dict


def test_containers_of_an_object_are_its_own() -> None:
    store = MemoryStore()
    dcp.save({"k": {"first": [1], "second": [2], "deep": {"values": [3]}}}, store)
    keeper = Keeper(0)
    dcp.load({"k": keeper}, store)
    assert keeper.given == {"first": [1], "second": [2], "deep": {"values": [3]}}


def test_one_container_at_two_places() -> None:
    store = MemoryStore()
    dcp.save({"a": [1, {"x": 1}], "b": [2, {"x": 2}], "c": {"x": 1, "y": 5}}, store)
    inner: dict[str, Any] = {"x": 0}
    outer: list[Any] = [0, inner]
    state: dict[str, Any] = {"a": outer, "b": outer, "c": inner}
    dcp.load(state, store, strict=False)
    assert state == {"a": [1, {"x": 1}], "b": [2, {"x": 2}], "c": {"x": 1}}
    assert state["a"] is outer
    assert state["a"][1] is inner


def test_one_container_at_two_places_stays_one_where_that_is_right() -> None:
    store = MemoryStore()
    weight = torch.ones(2)
    dcp.save({"a": {"w": weight, "n": [1]}, "b": {"w": weight, "n": [1]}}, store)
    shared: dict[str, Any] = {"w": torch.zeros(2), "n": [0]}
    state = {"a": shared, "b": shared}
    dcp.load(state, store)
    assert state["a"] is shared
    assert state["b"] is shared
    assert shared["n"] == [1]
    assert torch.equal(shared["w"], weight)
