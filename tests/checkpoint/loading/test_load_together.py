"""Loads of several ranks: what they tell each other, and what becomes of silent ones."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.loading.match import Match
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.state.collector import paused_collector
from dtckpt.errors import LayoutMismatch, RankFailed
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks


def test_a_rank_that_does_not_come_is_named_after_the_deadline() -> None:
    store = MemoryStore()
    dcp.save({"w": torch.ones(3)}, store.substore("step-1"))
    given_up = threading.Event()
    short = timedelta(seconds=0.3)

    def body(rank: int, group: Any) -> None:
        first = dcp.latest(store, process_group=group)
        assert first is not None
        if rank == 1:
            assert given_up.wait(30)
            return
        state = {"w": torch.zeros(3)}
        try:
            with pytest.raises(
                RankFailed, match="latest failed: rank 1 is lost: it showed no sign of life"
            ):
                dcp.latest(store, process_group=group, timeout=short)
            with pytest.raises(RankFailed, match="load: read manifest failed: rank 1 is lost"):
                dcp.load(state, store.substore("step-1"), process_group=group, timeout=short)
            assert not state["w"].any()
        finally:
            given_up.set()

    run_ranks(2, body)


def test_ranks_show_that_they_are_alive_while_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    num_files = 3

    def save(rank: int, group: Any) -> None:
        state = {f"t{i}": torch.ones(100) for i in range(num_files)}
        dcp.save(state, store, process_group=group)

    run_ranks(num_files, save)
    told: list[int] = []

    def tell_alive(self: GroupRanks) -> None:
        told.append(self.rank)

    monkeypatch.setattr(GroupRanks, "tell_alive", tell_alive)

    def load(_: int, group: Any) -> None:
        state = {f"t{i}": torch.zeros(100) for i in range(num_files)}
        dcp.load(state, store, process_group=group)

    run_ranks(2, load)
    assert min(told.count(0), told.count(1)) >= num_files, "once per read"


def test_a_load_that_fails_ends_like_one_that_does_not() -> None:
    store = MemoryStore()
    dcp.save({"w": torch.ones(3)}, store)

    def body(rank: int, group: Any) -> list[float]:
        for _ in range(3):
            with pytest.raises(LayoutMismatch):
                dcp.load({"w": torch.zeros(4)}, store, process_group=group)
        state = {"w": torch.zeros(3)}
        dcp.load(state, store, process_group=group)
        return state["w"].tolist()

    assert run_ranks(3, body) == [[1.0] * 3] * 3


@pytest.mark.parametrize("unexpected", [[], ["a"], ["b", "d"], ["a", "b", "c", "d"]])
def test_unexpected_leaves_travel_as_bits(unexpected: list[str]) -> None:
    found = Match(leaves=["a", "b", "c", "d"], unexpected=unexpected)
    assert found.names_of_mask(found.unexpected_mask()) == unexpected


def test_only_what_no_rank_wants_is_unexpected() -> None:
    store = MemoryStore()
    dcp.save({"a": 1, "b": 1, "c": {"d": 1, "e": 1}}, store)

    def load(rank: int, group: Any) -> Any:
        wanted: dict[str, Any] = {"a": 0} if rank else {"c": {"e": 0}}
        return dcp.load(wanted, store, process_group=group, strict=False).unexpected

    assert run_ranks(2, load) == [("b", "c/d")] * 2
    with pytest.raises(RanksFailed, match="not asked for: c/d"):
        run_ranks(2, lambda r, g: dcp.load({"c": {"e": 0}, "ab"[r]: 0}, store, process_group=g))


def test_the_collector_is_paused_once_for_all_threads() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled(), "left as it was"
    finally:
        gc.enable()
