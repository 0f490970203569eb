"""What one rank of a group does while others work, wait, fail or fall silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dtckpt.checkpoint.ranks import base, group_ranks
from dtckpt.checkpoint.ranks.base import Round
from dtckpt.checkpoint.ranks.call import Signs
from dtckpt.checkpoint.ranks.failing import FAILED, OK
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.ranks.together import ranks_of
from dtckpt.checkpoint.ranks.wire import Wire
from dtckpt.dtensor.comm.traffic import Collective, Observer, add_observer, remove_observer
from dtckpt.errors import CheckpointError, RankFailed

from ...waiting import wait_for
from .plain_groups import Group, agree, run

_c10d: Any = dist
HOUR = timedelta(hours=1)
NOBODY: Mapping[int, str] = {}


def begun(group: Any, phase: str = "save: plan", timeout: timedelta = HOUR) -> GroupRanks:
    """Return the ranks of a group, of which this one has begun a phase."""
    ranks = ranks_of(group, timeout=timeout, purpose="save")
    assert isinstance(ranks, GroupRanks)
    ranks.begin(phase)
    return ranks


def alone(**options: Any) -> GroupRanks:
    """Return the ranks of a group of one."""
    return begun(Group(_c10d.HashStore(), 0, 1), **options)


def is_failed(answer: bytes) -> bool:
    return answer[:1] != OK


def joined(answers: Mapping[int, bytes], lost: Mapping[int, str]) -> bytes:
    return b" ".join(answers.values()) + "".join(lost.values()).encode()


def consult(ranks: GroupRanks, answer: bytes = OK, **options: Any) -> bytes:
    return ranks.consult(answer, Round(decide=joined, fatal=is_failed, **options))


def same(found: dict[int, Any]) -> Any:
    """Return what all ranks have found."""
    first, *rest = found.values()
    assert all(other == first for other in rest), found
    return first


class Clock(SimpleNamespace):
    """The time, which stands still."""

    def __init__(self) -> None:
        super().__init__(now=100.0, perf_counter=lambda: 0.0, monotonic=lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (base, group_ranks):
        monkeypatch.setattr(module, "time", made)
    return made


def test_work_that_gets_on_is_not_stalled(clock: Clock) -> None:
    ranks = ranks_of(Group(_c10d.HashStore(), 0, 1))

    def decide(_: Mapping[int, bytes], __: Mapping[int, str]) -> bytes:
        clock.now += 3.0
        assert ranks.stalled_seconds() == 3.0, "deciding is work"
        return OK

    for step in (
        lambda: ranks.begin("save: plan"),
        lambda: ranks.consult(OK, Round(decide=decide, fatal=is_failed)),
        ranks.tell_alive,
    ):
        clock.now += 5.0
        assert ranks.stalled_seconds() == 5.0
        step()
        assert ranks.stalled_seconds() == 0.0


@pytest.mark.parametrize("waiting", [0, 1])
def test_who_waits_for_others_is_not_stalled(waiting: int) -> None:
    """The coordinator is heard of; of a member that waits nobody wants to hear."""
    held: dict[int, GroupRanks] = {}
    gate = threading.Barrier(2)

    def body(rank: int, group: Any) -> bytes:
        ranks = held[rank] = begun(group)
        assert ranks.sign() != (0.0, "save: plan")
        gate.wait(20)
        if rank != waiting:
            wait_for(lambda: held[waiting].stalled_seconds() == 0.0)
            assert held[waiting].sign() == (None if waiting else (0.0, "save: plan"))
            assert ranks.stalled_seconds() > 0.0
        decision = consult(ranks)
        assert ranks.stalled_seconds() > 0.0
        gate.wait(20)
        ranks.close()
        return decision

    assert same(run(2, body)) == OK + b" " + OK


def test_what_is_wrong_with_a_call_fails_its_first_phase() -> None:
    ranks = ranks_of(Group(_c10d.HashStore(), 0, 1), wrong="base is no path")
    with pytest.raises(CheckpointError, match="base is no path"):
        ranks.begin("save: plan")


def test_only_a_rank_that_does_not_get_on_says_where_it_stands() -> None:
    ranks = alone(phase="save: write")
    age, doing = ranks.sign() or (-1.0, "")
    assert age >= 0.0
    assert doing == "save: write"
    reached, opened = threading.Event(), threading.Event()
    slow: list[GroupRanks] = []

    def hold() -> None:
        group = Group(_c10d.HashStore(), 0, 1)
        ranks = ranks_of(group, timeout=timedelta(seconds=0.2), purpose="save")  # not begun yet
        assert isinstance(ranks, GroupRanks)
        slow.append(ranks)
        reached.set()
        opened.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert reached.wait(20)
    wait_for(lambda: "hold" in str(slow[0].sign()))
    _, doing = slow[0].sign() or (-1.0, "")
    assert doing.startswith("save, in ")
    assert f"<locals>.hold at {__file__}:" in doing, "not where in threading it waits"
    opened.set()
    thread.join(20)
    assert (slow[0].sign() or (-1.0, ""))[1] == "save"


def test_a_quarter_of_the_timeout_is_not_slow_yet(clock: Clock) -> None:
    ranks = alone(timeout=timedelta(seconds=20))
    clock.now += 5.0
    assert ranks.sign() == (5.0, "save: plan")
    clock.now += 0.1
    assert ", in " in str(ranks.sign())


def test_signs_of_life_are_asked_of_ranks_while_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Signs] = []
    begin_call = Wire.begin_call

    def note(self: Wire, call: int, purpose: str, signs: Signs, *args: Any) -> None:
        made.append(signs)
        begin_call(self, call, purpose, signs, *args)

    monkeypatch.setattr(Wire, "begin_call", note)
    ranks = alone()
    told = made[0].ask()
    assert told is not None
    assert told[1] == "save: plan"
    del ranks
    assert made[0].ask() is None


def test_a_failure_calls_the_others_off(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator learns of it by an answer, a member by a decision before its own answer."""
    monkeypatch.setattr(group_ranks, "_GRACE_SECONDS", 0.0)

    def body(rank: int, group: Any) -> bytes:
        ranks = begun(group)
        assert not ranks.is_called_off()
        consult(ranks)
        if rank != 1:
            wait_for(ranks.is_called_off)
        decision = consult(ranks, FAILED if rank == 1 else OK)
        ranks.close()
        return decision

    assert same(run(3, body)) == OK + b" " + FAILED, "and the third one is not waited for"


