"""How members make themselves known to the coordinator, and what becomes of strangers."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import pytest

from dtckpt import addresses
from dtckpt.checkpoint.ranks import greeting
from dtckpt.checkpoint.ranks.greeting import (
    Greeting,
    Hello,
    Invitation,
    Listener,
    prepare,
    probe,
    say_hello,
)
from dtckpt.checkpoint.ranks.loop import Loop
from dtckpt.checkpoint.ranks.wire import Wire

from ...waiting import Clock, wait_for

HELLO = struct.Struct("!8s16sQQ48sQQ")
TOKEN, WELCOME = b"t" * 16, b"w" * 16
SAID = HELLO.pack(b"dtckpt-4", TOKEN, 3, 9, b"load", 70, 5)
MOST_SECONDS = 25.0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A listener that is served, and who has said hello there; waits for strangers without end."""
    monkeypatch.setattr(greeting, "_GREETING_SECONDS", 600.0)
    loops: list[Loop] = []

    class Owner:
        def __init__(self) -> None:
            self.met: list[Hello] = []

        def meet(self, hello: Hello, connection: socket.socket) -> None:
            self.met.append(hello)
            connection.close()

        def is_known(self, hello: Hello) -> bool:
            return True

        def take(self, link: object) -> None:
            raise NotImplementedError

        def lose(self, link: object, reason: str) -> None:
            raise NotImplementedError

        def beat(self) -> float | None:
            return None

        def fail(self, reason: str) -> None:
            pass

    owners: list[Owner] = []

    def serve(num_ranks: int = 0) -> tuple[Invitation, list[Hello]]:
        hosts, sockets = addresses.listen(2)
        made, owner = Listener(sockets, num_ranks), Owner()
        owners.append(owner)
        loops.append(Loop(made))
        loops[-1].start(owner)
        return made.invitation(hosts, 1), owner.met

    yield serve
    for loop in loops:
        loop.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(greeting, "time", made)
    return made


@pytest.fixture
def listener() -> Iterator[Listener]:
    """One that is not served."""
    made = Listener([socket.create_server(("127.0.0.1", 0))])
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    yield one, other
    one.close()
    other.close()


def is_ready(waiting: socket.socket) -> bool:
    """Whether there is something to read or to accept."""
    poll = select.poll()  # a process of many tests has more descriptors than select takes
    poll.register(waiting, select.POLLIN)
    return bool(poll.poll(0))


def address_of(listener: Listener) -> tuple[str, int]:
    return listener.sockets[0].getsockname()


def accepted(listener: Listener, forget: Callable[[Greeting], None]) -> Greeting:
    """Let in somebody who is about to connect."""
    wait_for(lambda: is_ready(listener.sockets[0]))
    found = listener.accept(listener.sockets[0], forget)
    assert found is not None
    return found


def is_over(connection: socket.socket) -> bool:
    """Wait until the other end has closed a connection."""
    connection.settimeout(20)
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n" + bytes(100),
        b"\x16\x03\x01\x02\x00\x01\x00\x01" + bytes(100),
        HELLO.pack(b"dtckpt-4", b"wrong", 1, 0, b"save", 0, 0),
        HELLO.pack(b"dtckpt-0", b"wrong", 1, 0, b"save", 0, 0),
        b"",
    ],
)
def test_a_stranger_is_refused(served: Any, said: bytes) -> None:
    invitation, met = served()
    with socket.create_connection(invitation.addresses[0]) as stranger:
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        assert is_over(stranger)
    probe(invitation.addresses[0], invitation, 1, 0, 20.0)
    assert met == []


def test_who_knows_the_token_is_met(served: Any) -> None:
    invitation, met = served()
    hello = Hello(rank=1, instance=5, purpose="async_save", call=7)
    with say_hello(invitation.addresses[0], invitation, hello, 20.0) as connection:
        assert connection.recv(16) == bytes.fromhex(invitation.welcome)
    wait_for(lambda: met == [hello])
    wrong = Invitation(token="00" * 16, welcome=invitation.welcome)
    with say_hello(invitation.addresses[0], wrong, hello, 20.0) as connection:
        assert is_over(connection)
    with pytest.raises(OSError, match=r"reset|closed"):
        probe(invitation.addresses[0], wrong, 1, 0, 20.0)
    assert met == [hello]


