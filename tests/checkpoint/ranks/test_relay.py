"""Long decisions are handed on from rank to rank, and nobody depends on who hands on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dtckpt import addresses
from dtckpt.checkpoint.ranks import group_ranks, relay
from dtckpt.checkpoint.ranks.frames import message
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.ranks.link import Link
from dtckpt.checkpoint.ranks.relay import Relay, children_of, fetch, hello_of, parent_of
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.ranks.together import closing, ranks_of, together
from dtckpt.checkpoint.ranks.wire import Wire
from dtckpt.errors import CheckpointError, RankFailed

from ...python import run_python
from .plain_groups import run

SIZE = 12
LONG = b"manifest " * 30_000
DECISION = b"".join(number.to_bytes(4, "big") for number in range(80_000))
"""Does not shrink when it is packed."""
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank hands on to two others, whatever is decided."""
    monkeypatch.setattr(relay, "FAN_OUT", 2)
    monkeypatch.setattr(relay, "LONG_BYTES", 1000)
    monkeypatch.setattr(relay, "MOST_BYTES", 0)


class Sent:
    """Counts what each rank sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: dict[int, int] = {}
        for cls, name in ((Wire, "_send_to"), (Relay, "_give")):
            monkeypatch.setattr(cls, name, self.counting(getattr(cls, name)))

    def counting(self, send: Callable[..., None]) -> Callable[..., None]:
        def count(sender: Any, link: Link, frame: bytes) -> None:
            self.by[id(sender)] = self.by.get(id(sender), 0) + len(frame)
            send(sender, link, frame)

        return count


def two_rounds(group: Any, timeout: timedelta = MINUTE, decision: bytes = DECISION) -> bytes:
    """Decide something long, and then something short on that."""
    ranks = ranks_of(group, timeout=timeout, purpose="load")
    with closing(ranks):
        told = together(ranks, "load: read manifest", lambda: b"x", lambda _: decision)
        together(ranks, "load: check", lambda: b"y", lambda found: b"".join(found.values()))
        return told


def test_the_tree_leads_to_everybody_once() -> None:
    for size in range(1, 40):
        children = [child for position in range(size) for child in children_of(position, size)]
        assert children == list(range(1, size))
        assert all(child in children_of(parent_of(child), size) for child in children)


def test_no_rank_sends_a_decision_more_often_than_to_its_own_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = Sent(monkeypatch)
    keep: list[Any] = []  # their numbers tell ranks apart

    def body(rank: int, group: Any) -> bytes:
        members = members_of(group)
        keep.extend([group, members])
        return two_rounds(group)

    assert set(run(SIZE, body).values()) == {DECISION}
    most = max(sent.by.values())
    frame = len(message(0, DECISION))
    assert 2 * frame <= most < 2 * frame + 10_000, "of eleven"
    assert sum(count >= frame for count in sent.by.values()) == 6, "those with others below them"


def test_what_is_short_is_sent_to_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    monkeypatch.setattr(group_ranks, "fetch", None)
    found = run(SIZE, lambda _, group: two_rounds(group, decision=LONG[:900]))
    assert set(found.values()) == {LONG[:900]}
    assert max(sent.by.values()) > 11 * 900


def test_calls_follow_each_other_and_rounds_too() -> None:
    def body(rank: int, group: Any) -> list[bytes]:
        found: list[bytes] = []
        for call in range(4):
            ranks = ranks_of(group, timeout=MINUTE, purpose="load")
            with closing(ranks):
                for number in range(3):
                    word = LONG + bytes([call, number])
                    found.append(together(ranks, "load: plan", lambda: b"", lambda _, w=word: w))
        return found

    expected = [LONG + bytes([call, number]) for call in range(4) for number in range(3)]
    assert list(run(SIZE, body).values()) == [expected] * SIZE


def test_decisions_are_handed_on_among_ranks_that_number_the_call_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank has left out a call, and hands on in the next one and has it handed on."""
    asked: list[int] = []
    fetched: Any = vars(group_ranks)["fetch"]

    def fetch(invitation: Any, hello: Any, *rest: Any) -> bytes:
        asked.append(hello.call)
        return fetched(invitation, hello, *rest)

    monkeypatch.setattr(group_ranks, "fetch", fetch)
    gate = threading.Barrier(SIZE)

    def body(rank: int, group: Any) -> bytes:
        if rank != 2:  # it hands on to the ranks 5 and 6
            with pytest.raises(RankFailed):
                decide(group, timedelta(seconds=1), "step_0")
        gate.wait(60)
        return decide(group, MINUTE, "step_1")

    def decide(group: Any, timeout: timedelta, target: str) -> bytes:
        ranks = ranks_of(group, timeout=timeout, purpose="load", target=target)
        with closing(ranks):
            return together(ranks, "load: plan", lambda: b"", lambda _: DECISION)

    assert set(run(SIZE, body).values()) == {DECISION}
    assert sorted(asked) == [0, 0, *[1] * (len(asked) - 2)], "by the number of who hands on"


