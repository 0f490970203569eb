"""How a driver is asked: within a deadline, and again where it may go well the next time.

Drivers have retries of their own, which multiply each other and know no deadline. They are
switched off as far as that goes; these are instead.
"""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, final

from dtckpt.errors import StorageTimeout
from dtckpt.interrupts import raised_by_signal_handler

from .limit import Limit
from .trouble import PASSING, Kind, Trouble, remote_error, told, without_secrets

DEADLINE_SECONDS = 120.0

# Neither locks nor drivers know infinity.
_LONGEST_DEADLINE = 30 * 86400.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

# A host that has not answered yet, not even once, may be a mistake in the settings.
_SHARE_OF_STRANGERS = 0.1

# Where a coroutine waits for others, which may be threads.
_POLL = 0.02

_until: ContextVar[float | None] = ContextVar("dtckpt_until", default=None)


def deadline_of(options: Mapping[str, Any]) -> float:
    """Return the seconds that storage options grant; ``ValueError`` for what is no such number."""
    given = options.get("deadline")
    if given is None:
        return DEADLINE_SECONDS
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise ValueError(f"deadline is a number of seconds above 0, got {given!r}")
    return float(min(given, _LONGEST_DEADLINE))


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and chance."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.SystemRandom().random
    """Not the generator that a training draws from: after a refusal it would go on differently."""


def pause_after(attempt: int, chance: float) -> float:
    """Return the seconds to wait after so many failures: at random, up to a bound that doubles.

    Full jitter: ranks that were refused together do not come again together.
    """
    return chance * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 16))


