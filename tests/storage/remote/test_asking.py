"""Deadlines, pauses, and how a busy server is spared: with a clock that tests set."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.implementations.memory import MemoryFileSystem

from dtckpt.errors import ObjectNotFound, StorageError, StorageTimeout
from dtckpt.storage import open_store
from dtckpt.storage.remote.asking import Attempts, Clock, Connection, pause_after
from dtckpt.storage.remote.fsspec.dialects.base import method
from dtckpt.storage.remote.limit import Limit

from ...servers.fake_s3 import BUCKET, fake_s3


class Time:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def connection(self, deadline: float = 60.0, chance: float = 1.0) -> Connection:
        """Return a connection to nothing, by this clock."""
        clock = Clock(lambda: self.now, self.sleep, lambda: chance)
        return Connection(MemoryFileSystem(), deadline, clock=clock)


class Refusal(Exception):
    """As aiohttp raises it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture(autouse=True)
def real_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have shortened them."""
    monkeypatch.setattr("dtckpt.storage.remote.asking._LONGEST_PAUSE", 10.0)


def failing(*errors: Exception) -> Callable[[], str]:
    """Return a call that raises these, one at a time, and then returns."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_pauses_double_up_to_a_bound_and_are_spread() -> None:
    assert [pause_after(attempt, 1.0) for attempt in (0, 1, 2, 5)] == [0.1, 0.2, 0.4, 3.2]
    assert pause_after(7, 1.0) == pause_after(10**6, 1.0) == 10.0
    assert pause_after(5, 0.0) == 0.0
    assert pause_after(5, 0.5) == 1.6


@pytest.mark.parametrize(
    "error",
    [
        Refusal(503),
        Refusal(500),
        Refusal(429),
        Refusal(408),
        ConnectionResetError(),
        TimeoutError(),
    ],
)
def test_what_passes_is_asked_again(clock: Time, error: Exception) -> None:
    assert clock.connection().ask("read", "x", failing(error, error, error)) == "done"
    assert clock.slept == [0.1, 0.2, 0.4]


def test_pauses_leave_the_random_numbers_of_a_training_alone(clock: Time) -> None:
    connection = Connection(MemoryFileSystem(), 60.0, clock=Clock(sleep=clock.sleep))
    before = random.getstate()
    assert connection.ask("read", "x", failing(Refusal(503), Refusal(503))) == "done"
    assert random.getstate() == before
    assert len(set(clock.slept)) == 2


@pytest.mark.parametrize("error", [Refusal(403), Refusal(400), OSError("broken"), KeyError("x")])
def test_what_stays_is_not_asked_again(clock: Time, error: Exception) -> None:
    with pytest.raises(StorageError, match="cannot read x") as caught:
        clock.connection().ask("read", "x", failing(error))
    assert caught.value.__cause__ is error
    assert clock.slept == []


def test_the_deadline_ends_it(clock: Time) -> None:
    def busy() -> None:
        raise Refusal(503)

    with pytest.raises(StorageTimeout, match=r"cannot read x.*busy.*given up after .* attempts"):
        clock.connection(20).ask("read", "x", busy)
    assert 1010 < clock.now < 1020


def test_the_last_attempt_may_have_had_no_time(clock: Time) -> None:
    def busy() -> None:
        clock.now += 8
        raise Refusal(500) if clock.now < 1020 else TimeoutError("no reply within 0.1 s")

    with pytest.raises(StorageTimeout, match=r"no reply .*: 3; the attempt before: .* 500"):
        clock.connection(20).ask("read", "x", busy)


def test_the_server_says_when_to_come_again(clock: Time) -> None:
    clock.connection().ask("read", "x", failing(Refusal(503, Retry_After="7")))
    assert clock.slept == [7.0]


def test_one_that_says_too_late_is_not_waited_for(clock: Time) -> None:
    with pytest.raises(StorageTimeout):
        clock.connection().ask("read", "x", failing(Refusal(503, retry_after="61")))
    assert clock.slept == []


@pytest.mark.parametrize("seconds", ["1e9", "inf"])
def test_no_server_shuts_a_bucket_for_good(clock: Time, seconds: str) -> None:
    connection = clock.connection()
    with pytest.raises(StorageTimeout):
        connection.ask("read", "x", failing(Refusal(503, retry_after=seconds)))
    clock.now += 61
    assert connection.ask("read", "x", failing()) == "done"


@pytest.mark.parametrize("deadline", [float("inf"), 1e300])
@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_a_deadline_may_be_as_long_as_one_likes(deadline: float, engine: str) -> None:
    with fake_s3() as server:
        server.objects.put(BUCKET, "x", b"data")
        options = server.storage_options | {"deadline": deadline, "engine": engine}
        store = open_store(f"s3://{BUCKET}", **options)
        assert store.read("x") == b"data"
        with store.create("y", 20 << 20) as stream:
            stream.write(bytes(20 << 20))
        assert store.stat("y").size == 20 << 20