def test_the_last_decision_of_a_call_may_be_a_long_one() -> None:
    """Who hands on may be gone already when the others come."""

    def body(rank: int, group: Any) -> bytes:
        ranks = ranks_of(group, timeout=MINUTE, purpose="load")
        with closing(ranks):
            return together(ranks, "load: plan", lambda: b"", lambda _: DECISION)

    assert set(run(SIZE, body).values()) == {DECISION}


def keep(own: Relay, call: int, number: int, frame: bytes) -> None:
    """Hand on nothing."""


def forget(own: Relay, call: int, number: int, frame: bytes) -> None:
    own.end(call)


def no_port(_: str) -> Any:
    raise OSError("no port is free")


@pytest.mark.parametrize("trouble", ["does not listen", "has gone", "forgets", "is silent"])
def test_who_gets_nothing_is_sent_it_by_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    timeout = timedelta(seconds=2) if trouble == "is silent" else MINUTE
    if trouble == "does not listen":
        monkeypatch.setattr(relay, "listen_beside", no_port)
    if trouble == "forgets":
        monkeypatch.setattr(Relay, "hand_on", forget)
    if trouble == "is silent":
        monkeypatch.setattr(Relay, "hand_on", keep)
    begin = Relay.begin

    def begin_and_go(own: Relay, call: int, host: str) -> Any:
        found = begin(own, call, host)
        own.close()
        return found

    if trouble == "has gone":
        monkeypatch.setattr(Relay, "begin", begin_and_go)
    assert set(run(SIZE, lambda _, group: two_rounds(group, timeout)).values()) == {DECISION}


def errors_of(found: dict[int, Any], *but: int) -> str:
    """Return the one error that ranks have raised."""
    errors = [error for rank, error in found.items() if rank not in but]
    assert {type(error) for error in errors} == {RankFailed}, errors
    assert len({str(error) for error in errors}) == 1, errors
    return str(errors[0])


@pytest.mark.parametrize("position", [1, 4], ids=["at the coordinator", "further down"])
def test_one_who_dies_while_it_hands_on_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    hand_on = Relay.hand_on

    def hand_on_or_die(own: Relay, call: int, number: int, frame: bytes) -> None:
        if threading.current_thread().name == "dying":
            raise KeyboardInterrupt
        hand_on(own, call, number, frame)

    monkeypatch.setattr(Relay, "hand_on", hand_on_or_die)

    def body(rank: int, group: Any) -> bytes:
        if rank == position:
            threading.current_thread().name = "dying"
        return two_rounds(group)

    found = run(SIZE, body)
    assert isinstance(found[position], KeyboardInterrupt)
    text = errors_of(found, position)
    assert f"load: check failed: rank {position} is lost: it has given up: Keyboard" in text