def test_the_coordinator_does_not_wait_when_it_has_failed_itself(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_ranks, "_GRACE_SECONDS", 0.0)

    def body(rank: int, group: Any) -> bytes:
        ranks = begun(group)
        consult(ranks)
        if rank:
            wait_for(ranks.is_called_off)
        decision = consult(ranks, OK if rank else FAILED)
        ranks.close()
        return decision

    assert same(run(2, body)) == FAILED


def test_who_is_slow_is_waited_for_where_nobody_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_ranks, "_GRACE_SECONDS", 0.0)
    held: dict[int, GroupRanks] = {}

    def body(rank: int, group: Any) -> bytes:
        ranks = held[rank] = begun(group)
        if rank:
            wait_for(lambda: 0 in held and held[0].stalled_seconds() == 0.0)
        decision = consult(ranks, OK + b"slow" if rank else OK)
        ranks.close()
        return decision

    assert same(run(2, body)) == OK + b" " + OK + b"slow"


def test_an_answer_that_is_well_calls_nobody_off() -> None:
    def body(rank: int, group: Any) -> bytes:
        ranks = begun(group)
        if rank == 0:
            wire: Wire = vars(ranks)["_wire"]
            wait_for(lambda: wire.arrived(0, 0))
            assert not ranks.is_called_off()
        decision = consult(ranks)
        ranks.close()
        return decision

    assert same(run(2, body)) == OK + b" " + OK


