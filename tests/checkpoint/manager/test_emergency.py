"""What is done in the time that is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.agreement.gate import Agreed
from dtckpt.checkpoint.files.places import MANIFEST
from dtckpt.checkpoint.manager.emergency import (
    Emergency,
    UnderWay,
    agree_on_way,
    report_in_time,
    way_for,
)
from dtckpt.checkpoint.ranks.together import closing, ranks_of
from dtckpt.errors import Cancelled, Timeout
from dtckpt.storage import Fault, FaultyStore, MemoryStore, Rule
from tests.checkpoint.ranks.plain_groups import run

NOW = Agreed(("SIGTERM",))


def left(seconds: float) -> Agreed:
    return Agreed(("SIGTERM",), time.monotonic() + seconds)


def test_the_slowest_rank_counts() -> None:
    fast, slow = UnderWay(4.0, 99, 100), UnderWay(4.0, 20, 100)
    assert way_for([fast], 12.0, 1.5) == "wait"
    assert way_for([fast, slow], 35.0, 1.5) == "supersede"
    assert way_for([fast, slow], 45.0, 1.5) == "wait"
    assert way_for([fast, slow], 29.0, 1.5) == "finish"


def test_what_has_written_nothing_makes_way() -> None:
    assert way_for([UnderWay(3.0, 0, 100), UnderWay(3.0, 50, 100)], 5.0, 1.5) == "supersede"
    assert way_for([UnderWay(3.0, 0, 0)], 5.0, 1.5) == "wait"
    assert way_for([], 0.0, 1.5) == "wait"


@given(st.floats(0.1, 100), st.integers(1, 100), st.floats(0, 100), st.floats(1, 4))
def test_more_time_never_gives_an_older_step(
    seconds: float, written: int, time_left: float, margin: float
) -> None:
    rank = [UnderWay(seconds, written, 100)]
    order = ("finish", "supersede", "wait")
    ways = [order.index(way_for(rank, time_left + more, margin)) for more in range(0, 500, 10)]
    assert ways == sorted(ways)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="deadline is"):
        Emergency(deadline=timedelta(0))
    with pytest.raises(ValueError, match="margin is"):
        Emergency(margin=0.5)


class Slow(Fault):
    """Nothing is written to ``store`` before it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.store = FaultyStore(MemoryStore(), [Rule(self, op="create")])

    def before(self) -> None:
        assert self.may.wait(30)


STATE = {"w": torch.arange(1000.0)}


def test_a_save_that_ends_in_time_is_reported() -> None:
    handle = dcp.async_save(STATE, store := MemoryStore(), no_dist=True)
    assert report_in_time(handle, left(30.0)).url == store.url
    handle = dcp.async_save(STATE, MemoryStore(), no_dist=True)
    report_in_time(handle, NOW)


def test_a_save_that_does_not_is_called_off_and_nothing_comes_of_it() -> None:
    slow = Slow()
    handle = dcp.async_save(STATE, slow.store, no_dist=True)
    with pytest.raises(Timeout, match=r"the time for this save \(SIGTERM\) is over"):
        report_in_time(handle, left(0.05))
    slow.may.set()
    assert isinstance(handle.exception(30), Cancelled)
    assert not slow.store.exists(MANIFEST)


def ways(size: int, make: Callable[[int], Agreed], slow: Slow | None) -> set[str]:
    def body(rank: int, group: Any) -> str:
        handle = None
        if slow is not None and rank == 0:
            handle = dcp.async_save(STATE, slow.store, no_dist=True)
        ranks = ranks_of(group, timeout=timedelta(seconds=30), purpose="save")
        with closing(ranks):
            return agree_on_way(ranks, handle, time.monotonic() - 5.0, make(rank), Emergency())

    return set(run(size, body).values())


def test_all_ranks_go_the_same_way() -> None:
    assert ways(3, lambda _: left(25.0), None) == {"wait"}
    slow = Slow()
    assert ways(3, lambda _: NOW, slow) == {"wait"}
    slow.may.set()
    slow = Slow()
    assert ways(3, lambda rank: left(25.0 + rank), slow) == {"supersede"}
    slow.may.set()