def test_silent_and_dripping_strangers_hold_nobody_up(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "_GREETING_SECONDS", 1.0)
    invitation, met = served()
    address = invitation.addresses[0]
    strangers = [socket.create_connection(address) for _ in range(20)]
    began, stopped = time.monotonic(), threading.Event()

    def drip() -> None:
        while not stopped.wait(0.05):
            for stranger in strangers[10:]:
                try:
                    stranger.send(b"d")
                except OSError:
                    return

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    with say_hello(address, invitation, Hello(rank=1, purpose="save"), 20.0) as connection:
        assert connection.recv(16)
    wait_for(lambda: len(met) == 1)
    for stranger in strangers:
        assert is_over(stranger), "one deadline for all of it, however much it says meanwhile"
    assert time.monotonic() - began < MOST_SECONDS
    stopped.set()
    dripping.join(20)
    for stranger in strangers:
        stranger.close()


def test_there_are_never_more_than_some_strangers_besides_the_ranks(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "_MAX_STRANGERS", 1)
    invitation, met = served(num_ranks=3)
    address = invitation.addresses[0]
    strangers = [socket.create_connection(address) for _ in range(12)]
    for stranger in strangers[:8]:
        assert is_over(stranger), "who has taken longest makes way"
    assert not any(map(is_ready, strangers[8:])), "as many as ranks may come, and some"
    with say_hello(address, invitation, Hello(rank=1, purpose="save"), 20.0):
        wait_for(lambda: len(met) == 1)
    for stranger in strangers:
        stranger.close()


def test_a_hello_may_come_in_pieces(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    waiting = Greeting(one, TOKEN, WELCOME)
    assert waiting.read() is None, "nothing is there yet"
    for at in range(len(SAID) - 1):
        other.send(SAID[at : at + 1])
        assert waiting.read() is None
    other.send(SAID[-1:])
    assert waiting.read() == Hello(rank=3, instance=9, purpose="load", call=70, target=5)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"dtckpt-0" + SAID[8:], "a stranger"),
        (SAID[:8] + b"T" + SAID[9:], "a stranger"),
        (b"", "without a word"),
        (SAID[:-1], "without a word"),
    ],
)
def test_another_version_or_group_or_half_a_hello_is_a_stranger(
    ends: tuple[socket.socket, socket.socket], said: bytes, why: str
) -> None:
    one, other = ends
    other.sendall(said)
    other.close()
    waiting = Greeting(one, TOKEN, WELCOME)
    if 0 < len(said) < len(SAID):
        assert waiting.read() is None
    with pytest.raises(ConnectionError, match=why):
        waiting.read()


def test_nothing_of_what_follows_a_hello_is_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    other.sendall(SAID + b"a frame")
    assert Greeting(one, TOKEN, WELCOME).read() is not None
    assert one.recv(100) == b"a frame"


def options_of(connection: socket.socket) -> list[int]:
    """Return what `prepare` sets."""
    tcp = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    return [
        int(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0),
        *(connection.getsockopt(socket.IPPROTO_TCP, name) for name in tcp),
    ]


def test_both_ends_send_small_messages_at_once_and_keep_routers_awake(listener: Listener) -> None:
    invitation = listener.invitation(["127.0.0.1"], 1)
    hello = Hello(rank=1, purpose="save")
    with (
        say_hello(invitation.addresses[0], invitation, hello, 20.0) as connection,
        accepted(listener, lambda _: None).connection as other,
    ):
        assert options_of(connection) == options_of(other) == [1, 1, 30, 10, 3]
        assert other.gettimeout() == 0.0, "nobody is waited for"


def test_where_the_system_has_not_all_options_the_others_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greeting, "_KEEPALIVE", {"TCP_UNKNOWN": 1, "TCP_KEEPCNT": 3})
    with socket.socket() as made:
        prepare(made)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3