def test_the_time_to_come_again_is_by_the_clock_of_the_server(clock: Time) -> None:
    error = Refusal(
        503,
        Retry_After="Mon, 05 Jan 2026 10:00:30 GMT",
        Date="Mon, 05 Jan 2026 10:00:21 GMT",
    )
    clock.connection().ask("read", "x", failing(error))
    assert clock.slept == [9.0]


def test_a_host_that_never_answered_is_given_up_early(clock: Time) -> None:
    def refused() -> None:
        raise ConnectionRefusedError

    connection = clock.connection(100)
    with pytest.raises(StorageError, match="check the endpoint"):
        connection.ask("read", "x", refused)
    assert clock.now < 1010
    connection.ask("read", "x", failing())
    before = clock.now
    with pytest.raises(StorageError, match="check the endpoint"):
        connection.ask("read", "x", refused)
    assert clock.now > before + 80


def test_several_requests_may_have_one_deadline(clock: Time) -> None:
    connection = clock.connection(60)

    def left() -> float:
        return Attempts(connection, "stat", "x").left()

    with connection.in_time():
        clock.now += 50
        assert left() == 10
        with connection.in_time(0.5):
            assert left() == 5
        assert left() == 10
        clock.now += 11
        assert left() == 0
        with pytest.raises(StorageTimeout, match=r"cannot stat x: .*attempts"):
            connection.ask("stat", "x", failing(ConnectionResetError()))
    assert left() == 60


def test_each_attempt_is_told() -> None:
    clock, seen = Time(), list[str]()

    class Attempt:
        def __enter__(self) -> None:
            seen.append("begun")

        def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
            seen.append(type(error).__name__)

    clock.connection().ask("write", "x", failing(Refusal(503)), attempt=Attempt)
    assert seen == ["begun", "Refusal", "begun", "NoneType"]


def test_the_limit_halves_once_for_what_is_refused_together() -> None:
    clock = Time()
    limit = Limit(16, lambda: clock.now)
    asked_at = clock.now
    clock.now += 1
    for _ in range(16):
        limit.refused(asked_at, None)
    assert limit.allowed == 8
    for _ in range(10):
        clock.now += 1
        limit.refused(clock.now, None)
    assert limit.allowed == 1


def test_the_limit_grows_back_by_one_for_as_many_answers() -> None:
    limit = Limit(16, lambda: 0.0)
    limit.refused(0.0, None)
    for _ in range(9):
        limit.answered()
    assert limit.allowed == 9
    for _ in range(1000):
        limit.answered()
    assert limit.allowed == 16


def test_slots_are_as_many_as_are_free() -> None:
    limit = Limit(4, lambda: 0.0)
    with limit.slots(3, 0) as three:
        assert three == 3
        with limit.slots(3, 0) as one:
            assert one == 1
            with pytest.raises(TimeoutError), limit.slots(1, 0):
                pass
    with limit.slots(9, 0) as four:
        assert four == 4


def test_who_waits_for_a_slot_gets_the_next_one() -> None:
    limit = Limit(1)
    order: list[str] = []

    def wait() -> None:
        with limit.slots(1, 30):
            order.append("second")

    with limit.slots(1, 30):
        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_nobody_asks_before_the_server_wants_it() -> None:
    clock = Time()
    limit = Limit(4, lambda: clock.now)
    limit.refused(clock.now, 5.0)
    with pytest.raises(TimeoutError, match="busy"), limit.slots(1, 0):
        pass
    clock.now += 5
    with limit.slots(1, 0) as number:
        assert number == 1


class Silent(AsyncFileSystem):
    """A driver of a server that does not answer."""

    cachable = False
    was_cancelled = threading.Event()

    async def _info(self, path: str, **kwargs: Any) -> Any:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise


def test_a_driver_that_does_not_come_back_is_left() -> None:
    fs = Silent(loop=get_loop())
    connection = Connection(fs, 0.2)
    began = time.monotonic()
    with pytest.raises(StorageTimeout, match=r"cannot stat x: no reply within 0\.\d s"):
        connection.ask("stat", "x", lambda: method(fs, "info")("x"))
    assert fs.was_cancelled.wait(30)
    assert time.monotonic() - began < 30


def test_a_blocking_driver_that_does_not_come_back_is_left() -> None:
    from fsspec.implementations.local import LocalFileSystem

    done = threading.Event()
    connection = Connection(LocalFileSystem(), 0.2)
    with pytest.raises(StorageTimeout, match=r"cannot stat x: no reply within 0\.\d s"):
        connection.ask("stat", "x", lambda: done.wait(600))
    done.set()
    with pytest.raises(ObjectNotFound):
        connection.ask("stat", "x", failing(FileNotFoundError()))
