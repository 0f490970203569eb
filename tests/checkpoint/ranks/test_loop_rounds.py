"""What the loop does in each of its rounds, without the thread that goes through them."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtckpt.checkpoint.ranks import greeting
from dtckpt.checkpoint.ranks import loop as loop_module
from dtckpt.checkpoint.ranks.greeting import Greeting, Hello, Invitation, Listener, say_hello
from dtckpt.checkpoint.ranks.link import Link
from dtckpt.checkpoint.ranks.loop import Loop

from ...waiting import Clock, wait_for

SECONDS = 20.0
MUCH = bytes(4 << 20)


class Watched:
    """Whom the loop works for here: it notes what it is told."""

    def __init__(self) -> None:
        self.taken: list[Link] = []
        self.lost: list[tuple[Link, str]] = []
        self.met: list[Hello] = []
        self.failed: list[str] = []
        self.known = True
        self.error: Exception | None = None

    def take(self, link: Link) -> None:
        self.taken.append(link)
        if self.error is not None:
            raise self.error
        link.read()

    def lose(self, link: Link, reason: str) -> None:
        self.lost.append((link, reason))

    def is_known(self, hello: Hello) -> bool:
        return self.known

    def meet(self, hello: Hello, connection: socket.socket) -> None:
        self.met.append(hello)
        connection.close()

    def beat(self) -> float | None:
        return None

    def fail(self, reason: str) -> None:
        self.failed.append(reason)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop_module, "time", made)
    return made


@pytest.fixture
def owner() -> Watched:
    return Watched()


@pytest.fixture
def loop() -> Iterator[Any]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def listening() -> Iterator[tuple[Any, Invitation]]:
    """A loop that somebody may connect to, and what they have to know."""
    listener = Listener([socket.create_server(("127.0.0.1", 0))])
    made = Loop(listener)
    yield made, listener.invitation(["127.0.0.1"], 1)
    made.close()


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    one, other = socket.socketpair()
    other.settimeout(SECONDS)
    yield Link(1, one), other
    one.close()
    other.close()


def look(loop: Any, owner: Watched, seconds: float = 0.0) -> None:
    """Go through one round, for which nothing has to happen."""
    loop._look_around(loop._selector.select(seconds), owner)


def look_until(loop: Any, owner: Watched, condition: Callable[[], object]) -> None:
    """Go through rounds until something holds."""
    wait_for(lambda: look(loop, owner) or condition())


def events_of(loop: Any, connection: socket.socket) -> int:
    """Return what the loop waits for on a connection."""
    held = {key.fileobj: key.events for key in loop._selector.get_map().values()}
    return held.get(connection, 0)


def received(connection: socket.socket, most: int) -> bytes:
    found = b""
    while len(found) < most and (part := connection.recv(most - len(found))):
        found += part
    return found


def fail(*_: object) -> Any:
    raise LookupError("a mistake of ours")


def test_a_busy_thread_can_be_woken_any_number_of_times(loop: Any, owner: Watched) -> None:
    """The garbage collector may do so in that very thread, which cannot wait for itself."""

    def ring() -> None:
        for _ in range(5000):
            loop.ring()

    thread = threading.Thread(target=ring, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert loop._selector.select(0)
    look(loop, owner)
    assert not loop._selector.select(0), "once is enough"


def test_only_other_threads_wake_it(loop: Any) -> None:
    loop._thread = threading.get_ident()
    loop.wake()
    assert not loop._selector.select(0)
    loop._thread = 0
    loop.wake()
    assert loop._selector.select(0)


def test_it_may_be_woken_before_it_has_begun() -> None:
    loop: Any = Loop()
    loop.wake()
    assert loop._selector.select(0)
    loop.close()
    loop.wake()  # nor does it matter when it has ended


@pytest.mark.parametrize("state", ["new", "behind", "closed", "done"])
def test_it_is_woken_for_a_link_that_has_something_to_be_done(
    state: str, loop: Any, ends: tuple[Link, socket.socket]
) -> None:
    link, _ = ends
    if state == "behind":
        link.send(MUCH)
    if state != "new":
        link.end_sending()
    if state == "closed":
        link.close()
    loop.look_at(link)
    assert bool(loop._selector.select(0)) == (state != "done")


def test_a_link_is_read_once_it_is_known(
    loop: Any, owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    link, other = ends
    loop.look_at(link)
    look(loop, owner)
    other.send(b"x")
    look(loop, owner, SECONDS)
    assert owner.taken == [link]
    assert owner.lost == []
    assert loop._ending == set()


def test_what_is_left_is_sent_and_then_the_end(
    loop: Any, owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    link, other = ends
    link.send(MUCH)
    assert link.is_behind
    link.end_sending()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(received(other, len(MUCH) + 1)))
    loop.look_at(link)
    look(loop, owner)
    assert link in loop._ending
    assert loop._selector.get_key(link.connection).events & 2, "waits until it takes more"
    reader.start()
    look_until(loop, owner, lambda: not link.is_behind)
    reader.join(SECONDS)
    assert found == [MUCH]
    assert events_of(loop, link.connection) == 1, "or it would spin"


def test_a_link_that_is_not_at_its_end_stays_open_when_all_is_sent(
    loop: Any, owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    link, other = ends
    link.send(MUCH)
    loop.look_at(link)
    reader = threading.Thread(target=received, args=(other, len(MUCH)))
    reader.start()
    look_until(loop, owner, lambda: not link.is_behind)
    reader.join(SECONDS)
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)


@pytest.mark.parametrize(
    ("error", "reason"), [(ConnectionError("it left"), "it left"), (MemoryError(), "MemoryError")]
)
def test_a_broken_link_is_lost_and_closed(
    error: Exception, reason: str, loop: Any, owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    link, other = ends
    owner.error = error
    link.end_sending()
    loop.look_at(link)
    look(loop, owner)
    other.send(b"x")
    before = link.connection
    look(loop, owner, SECONDS)
    assert owner.lost == [(link, reason)]
    assert link.is_closed
    assert not events_of(loop, before)
    assert loop._ending == set()
    loop.look_at(link)
    look(loop, owner)
    assert len(owner.lost) == 1, "nothing is done for it any more"


def test_a_link_that_cannot_be_served_is_lost(
    loop: Any, owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    link, _ = ends
    loop._register = fail
    loop.look_at(link)
    look(loop, owner)
    assert owner.lost == [(link, "a mistake of ours")]
    assert link.is_closed


def test_the_other_end_has_some_seconds_to_read_the_last(
    clock: Clock, loop: Any, owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    link, _ = ends
    assert loop._expire_ending() is None
    link.end_sending()
    loop.look_at(link)
    look(loop, owner)
    clock.now = link.moved_at + 15.0
    assert loop._expire_ending() is not None
    assert not link.is_closed
    clock.now += 0.5
    loop._expire_ending()
    assert link.is_closed
    assert loop._expire_ending() is None


def test_an_exit_waits_for_what_is_not_sent_yet(
    clock: Clock, loop: Any, ends: tuple[Link, socket.socket]
) -> None:
    link, _ = ends
    loop.settle(1.0)
    assert clock.now == 1000.0
    assert loop._selector.select(0), "what is new is looked at at once"
    loop._woken(loop._wake, Watched())
    for waiting in (loop._ending.add, loop._changed.append):
        waiting(link)
        began = clock.now
        loop.settle(0.005)
        assert clock.now == began + 0.005
        loop._ending.clear()
    loop._changed.clear()


def test_an_exit_settles_all_loops(
    clock: Clock, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: dict[Loop, float] = {}

    def settle(self: Loop, seconds: float) -> None:
        settled[self] = seconds
        clock.now += 10.0

    monkeypatch.setattr(Loop, "settle", settle)
    another = Loop()
    vars(loop_module)["_settle_at_exit"]()
    assert {loop, another} <= settled.keys()
    assert sorted(settled.values(), reverse=True)[:2] == [3.0, 0.0], "altogether"
    another.close()


def test_an_exit_of_the_interpreter_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*, after_in_child: object) -> None:
        """Do nothing: a hook of a fork stays for ever."""

    hooked: list[object] = []
    monkeypatch.setattr(atexit, "register", hooked.append)
    monkeypatch.setattr(os, "register_at_fork", leave)
    spec = importlib.util.spec_from_file_location(f"{Loop.__module__}_again", loop_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert hooked == [vars(again)["_settle_at_exit"]]


def test_who_says_hello_is_met_once(
    listening: tuple[Any, Invitation], owner: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    loop, invitation = listening
    hellos = [Hello(rank=rank, purpose="save") for rank in (1, 2)]
    for hello in hellos:  # the second connection may get the descriptor of the first one
        connection = say_hello(invitation.addresses[0], invitation, hello, SECONDS)
        look_until(loop, owner, lambda h=hello: h in owner.met)
        assert len(received(connection, 100)) == 16, "the welcome, and the end of this owner"
        connection.close()
        assert loop._expire_greetings() is None, "it is no stranger any more"
        assert len(loop._selector.get_map()) == 2
    assert owner.met == hellos
    assert not caplog.records


@pytest.mark.parametrize("case", ["probe", "unknown", "left", "stranger"])
def test_who_is_not_met_is_let_go_of(
    case: str,
    listening: tuple[Any, Invitation],
    owner: Watched,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(_: Greeting) -> None:
        raise BrokenPipeError

    loop, invitation = listening
    monkeypatch.setattr(greeting, "_GREETING_SECONDS", 3600.0)  # at once, not after some seconds
    owner.known = case != "unknown"
    if case == "left":
        monkeypatch.setattr(Greeting, "welcome", leave)
    if case == "stranger":
        connection = socket.create_connection(invitation.addresses[0], SECONDS)
        connection.sendall(bytes(200))  # more than a hello has
    else:
        hello = Hello(rank=1, purpose="?" if case == "probe" else "save")
        connection = say_hello(invitation.addresses[0], invitation, hello, SECONDS)
    look_until(loop, owner, lambda: loop._listener._greetings)
    look_until(loop, owner, lambda: not loop._listener._greetings)
    try:
        assert len(received(connection, 100)) == (16 if case == "probe" else 0)
    except ConnectionResetError:
        assert case == "stranger"
    connection.close()
    assert owner.met == []
    assert len(loop._selector.get_map()) == 2
    assert not caplog.records


def test_a_hello_that_is_not_complete_is_waited_for(
    listening: tuple[Any, Invitation],
    owner: Watched,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, invitation = listening
    monkeypatch.setattr(greeting, "_GREETING_SECONDS", 3600.0)
    with socket.create_connection(invitation.addresses[0], SECONDS) as connection:
        connection.sendall(b"dtckpt")
        look_until(loop, owner, lambda: loop._listener._greetings)
        (incomplete,) = loop._listener._greetings.values()
        look_until(loop, owner, lambda: incomplete._data)
        assert not incomplete.connection._closed
        assert 3000.0 < loop._expire_greetings() <= 3600.0
        incomplete.limit -= 3600.0
        assert loop._expire_greetings() is None
        assert received(connection, 1) == b""
    assert len(loop._selector.get_map()) == 2
    assert not caplog.records


def test_nothing_is_read_from_who_had_to_make_way(
    listening: tuple[Any, Invitation], owner: Watched, ends: tuple[Link, socket.socket]
) -> None:
    loop, _ = listening
    link, other = ends
    other.send(b"x")
    loop._greet(link.connection, owner)
    assert link.connection.recv(1) == b"x"


def test_an_unexpected_error_is_told_and_ends_one_connection(
    clock: Clock,
    loop: Any,
    owner: Watched,
    ends: tuple[Link, socket.socket],
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, _ = ends
    loop._selector.register(link.connection, 1, fail)
    loop._handle(loop._selector.get_key(link.connection), owner)
    assert "a connection is given up after an unexpected error" in caplog.text
    assert link.is_closed
    assert len(loop._selector.get_map()) == 1
    assert clock.now == 1000.0


def test_an_unexpected_error_of_the_listener_does_not_end_it(
    clock: Clock,
    listening: tuple[Any, Invitation],
    owner: Watched,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, invitation = listening
    monkeypatch.setattr(Listener, "accept", fail)
    with socket.create_connection(invitation.addresses[0], SECONDS):
        look(loop, owner, SECONDS)
    assert "a mistake of ours" in caplog.text
    assert len(loop._selector.get_map()) == 2
    assert clock.now > 1000.0, "it will come again, and that is not to keep a processor busy"


def test_its_end_closes_everything_and_is_told(
    clock: Clock, listening: tuple[Any, Invitation], owner: Watched
) -> None:
    loop, invitation = listening
    pairs = [socket.socketpair() for _ in range(2)]
    served, new = (Link(1, one) for one, _ in pairs)
    loop.look_at(served)
    served.end_sending()
    look(loop, owner)
    loop._changed.append(new)
    with socket.create_connection(invitation.addresses[0], SECONDS) as stranger:
        look_until(loop, owner, lambda: loop._listener._greetings)
        loop._changed.append(new)
        loop.stop()
        vars(loop_module)["_run"](loop, weakref.ref(owner))
        assert received(stranger, 1) == b""
    assert owner.failed == ["the connections of this rank were closed"]
    assert loop._thread == threading.get_ident()
    assert served.is_closed
    assert new.is_closed
    held = (loop._wake, loop._waker, *loop._listener.sockets)
    assert [one.fileno() for one in held] == [-1] * 3
    assert loop._selector.get_map() is None
    loop.settle(SECONDS)
    assert clock.now == 1000.0, "there is nothing to wait for"
    for _, other in pairs:
        other.close()


def test_an_error_that_ends_it_is_told(
    loop: Any, owner: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    loop._look_around = fail
    loop.ring()
    vars(loop_module)["_run"](loop, weakref.ref(owner))
    assert owner.failed == [
        "the thread that serves the connections of this rank has ended: LookupError: a mistake of "
        "ours"
    ]
    assert "the thread that serves the connections of this rank has ended" in caplog.text
    assert "Traceback" in caplog.text


def test_it_ends_when_nobody_is_left_to_work_for(loop: Any) -> None:
    gone = weakref.ref(Watched())
    assert gone() is None
    loop.ring()
    vars(loop_module)["_run"](loop, gone)
    assert loop._wake.fileno() < 0


def test_a_forked_process_keeps_no_connection_open(ends: tuple[Link, socket.socket]) -> None:
    """Whatever has ended before: a thread of an earlier group, for one."""
    loops: list[Any] = [Loop() for _ in range(8)]
    for ended in loops[::2]:
        ended.close()
    loops[1].look_at(ends[0])
    pid = os.fork()
    if pid == 0:
        left = 9
        try:
            left = sum(loop._wake.fileno() >= 0 for loop in loops) + (not ends[0].is_closed)
        finally:
            os._exit(left)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for loop in loops[1::2]:
        assert loop._wake.fileno() >= 0
        loop.close()
        loop.close()