def test_without_descriptors_who_has_taken_longest_makes_way(
    listener: Listener, clock: Clock
) -> None:
    class Out:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    out, gone = cast(socket.socket, Out()), list[Greeting]()
    assert listener.accept(out, gone.append) is None
    assert gone == []
    assert clock.now > 1000.0, "who waits to be let in is still there at the next look"
    with socket.create_connection(address_of(listener)):
        first = accepted(listener, gone.append)
        with socket.create_connection(address_of(listener)):
            accepted(listener, gone.append)
            assert listener.accept(out, gone.append) is None
    assert gone == [first]


def test_who_is_gone_before_it_is_let_in_leaves_nothing_open(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    def fail(connection: socket.socket) -> None:
        made.append(connection)
        raise OSError("Invalid argument")

    monkeypatch.setattr(greeting, "prepare", fail)
    invitation = listener.invitation(["127.0.0.1"], 1)
    with pytest.raises(OSError, match="Invalid argument"):
        say_hello(invitation.addresses[0], invitation, Hello(rank=1, purpose="save"), 20.0)
    wait_for(lambda: is_ready(listener.sockets[0]))
    assert listener.accept(listener.sockets[0], lambda _: None) is None
    assert [connection.fileno() for connection in made] == [-1, -1]
    assert listener.pause() is None


def test_who_is_due_when_the_pause_is_over_is_overdue(listener: Listener, clock: Clock) -> None:
    assert listener.pause() is None
    with socket.create_connection(address_of(listener)):
        waiting = accepted(listener, lambda _: None)
        clock.now += 2.0
        assert (listener.pause(), listener.overdue()) == (3.0, [])
        clock.now += 3.0
        assert (listener.pause(), listener.overdue()) == (0.0, [waiting])
        clock.now += 1.0
        assert (listener.pause(), listener.overdue()) == (0.0, [waiting])
        listener.forget(waiting)
        assert (listener.pause(), listener.overdue()) == (None, [])
        waiting.connection.close()


def test_a_listener_closes_all_that_it_holds(listener: Listener) -> None:
    with socket.create_connection(address_of(listener)) as stranger:
        waiting = accepted(listener, lambda _: None)
        assert listener.greeting_of(waiting.connection) is waiting
        assert listener.overdue() == []
        listener.close()
        assert listener.sockets[0].fileno() == -1
        assert is_over(stranger)
    listener.forget(waiting)
    assert listener.greeting_of(waiting.connection) is None


@pytest.mark.parametrize(
    ("answer", "why"), [(b"w" * 15 + b"x", "somebody else listens there"), (b"w" * 15, "closed")]
)
def test_who_answers_otherwise_is_not_the_coordinator(answer: bytes, why: str) -> None:
    invitation = Invitation(token=TOKEN.hex(), welcome=WELCOME.hex())
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(HELLO.size, socket.MSG_WAITALL)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match=why):
            probe(server.getsockname(), invitation, 1, 0, 20.0)
        thread.join(20)


def test_one_that_answers_by_drips_takes_no_longer_than_others() -> None:
    invitation = Invitation(token=TOKEN.hex(), welcome=WELCOME.hex())
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(HELLO.size, socket.MSG_WAITALL)
                for at in range(len(WELCOME)):
                    connection.send(WELCOME[at : at + 1])
                    time.sleep(0.03)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(TimeoutError):
            probe(server.getsockname(), invitation, 1, 0, 0.2)
        thread.join(20)


def test_a_stranger_who_makes_way_while_it_speaks_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has said is found in the same look as the one for whom it had to go."""
    monkeypatch.setattr(greeting, "_MAX_STRANGERS", 1)
    listener: Any = Listener([socket.create_server(("127.0.0.1", 0))])
    invitation = listener.invitation(["127.0.0.1"], 1)
    wire: Any = Wire([1], listener)
    (address,) = invitation.addresses
    loop = wire._loop
    with socket.create_connection(address) as first:
        while not listener._greetings:
            time.sleep(0.001)
        with wire._changed:  # the thread of the loop is kept from its next look
            loop.wake()
            while is_ready(loop._wake):
                time.sleep(0.001)
            second = socket.create_connection(address)
            first.send(b"hello?")
        probe(address, invitation, 1, 0, 10.0)
        second.close()
    wire.close()