def test_a_wait_may_be_shorter_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_ranks, "_GRACE_SECONDS", 0.05)
    gate = threading.Barrier(2)

    def body(rank: int, group: Any) -> str:
        ranks = begun(group)
        consult(ranks)
        if rank == 0:
            found = consult(ranks, within=0.2).decode()
            gate.wait(20)
        else:
            gate.wait(20)
            consult(ranks)  # what was decided without it
            with pytest.raises(RankFailed) as caught:
                consult(ranks, within=0.2)
            found = str(caught.value)
        gate.wait(20)
        ranks.close()
        return found

    found = run(2, body)
    assert "within 0.2 s" in found[0], found
    assert "rank 0, which coordinates ranks 0-1, is lost: it" in found[1], found
    assert "within 0.25 s" in found[1], found


def test_an_interrupt_of_the_decision_ends_the_wait_of_the_others() -> None:
    def interrupt(_: Mapping[int, bytes], __: Mapping[int, str]) -> bytes:
        raise KeyboardInterrupt

    def body(rank: int, group: Any) -> bytes:
        ranks = begun(group)
        if rank:
            return consult(ranks)[:1]
        with pytest.raises(KeyboardInterrupt):
            ranks.consult(OK, Round(decide=interrupt, fatal=is_failed))
        return FAILED

    assert same(run(2, body)) == FAILED


def test_only_a_failure_of_the_first_round_is_kept_for_who_comes_late() -> None:
    """Whoever answers in later rounds has come; other decisions can be large."""
    for answers, kept in (((OK, FAILED), 0), ((FAILED, OK), 1)):
        ranks = alone()
        for answer in answers:
            consult(ranks, answer)
        assert len(vars(vars(ranks)["_wire"])["_failures"]) == kept


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "it has ended this save or load"),
        (KeyboardInterrupt("bored"), "it has given up: KeyboardInterrupt: bored"),
    ],
)
def test_others_are_told_why_a_rank_is_not_at_a_call_any_more(
    error: BaseException | None, told: str
) -> None:
    def body(rank: int, group: Any) -> str:
        ranks = begun(group)
        found = consult(ranks).decode() if rank == 0 else "\0" + told
        ranks.close(error if rank else None)
        return found

    assert same(run(2, body)) == "\0" + told


@pytest.fixture
def stranger() -> Iterator[tuple[str, int]]:
    """The address of somebody who answers as no coordinator does."""
    server = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            taken.append(connection)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()
    server.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    for held in (server, *taken):
        held.close()


def test_a_coordinator_is_looked_for_anew_once_it_was_lost(stranger: tuple[str, int]) -> None:
    """Its host was started anew, say, and somebody else listens where it did."""

    def body(rank: int, group: Any) -> bytes:
        agree(group)
        if rank:
            route: Any = members_of(group).route
            route._known = (route._known[0], stranger)
        with pytest.raises(RankFailed, match="somebody else listens" if rank else "rank 1 is lost"):
            agree(group)
        return agree(group)

    assert same(run(2, body)) == b"xx"


def test_who_watches_the_traffic_is_told_what_is_sent() -> None:
    def body(rank: int, group: Any) -> tuple[int, int, str]:
        seen: list[Collective] = []

        class Watch(Observer):
            def waited(self, collective: Collective, seconds: float) -> None:
                seen.append(collective)

        ranks, watch = begun(group), Watch()
        add_observer(watch)
        try:
            consult(ranks, b"\0abc" if rank else OK)
        finally:
            remove_observer(watch)
        consult(ranks)
        ranks.close()
        (one,) = seen
        return one.sent_bytes, one.received_bytes, one.agreed

    assert run(2, body) == {0: (6, 4, "save"), 1: (4, 6, "save")}
