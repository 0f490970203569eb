"""Agreements of ranks that are threads, over real stores."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dtckpt.checkpoint.agreement.agreement import Agreement
from dtckpt.checkpoint.agreement.gate import Agreed
from dtckpt.checkpoint.agreement.register import Register, meet
from dtckpt.checkpoint.agreement.voter import ASKED
from dtckpt.errors import RankFailed
from tests.checkpoint.ranks.plain_groups import Group, run
from tests.ranks import run_ranks
from tests.waiting import wait_for

_c10d: Any = dist
POLL = timedelta(milliseconds=20)
TIMEOUT = timedelta(seconds=30)


class Loop:
    """The loop of a training, which ends once it has saved so often."""

    def __init__(self, agreement: Agreement, pause: float = 0.001) -> None:
        self.agreement = agreement
        self.saves: list[tuple[int, Agreed]] = []
        self.num_calls = 0
        self._pauses = threading.Event()
        self._pause = pause

    def call(self) -> None:
        agreed = self.agreement.at_call()
        if agreed is not None:
            self.saves.append((self.num_calls, agreed))
        self.num_calls += 1
        self._pauses.wait(self._pause)

    def until(self, num_saves: int) -> list[tuple[int, tuple[str, ...]]]:
        while len(self.saves) < num_saves:
            self.call()
        return [(number, agreed.reasons) for number, agreed in self.saves]


def asked_on(who: int) -> Callable[[int, Any], list[tuple[int, tuple[str, ...]]]]:
    def body(rank: int, group: Any) -> list[tuple[int, tuple[str, ...]]]:
        with Agreement(group, poll=POLL, timeout=TIMEOUT) as agreement:
            loop = Loop(agreement, 0.001 * (1 + rank))
            for _ in range(3):
                loop.call()
            if rank == who:
                agreement.ask("first")
            loop.until(1)
            if rank == 0:
                agreement.ask("second")
            return loop.until(2)

    return body


@pytest.mark.parametrize("who", [0, 2])
def test_ranks_with_a_store_save_at_the_same_calls(who: int) -> None:
    found = run(3, asked_on(who))
    assert found[0] == found[1] == found[2]
    assert [reasons for _, reasons in found[0]] == [("first",), ("second",)]


def test_ranks_without_a_store_save_at_the_same_calls() -> None:
    found = run_ranks(3, asked_on(1))
    assert found[0] == found[1] == found[2]
    assert [reasons for _, reasons in found[0]] == [("first",), ("second",)]


def test_a_store_of_files_serves_too(tmp_path: Any) -> None:
    found = run(2, asked_on(1), _c10d.FileStore(str(tmp_path / "store"), 2))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_all_ranks_asked_at_once_make_one_save() -> None:
    def body(rank: int, group: Any) -> Any:
        with Agreement(group, poll=POLL, timeout=TIMEOUT) as agreement:
            loop = Loop(agreement)
            agreement.ask("SIGTERM", timedelta(seconds=25))
            found = loop.until(1)
            limit = loop.saves[0][1].seconds_left()
            assert limit is not None
            assert 0 < limit <= 25
            return found

    found = run(4, body)
    assert found[0] == found[1] == found[2] == found[3]
    ((_, reasons),) = found[0]
    assert reasons == ("SIGTERM",)


def test_several_agreements_of_one_group_do_not_mix() -> None:
    def body(rank: int, group: Any) -> Any:
        with (
            Agreement(group, poll=POLL, timeout=TIMEOUT) as one,
            Agreement(group, poll=POLL, timeout=TIMEOUT) as other,
        ):
            if rank == 1:
                other.ask("asked")
            loop, unasked = Loop(other), Loop(one, 0.0)
            while not loop.saves:
                unasked.call()
                loop.call()
            return loop.until(1), unasked.saves

    found = run(2, body)
    assert found[0] == found[1]
    assert found[0][1] == []


def test_one_rank_is_answered_at_its_next_call() -> None:
    for agreement in (
        Agreement(),
        Agreement(Group(_c10d.HashStore(), 0, 1)),
        Agreement("no group", no_dist=True),
    ):
        assert agreement.at_call() is None
        agreement.ask("a", timedelta(seconds=9))
        agreement.ask("b")
        agreement.ask("a")
        agreed = agreement.at_call()
        assert agreed is not None
        assert agreed.reasons == ("a", "b")
        assert agreed.limit is not None
        assert agreement.at_call() is None
        agreement.close()
        agreement.ask("late")
        assert agreement.at_call() is None
        agreement.close()


def test_a_rank_that_is_gone_is_named_by_all_others() -> None:
    def body(rank: int, group: Any) -> str:
        timeout = timedelta(seconds=1)
        if rank == 1:
            meet(group, no_dist=False, timeout=TIMEOUT)  # and nobody looks at the store
            return ""
        with Agreement(group, poll=POLL, timeout=timeout) as agreement:
            if rank == 2:
                agreement.ask("SIGTERM")
            with pytest.raises(RankFailed) as caught:
                Loop(agreement).until(1)
            assert agreement.at_call() is None
            return str(caught.value)

    found = run(3, body)
    assert found[0] == found[2]
    assert "rank 1 lost" in found[0]


def test_the_deadline_of_what_is_asked_bounds_the_waiting_too() -> None:
    def body(rank: int, group: Any) -> str:
        if rank == 1:
            meet(group, no_dist=False, timeout=TIMEOUT)
            return ""
        with Agreement(group, poll=POLL, timeout=timedelta(hours=1)) as agreement:
            agreement.ask("SIGTERM", timedelta(seconds=0.5))
            with pytest.raises(RankFailed) as caught:
                Loop(agreement).until(1)
            return str(caught.value)

    assert "rank 1 lost" in run(2, body)[0]


def test_who_makes_no_more_calls_holds_nobody() -> None:
    closed = threading.Event()

    def body(rank: int, group: Any) -> int:
        with Agreement(group, poll=POLL, timeout=timedelta(hours=1)) as agreement:
            loop = Loop(agreement)
            for _ in range(5):
                loop.call()
            if rank == 0:
                agreement.close()
                closed.set()
                return 5
            assert closed.wait(20)
            agreement.ask("SIGTERM")
            for _ in range(100):
                loop.call()
            assert loop.saves == []
            return loop.num_calls

    assert run(2, body) == {0: 5, 1: 105}


def test_a_training_that_calls_no_more_disturbs_nobody() -> None:
    def body(rank: int, group: Any) -> int:
        with Agreement(group, poll=POLL, timeout=TIMEOUT) as agreement:
            agreement.ask("SIGTERM")
            return rank

    assert run(3, body) == {0: 0, 1: 1, 2: 2}


def test_all_ranks_are_needed_to_make_one() -> None:
    agreement: list[Agreement] = []
    group = Group(_c10d.HashStore(), 0, 2)
    with pytest.raises(RankFailed, match="rank 1 is lost"):
        agreement.append(Agreement(group, timeout=timedelta(seconds=0.5)))
    with pytest.raises(ValueError, match="poll is"):
        Agreement(group, poll=timedelta(0))


def test_a_group_of_another_size_under_the_same_name_agrees_anew() -> None:
    store = _c10d.HashStore()
    for size in (3, 2, 4):
        found = run(size, asked_on(size - 1), store)
        assert [found[rank] for rank in range(size)] == [found[0]] * size
        assert len(found[0]) == 2


def test_who_is_left_open_ends_with_its_group() -> None:
    def body(rank: int, group: Any) -> weakref.ref[Any]:
        agreement = Agreement(group, poll=POLL, timeout=TIMEOUT)
        _open.append(agreement)
        return weakref.ref(group)

    _open: list[Agreement] = []
    groups = run(2, body)
    gc.collect()
    assert [group() for group in groups.values()] == [None, None]
    for agreement in _open:
        agreement.ask("nobody hears it")
        assert agreement.at_call() is None
        agreement.close()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "dtckpt-agreement"]


def test_who_is_forgotten_ends_its_thread() -> None:
    def body(rank: int, group: Any) -> None:
        _kept.append(group)
        Agreement(group, poll=timedelta(hours=1), timeout=TIMEOUT)

    _kept: list[Any] = []
    run(2, body)
    wait_for(lambda: gc.collect() >= 0 and not threads())


def test_closing_waits_for_no_store_that_is_gone() -> None:
    server = _c10d.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    stores = [_c10d.TCPStore("localhost", server.port, None, False) for _ in range(2)]
    groups: list[Group] = []

    def body(rank: int, _: Any) -> Agreement:
        groups.append(Group(stores[rank], rank, 2))
        return Agreement(groups[-1], poll=timedelta(hours=1), timeout=TIMEOUT)

    found = run(2, body)
    del server
    gc.collect()
    for agreement in found.values():
        agreement.close()
    assert not threads()


def test_closing_waits_for_no_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    ends = threading.Event()

    def word(self: Register, turn: int) -> str:
        hangs.set()
        ends.wait(60)
        return ASKED

    groups: list[Group] = []

    def body(rank: int, group: Any) -> Agreement:
        groups.append(group)
        return Agreement(group, poll=POLL, timeout=TIMEOUT)

    monkeypatch.setattr(Register, "word", word)
    monkeypatch.setattr("dtckpt.checkpoint.agreement.agreement._JOIN_SECONDS", 0.05)
    for agreement in run(2, body).values():
        assert hangs.wait(20)
        agreement.close()
        assert agreement.at_call() is None
    groups.clear()
    ends.set()
    wait_for(lambda: not threads())


def test_requests_come_from_many_threads_at_once() -> None:
    def body(rank: int, group: Any) -> set[str]:
        with Agreement(group, poll=POLL, timeout=TIMEOUT) as agreement:
            names = [f"{rank} {number}" for number in range(20)]
            askers = [threading.Thread(target=agreement.ask, args=(name,)) for name in names]
            for asker in askers:
                asker.start()
            loop = Loop(agreement)
            while len({why for _, agreed in loop.saves for why in agreed.reasons}) < 40:
                loop.call()
            return {why for _, agreed in loop.saves for why in agreed.reasons}

    found = run(2, body)
    assert found[0] == found[1]