@final
class Connection:
    """A file system of fsspec, or another driver that blocks, and what all that asks it shares."""

    def __init__(
        self, fs: Any, deadline: float, limit: Limit | None = None, clock: Clock | None = None
    ) -> None:
        """``deadline`` is in seconds, for each operation with all its attempts."""
        self.fs = fs
        self.clock = Clock() if clock is None else clock
        self.limit = Limit(now=self.clock.now) if limit is None else limit
        self.deadline = deadline
        self.was_heard = False
        """Whether a server has answered."""

    def ask(
        self,
        action: str,
        where: str,
        call: Callable[[], Any],
        *,
        attempt: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Return what ``call()`` does; what it returns is awaited if the driver is asynchronous.

        It is called again after failures that pass, each time within ``attempt()``. Raises
        ``StorageError`` that says ``cannot {action} {where}``; ``StorageTimeout`` once the time is
        up, at which a driver that has not come back is left behind.
        """
        attempts = Attempts(self, action, where)
        while True:
            try:
                with attempt(), attempts.slots(1):
                    result = run(self.fs, call, attempts.left())
            except Exception as error:
                if raised_by_signal_handler(error):
                    raise
                attempts.failed(error)
            else:
                attempts.succeeded()
                return result

    def ask_blocking(self, action: str, where: str, call: Callable[[], Any]) -> Any:
        """``ask`` for what blocks although the driver may be asynchronous, and only once."""
        attempts = Attempts(self, action, where)
        try:
            with attempts.slots(1):
                return wait_for(self.fs, call, attempts.left())
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            attempts.pause(error, again=False)

    @contextmanager
    def in_time(self, share: float = 1.0) -> Generator[None]:
        """What is asked in the block, by this thread, has one deadline together.

        Within another such block it may take a share of what is left.
        """
        now, until = self.clock.now(), _until.get()
        left = self.deadline if until is None else max(0.0, until - now)
        token = _until.set(now + left * share)
        try:
            yield
        finally:
            _until.reset(token)


@final
class Attempts:
    """The attempts at one operation."""

    def __init__(self, connection: Connection, action: str, where: str) -> None:
        self._connection = connection
        self._clock = connection.clock
        self._action = action
        self._where = where
        self._num_failed = 0
        self._before = ""
        self._asked_at = self._begun_at = self._clock.now()
        self._until = _until.get() or self._begun_at + connection.deadline

    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._until - self._clock.now())

    @contextmanager
    def slots(self, wanted: int) -> Generator[int]:
        """Hold one slot of the limit or more for an attempt; tells how many."""
        with self._connection.limit.slots(wanted, self.left()) as number:
            self._asked_at = self._clock.now()
            yield number

    def succeeded(self) -> None:
        """Say that the server did what it was asked for."""
        self._connection.was_heard = True
        self._connection.limit.answered()

    def progressed(self) -> None:
        """Say that a part of it is done; what is left has the full time."""
        self._num_failed = 0
        self._begun_at = self._clock.now()
        self._until = _until.get() or self._begun_at + self._connection.deadline

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Hold a slot of the limit for an attempt on an event loop, which ends when time is up."""
        async with asyncio.timeout(self.left()):
            while (taken := self._connection.limit.take(1)) == 0:
                await asyncio.sleep(_POLL)
            try:
                self._asked_at = self._clock.now()
                yield
            finally:
                self._connection.limit.give_back(taken)

    def failed(self, error: Exception) -> None:
        """Wait for a while after a failure that passes; raise what the user gets after others."""
        self._clock.sleep(self.pause(error))

    def pause(self, error: Exception, *, again: bool = True) -> float:
        """Return how long to wait after a failure that passes; raise what the user gets else."""
        error, trouble = without_secrets(error), told(error)
        if trouble.kind is Kind.THROTTLED:
            self._connection.limit.refused(self._asked_at, trouble.retry_after)
        self._connection.was_heard |= trouble.status != 0
        pause = pause_after(self._num_failed, self._clock.chance())
        pause = max(pause, trouble.retry_after or 0.0)
        self._num_failed += 1
        if not again or trouble.kind not in PASSING:
            raise remote_error(self._action, self._where, error, trouble) from error
        if self._clock.now() + pause >= self._patience(trouble):
            raise self._too_late(error, trouble) from error
        self._before = f"{type(error).__name__}: {error}"
        return pause

    def _patience(self, trouble: Trouble) -> float:
        """Return the time at which there is an end of it."""
        if trouble.kind is Kind.UNREACHABLE and not self._connection.was_heard:
            seconds = self._connection.deadline * _SHARE_OF_STRANGERS
            return min(self._until, self._begun_at + seconds)
        return self._until

    def _too_late(self, error: Exception, trouble: Trouble) -> Exception:
        made = remote_error(self._action, self._where, error, trouble)
        seconds = self._clock.now() - self._begun_at
        text = (
            f"{made.strerror or made}; given up after {seconds:.1f} s, attempts: {self._num_failed}"
        )
        if trouble.kind is Kind.TIMED_OUT and self._before:
            text += f"; the attempt before: {self._before}"  # the last one may have had no time
        kind = type(made) if trouble.kind is Kind.UNREACHABLE else StorageTimeout
        return kind(errno.ETIMEDOUT, text)


def run(fs: Any, call: Callable[[], Any], seconds: float) -> Any:
    """Return what ``call()`` does, or what comes of it on the loop of an asynchronous ``fs``.

    ``TimeoutError`` after so many seconds: a coroutine is cancelled then, a thread left behind.
    """
    if not getattr(fs, "async_impl", False):
        return wait_for(fs, call, seconds)
    return _result(asyncio.run_coroutine_threadsafe(_awaited(call), fs.loop), seconds)


def wait_for(fs: Any, call: Callable[[], Any], seconds: float) -> Any:
    """Return what a function does that blocks; ``TimeoutError`` as of ``run``."""
    if "memory" in _protocols(fs):
        return call()
    return _result(_in_a_thread(call), seconds)


def _result(future: Future[Any], seconds: float) -> Any:
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise  # it is the driver's own
        raise TimeoutError(f"no reply within {seconds:.1f} s") from None
    finally:
        future.cancel()


def is_on_loop(fs: Any) -> bool:
    """Whether this is the thread of a driver's own event loop, which must not wait for itself.

    The garbage collector may come by there, and end what somebody has dropped.
    """
    try:
        return asyncio.get_running_loop() is getattr(fs, "loop", None)
    except RuntimeError:
        return False


async def _awaited(call: Callable[[], Any]) -> Any:
    return await call()


def _protocols(fs: Any) -> tuple[str, ...]:
    found: str | tuple[str, ...] = getattr(fs, "protocol", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _in_a_thread(call: Callable[[], Any]) -> Future[Any]:
    """Begin a call in a thread of its own, which does not keep the interpreter from ending."""
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it
        try:
            future.set_result(call())
        except BaseException as error:  # it must reach who waits, whatever it is
            future.set_exception(error)

    context = copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="dtckpt-ask", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # an interpreter that is ending starts no threads
        work()
    return future
