"""One end of a connection, over a pair of sockets: what it sends, keeps for later, and reads."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dtckpt.checkpoint.ranks import frames, link
from dtckpt.checkpoint.ranks.link import Link

from ...waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(link, "time", made)
    return made


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    one, other = socket.socketpair()
    other.settimeout(20)
    yield Link(1, one), other
    one.close()
    other.close()


def fill(made: Link) -> int:
    """Send until the connection takes no more; return how many bytes that were."""
    sent = 0
    while not made.is_behind:
        made.send(b"x" * 100_000)
        sent += 100_000
    return sent


def drain(made: Link, other: socket.socket, size: int) -> bytes:
    """Read so many bytes, while the link sends what it has kept."""
    received = bytearray()
    while len(received) < size:
        received += other.recv(1 << 20)
        made.flush()
    return bytes(received)


def test_a_connection_that_takes_nothing_holds_nobody_up(ends: tuple[Link, socket.socket]) -> None:
    made, other = ends
    assert made.connection.gettimeout() == 0.0
    assert made.read() == []
    big = bytes(range(256)) * (1 << 14)
    made.send(big)
    made.send(b"after")
    assert made.is_behind
    assert drain(made, other, len(big) + 5) == big + b"after", "in order"
    assert not made.is_behind


def test_nothing_follows_half_a_frame(ends: tuple[Link, socket.socket]) -> None:
    class Breaks:
        """Takes a part of the first frame, then fails, then would take anything."""

        def __init__(self) -> None:
            self.taken: list[bytes] = []

        def send(self, data: memoryview) -> int:
            if len(self.taken) == 1:
                self.taken.append(b"")
                raise ConnectionResetError("gone")
            self.taken.append(bytes(data[:3]))
            return 3

    made, breaks = ends[0], Breaks()
    made.connection = breaks  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConnectionResetError):
        made.send(b"a frame")
    made.send(b"another")
    made.flush()
    assert breaks.taken == [b"a f", b""]
    assert not made.is_behind


def test_it_has_moved_when_bytes_went_either_way(
    clock: Clock, ends: tuple[Link, socket.socket]
) -> None:
    made, other = ends
    clock.now = 1010.0
    made.send(b"here")
    assert made.moved_at == 1010.0
    clock.now = 1020.0
    other.sendall(frames.message(0, b"there"))
    assert len(made.read()) == 1
    assert made.moved_at == 1020.0
    fill(made)
    clock.now = 1030.0
    made.flush()
    made.read()
    assert made.moved_at == 1020.0, "nothing was taken and nothing came"


def test_it_has_moved_when_it_was_made(clock: Clock) -> None:
    one, other = socket.socketpair()
    clock.now = 1005.0
    assert Link(1, one).moved_at == 1005.0
    one.close()
    other.close()


def test_what_is_left_goes_before_the_end(ends: tuple[Link, socket.socket]) -> None:
    made, other = ends
    size = fill(made)
    made.end_sending()
    made.send(b"too late")
    assert made.is_ending
    assert drain(made, other, size) == b"x" * size
    made.end_sending()
    assert other.recv(10) == b""


def test_nothing_is_sent_after_the_end(ends: tuple[Link, socket.socket]) -> None:
    made, other = ends
    made.send(b"all")
    made.end_sending()
    made.send(b"more")  # neither an error nor sent
    assert not made.is_behind
    assert drain(made, other, 3) == b"all"
    assert other.recv(10) == b""


def test_nothing_is_kept_for_a_connection_that_is_broken(ends: tuple[Link, socket.socket]) -> None:
    made, other = ends
    fill(made)
    other.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        made.flush()
    assert not made.is_behind
    made.send(b"another")
    made.flush()
    assert not made.is_behind


def test_nothing_is_sent_after_it_was_closed(ends: tuple[Link, socket.socket]) -> None:
    made, other = ends
    fill(made)
    made.close()
    assert made.is_closed
    assert not made.is_behind
    made.send(b"more")  # no error: others close it while this rank sends
    made.flush()
    made.end_sending()
    while other.recv(1 << 20):
        pass


def test_the_end_of_a_connection_is_told(ends: tuple[Link, socket.socket]) -> None:
    made, other = ends
    other.close()
    with pytest.raises(ConnectionError, match="it closed its connection"):
        made.read()


def test_the_welcome_has_to_be_the_right_one() -> None:
    one, other = socket.socketpair()
    made = Link(0, one, welcome=b"sesame")
    other.sendall(b"ses")
    assert made.read() == []
    other.sendall(b"ame" + frames.message(0, b"answer"))
    assert made.read() == [(frames.MESSAGE, 0, b"answer")]
    other.sendall(b"sesamX")
    with pytest.raises(ConnectionError, match="somebody else"):
        Link(0, one, welcome=b"sesame").read()
    one.close()
    other.close()