@pytest.mark.parametrize("begun", ["begun", "not begun"])
def test_a_process_that_is_killed_while_it_hands_on_is_named_by_all(begun: str) -> None:
    """Those behind it have the decision all the same, and learn of its end in the next round."""
    done = run_python("-m", f"{__package__}.relay_ranks", "2", begun, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    living = [0, 1, 3, 4]
    assert {key for key in found if key.startswith("note")} == {f"note{rank}" for rank in living}
    assert all(found[f"told{rank}"] == "True" for rank in living)
    notes = {found[f"note{rank}"] for rank in living}
    assert len(notes) == 1
    assert "RankFailed: load: check failed: rank 2 is lost: it closed its connection" in notes.pop()


def test_one_who_never_says_that_it_has_a_decision_is_named_after_one_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = threading.Event()

    def stuck(*args: Any) -> bytes:
        if args[1].rank == 5:
            opened.wait(60)
            raise CheckpointError("too late")
        return fetch(*args)

    monkeypatch.setattr(group_ranks, "fetch", stuck)
    left: list[int] = []

    def body(rank: int, group: Any) -> bytes:
        try:
            return two_rounds(group, timedelta(seconds=2))
        finally:
            left.append(rank)
            if len(left) == SIZE - 1:
                opened.set()

    found = run(SIZE, body)
    assert "rank 5 is lost: it showed no sign of life within 2 s" in errors_of(found, 5)


def test_a_coordinator_that_dies_meanwhile_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Relay, "hand_on", keep)

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(GroupRanks, "_await_receipts", interrupted)
    found = run(SIZE, lambda _, group: two_rounds(group))
    assert isinstance(found[0], KeyboardInterrupt)
    for rank in range(1, SIZE):
        assert isinstance(found[rank], RankFailed)
        assert "rank 0, which coordinates ranks 0-11, is lost: it has given up" in str(found[rank])


def test_what_is_handed_on_waits_for_who_comes_late_and_the_other_way_round() -> None:
    own = Relay()
    invitation = own.begin(3, "127.0.0.1")
    assert invitation is not None
    own.hand_on(3, 0, message(0, b"first"))
    assert fetch(invitation, hello_of(5, 3, 0), 20) == b"first"
    got: list[bytes] = []
    thread = threading.Thread(
        target=lambda: got.append(fetch(invitation, hello_of(5, 3, 2), 20)), daemon=True
    )
    thread.start()
    time.sleep(0.05)
    own.hand_on(3, 2, message(2, DECISION))
    thread.join(20)
    assert got == [DECISION]
    own.end(3)
    with pytest.raises(ConnectionError, match="closed"):
        fetch(invitation, hello_of(5, 3, 0), 20)
    assert own.begin(4, "127.0.0.1") == replace(invitation, generation=4)
    with pytest.raises(TimeoutError, match=r"nothing for 0\.1 s"):
        fetch(invitation, hello_of(5, 4, 0), 0.1)
    own.close()


def test_a_stranger_gets_nothing() -> None:
    own, other = Relay(), Relay()
    invitation = own.begin(0, "127.0.0.1")
    assert invitation is not None
    wrong = other.begin(0, "127.0.0.1")
    assert wrong is not None
    own.hand_on(0, 0, message(0, b"secret"))
    with pytest.raises(ConnectionError):
        fetch(type(wrong)(addresses=invitation.addresses, token=wrong.token), hello_of(1, 0, 0), 20)
    own.close()
    other.close()


def test_ports_that_are_given_are_left_to_those_who_coordinate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(addresses.PORT_VARIABLE, "29871")
    with pytest.raises(OSError, match="no port to spare"):
        addresses.listen_beside("127.0.0.1")
    monkeypatch.setenv(addresses.PORT_VARIABLE, "29871-29879")
    with addresses.listen_beside("127.0.0.1") as one, addresses.listen_beside("127.0.0.1") as two:
        assert one.getsockname()[1] > two.getsockname()[1] > 29871
