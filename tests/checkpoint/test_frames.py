"""Frames, whose they are, and how long ranks wait for them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint import frames
from dtckpt.checkpoint import wire as wire_module
from dtckpt.checkpoint.frames import END, MESSAGE, PACKED, SIGN, FrameReader
from dtckpt.checkpoint.greeting import Hello
from dtckpt.checkpoint.limits import METADATA_VARIABLE
from dtckpt.checkpoint.wire import Signs, Wire
from dtckpt.errors import CheckpointError

HEAD = struct.Struct("!BIQ")
QUIET = Signs(60.0, lambda: None)


def read(data: bytes) -> list[frames.Frame]:
    return FrameReader().frames(data)


@given(
    st.lists(st.one_of(st.binary(max_size=50), st.integers(1 << 16, 1 << 17).map(bytes))),
    st.integers(1, 100),
)
def test_frames_come_out_as_they_went_in(payloads: list[bytes], step: int) -> None:
    sent = b"".join(frames.message(n, payload) for n, payload in enumerate(payloads))
    reader, found = FrameReader(), list[frames.Frame]()
    for at in range(0, len(sent), step):
        found += reader.frames(sent[at : at + step])
    assert found == [(MESSAGE, n, payload) for n, payload in enumerate(payloads)]


def test_signs_and_ends_are_read_back() -> None:
    [(kind, _, payload)] = read(frames.sign(2.5, "writing \udcff"))
    assert kind == SIGN
    assert frames.read_sign(payload) == (2.5, "writing \\udcff")
    [(kind, _, payload)] = read(frames.end("x" * (1 << 20)))
    assert kind == END
    assert payload == b"x" * (1 << 16), "no reason is longer than others take"
    with pytest.raises(ConnectionError, match="too short"):
        frames.read_sign(b"123")


@pytest.mark.parametrize(
    "head", [(MESSAGE, 0, 1 << 60), (PACKED, 0, (256 << 20) + 1), (SIGN, 0, 1 << 17), (9, 0, 0)]
)
def test_what_states_too_much_is_refused_before_it_comes(head: tuple[int, int, int]) -> None:
    with pytest.raises(ConnectionError, match="no message of ours"):
        read(HEAD.pack(*head))


def test_what_unpacks_to_too_much_is_refused() -> None:
    for bomb in (zstandard.compress(bytes(1 << 29), 1), b"\x28\xb5\x2f\xfd" + bytes(20), b"x" * 99):
        with pytest.raises(ConnectionError, match="unpack"):
            read(HEAD.pack(PACKED, 0, len(bomb)) + bomb)


def test_a_frame_that_lies_about_what_it_unpacks_to_is_refused() -> None:
    told, bomb = zstandard.compress(bytes(100)), zstandard.compress(bytes(1 << 24))
    lie = bytearray(bomb)
    assert told[4] >> 6 == 0
    start = 6  # magic, descriptor and window are followed by the size
    lie[start : start + 4] = (5000).to_bytes(4, "little")
    with pytest.raises(ConnectionError):
        read(HEAD.pack(PACKED, 0, len(lie)) + bytes(lie))


def test_nobody_says_more_than_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, "1")
    with pytest.raises(CheckpointError, match=METADATA_VARIABLE):
        frames.message(0, bytes((1 << 20) + 1))
    assert read(frames.message(0, bytes(1 << 20)))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    other.settimeout(20)
    yield one, other
    one.close()
    other.close()


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(wire_module, "time", made)
    return made


class Waiting:
    """A coordinator that waits for rank 1, seen at every look around."""

    def __init__(self, wire: Wire, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.looks = 0
        self.clock = clock
        self.on_look: Any = lambda: None
        changed: Any = vars(wire)["_changed"]

        def wait(seconds: float) -> None:
            self.looks += 1
            clock.now += seconds
            self.on_look()
            assert self.looks < 1000

        monkeypatch.setattr(changed, "wait", wait)


def received(other: socket.socket) -> list[frames.Frame]:
    """Return the frames that come until the end, but for signs of life."""
    reader, found = frames.FrameReader(), list[frames.Frame]()
    other.settimeout(20)
    while data := other.recv(1000):
        found += reader.frames(data)
    return [frame for frame in found if frame.kind != frames.SIGN]


@pytest.fixture
def lone_wire() -> Iterator[Wire]:
    wire = Wire([1])
    yield wire
    wire.close()


def admit(wire: Wire, ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    """Have rank 1 come to the call, without a greeting."""
    wire.meet(Hello(rank=1, purpose="save"), ends[0])
    return ends[1]


def keep(wire: Wire, job: int, frame: bytes) -> None:
    """Hand a frame of rank 1 to a job, at once."""
    held = vars(wire)["_jobs"][job]
    for found in read(frame):
        wire._keep(held, 1, *found)  # pyright: ignore[reportPrivateUsage]


def test_who_does_not_come_is_lost_after_the_timeout(
    lone_wire: Wire, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Waiting(lone_wire, monkeypatch, clock)
    lone_wire.begin_job(0, "save", QUIET)
    answers, lost = lone_wire.collect(0, 0, [1], 10.0)
    assert answers == {}
    assert "has not come to this save" in lost[1]
    assert clock.now == pytest.approx(1010.0)


@pytest.mark.parametrize(
    ("age", "until", "why"),
    [
        (0.0, 1014.0, "no sign of life within 10 s; it was last heard of at save: write"),
        (3.0, 1011.0, "no sign of life within 10 s"),
    ],
)
def test_a_rank_is_lost_a_timeout_after_it_has_got_on(
    lone_wire: Wire,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[socket.socket, socket.socket],
    age: float,
    until: float,
    why: str,
) -> None:
    waiting = Waiting(lone_wire, monkeypatch, clock)
    lone_wire.begin_job(0, "save", QUIET)
    admit(lone_wire, ends)
    told: list[int] = []

    def look() -> None:
        if clock.now >= 1004.0 and not told:
            clock.now = 1004.0
            told.append(1)
            keep(lone_wire, 0, frames.sign(age, "save: write"))

    waiting.on_look = look
    _, lost = lone_wire.collect(0, 0, [1], 10.0)
    assert why in lost[1]
    assert clock.now == pytest.approx(until)


def test_a_rank_that_lives_but_does_not_get_on_is_lost(
    lone_wire: Wire,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[socket.socket, socket.socket],
) -> None:
    waiting = Waiting(lone_wire, monkeypatch, clock)
    lone_wire.begin_job(0, "save", QUIET)
    admit(lone_wire, ends)
    waiting.on_look = lambda: keep(lone_wire, 0, frames.sign(clock.now - 1000.0, "save: write"))
    _, lost = lone_wire.collect(0, 0, [1], 10.0)
    assert lost == {1: "it lives, but has not got on within 10 s: save: write"}
    assert clock.now == pytest.approx(1010.0)


def test_a_process_that_was_stopped_itself_does_not_blame_others(
    lone_wire: Wire,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[socket.socket, socket.socket],
) -> None:
    waiting = Waiting(lone_wire, monkeypatch, clock)
    lone_wire.begin_job(0, "save", QUIET)
    admit(lone_wire, ends)

    def look() -> None:
        if waiting.looks == 3:
            clock.now += 3600.0  # SIGSTOP, or a laptop that was closed
        elif waiting.looks == 8:
            keep(lone_wire, 0, frames.message(0, b"here"))

    waiting.on_look = look
    answers, lost = lone_wire.collect(0, 0, [1], 10.0)
    assert answers == {1: b"here"}
    assert lost == {}


def test_a_member_that_gave_up_before_the_call_began_is_lost_to_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """And to no other call."""
    wire = Wire([1])
    other = admit(wire, ends)
    other.sendall(frames.message(0, b"alone") + frames.end("it was impatient"))
    assert other.recv(100) == b"", "the coordinator ends it, too"
    again, its_end = socket.socketpair()
    its_end.sendall(frames.message(0, b"together"))
    wire.meet(Hello(rank=1, purpose="save", call=1), again)
    wire.begin_job(0, "save", QUIET)
    assert wire.collect(0, 0, [1], 20.0) == ({}, {1: "it was impatient"})
    wire.begin_job(1, "save", QUIET)
    assert wire.collect(1, 0, [1], 20.0) == ({1: b"together"}, {})
    its_end.close()
    wire.close()


def test_a_member_that_broke_off_before_the_call_began_fails_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """It has died, or the network failed it: it will not come to this one any more."""
    wire = Wire([1])
    one, other = ends
    wire.meet(Hello(rank=1, purpose="save"), one)
    other.close()
    wire.begin_job(0, "save", QUIET)
    _, lost = wire.collect(0, 0, [1], 20.0)
    assert "closed its connection" in lost[1]
    wire.close()


def test_a_member_that_could_not_reach_an_earlier_call_is_lost_to_that_one(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    wire = Wire([1])
    wire.begin_job(0, "save", QUIET)
    wire.meet(Hello(rank=1, purpose="save", call=1), ends[0])
    _, lost = wire.collect(0, 0, [1], 20.0)
    assert "it was at call 1 over this group when the first rank was at call 0" in lost[1]
    ends[1].sendall(frames.message(0, b"here"))
    wire.begin_job(1, "save", QUIET)
    assert wire.collect(1, 0, [1], 20.0) == ({1: b"here"}, {})
    wire.close()


def test_a_member_that_comes_too_late_learns_how_the_call_failed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    wire = Wire([1])
    wire.begin_job(4, "save", QUIET)
    wire.fail_job(4, b"failed")
    wire.end_job(4, "")
    wire.begin_job(5, "save", QUIET)
    wire.meet(Hello(rank=1, purpose="save", call=4), ends[0])
    assert received(ends[1])[0] == (frames.MESSAGE, 0, b"failed")
    again, its_end = socket.socketpair()
    its_end.sendall(frames.message(0, b"in time"))
    wire.meet(Hello(rank=1, purpose="save", call=5), again)
    assert wire.collect(5, 0, [1], 20.0) == ({1: b"in time"}, {})
    its_end.close()
    wire.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_member_that_is_late_again_and_again_skips_a_call(is_first: bool) -> None:
    """It has made fewer calls than others, and is late by one whenever all make one."""
    wire, found = Wire([1]), list[int]()
    for call in (6, 7):
        one, other = socket.socketpair()
        wire.begin_job(call, "save", QUIET)
        wire.fail_job(call, b"failed")
        wire.end_job(call, "")
        if call == 7 and is_first:
            wire.begin_job(8, "save", QUIET)
        wire.meet(Hello(rank=1, purpose="save", call=call), one)
        found.append(received(other)[1].number)
        other.close()
    if not is_first:
        wire.begin_job(8, "save", QUIET)
    assert found == [0, 9]
    assert "when the first rank was at call 8" in wire.collect(8, 0, [1], 20.0)[1][1]
    wire.close()


def test_a_member_keeps_no_more_than_some_calls_waiting() -> None:
    """Of those that are forgotten it is known all the same that it is not at them any more."""
    wire = Wire([1])
    pairs = [socket.socketpair() for _ in range(10)]
    for call, (one, _) in enumerate(pairs):
        wire.meet(Hello(rank=1, purpose="save", call=call), one)
    assert pairs[1][1].recv(10) == b""
    wire.begin_job(0, "save", QUIET)
    assert "was at call 9" in wire.collect(0, 0, [1], 20.0)[1][1]
    wire.begin_job(9, "save", QUIET)
    pairs[9][1].sendall(frames.message(0, b"here"))
    assert wire.collect(9, 0, [1], 20.0) == ({1: b"here"}, {})
    wire.close()
    for _, other in pairs:
        other.close()


def test_a_rank_that_is_at_another_call_gets_the_answer_that_says_so(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    wire = Wire([1])
    ends[1].sendall(frames.message(0, b"fine"))
    wire.meet(Hello(rank=1, purpose="load"), ends[0])
    wire.begin_job(0, "save", QUIET, lambda purpose: f"not {purpose}".encode())
    assert wire.collect(0, 0, [1], 20.0) == ({1: b"not load"}, {})
    wire.close()


def test_another_rank_or_another_instance_of_one_is_not_known() -> None:
    wire = Wire([1])
    assert not wire.is_known(Hello(rank=7, purpose="save"))
    assert wire.is_known(Hello(rank=1, instance=3, purpose="save"))
    assert not wire.is_known(Hello(rank=1, instance=4, purpose="save"))
    assert wire.is_known(Hello(rank=1, instance=3, purpose="load"))
    wire.close()
