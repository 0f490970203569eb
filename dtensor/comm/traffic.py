"""Who watches the collectives of the library, and what they are told.

Ranks may be threads of one process, so an observer sees what its own thread issues, and what other
threads issue for it: a save in the background, and the threads in which autograd runs the backward
pass on an accelerator. While nobody observes, ``BY_THREAD`` is empty, which is all that a
collective looks at.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

EVERYWHERE = 0
"""In place of a thread's number: observers of all threads. No thread has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A collective that was asked for, which may be issued as another one, or as several."""

    kind: str
    """As of a `Collective`, or ``scatter``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as this rank takes part in it.

    Bytes are those that have to leave and to reach this rank if ranks send to each other directly;
    how a backend routes them is its own business. An all-reduce counts as a reduce-scatter and an
    all-gather. Over all ranks as much is sent as is received.
    """

    kind: str
    """``all_gather``, ``all_to_all``, ``all_reduce``, ``reduce_scatter``, ``broadcast``, or
    ``agreement`` for a phase of a save or load that all ranks conclude together."""
    group: Any
    """What it goes over: a process group, a raw backend, or the connections of saves and loads."""
    ranks: tuple[int, ...]
    """Global ranks in the order of the group; ``range(size)`` where it is registered nowhere."""
    rank: int
    """The place of this rank in the group."""
    sent_bytes: int
    received_bytes: int
    reduce_op: str = ""
    agreed: str = ""
    """What has to be equal on all ranks besides the kind: sizes, dtypes, the source."""
    sent_to: tuple[int, ...] = ()
    """Bytes for every rank of the group, where they may differ."""
    received_from: tuple[int, ...] = ()
    """Bytes from every rank of the group, where they may differ."""
    started: float
    """``time.perf_counter()`` when it was issued."""
    asked: Asked | None = None
    """What it is a part of; None where it was asked for as it is."""


class Observer:
    """Is told of collectives; what it raises in ``before`` keeps a collective from being issued.

    The calls come in the thread that issues, or waits, so ``call_site()`` tells where that is.
    """

    def before(self, collective: Collective) -> None:
        """Hear of a collective that is about to be issued."""

    def issued(self, collective: Collective) -> None:
        """Hear that it is under way."""

    def waited(self, collective: Collective, seconds: float) -> None:
        """Hear that its result has been waited for, ``seconds`` after it was issued."""


BY_THREAD: dict[int, tuple[Observer, ...]] = {}
"""Observers by the number of their thread; empty while there are none."""
_lock = threading.RLock()
_owners: list[Callable[[], int | None]] = []


def add_observer(observer: Observer, thread: int | None = None) -> None:
    """Have an observer told of what a thread issues, this one by default, or ``EVERYWHERE``."""
    number = threading.get_ident() if thread is None else thread
    with _lock:
        BY_THREAD[number] = (*BY_THREAD.get(number, ()), observer)


def remove_observer(observer: Observer, thread: int | None = None) -> None:
    """Undo ``add_observer``."""
    number = threading.get_ident() if thread is None else thread
    with _lock:
        left = [found for found in BY_THREAD.get(number, ()) if found is not observer]
        if left:
            BY_THREAD[number] = tuple(left)
        else:
            BY_THREAD.pop(number, None)


@contextmanager
def observing(observers: Sequence[Observer]) -> Generator[None]:
    """Within it, observers see what this thread issues: for threads that work for another one."""
    for observer in observers:
        add_observer(observer)
    try:
        yield
    finally:
        for observer in observers:
            remove_observer(observer)


def ask_for_owner(owner: Callable[[], int | None]) -> None:
    """Have ``owner`` asked whose work an unknown thread does: the number of a thread, or None."""
    if owner not in _owners:
        _owners.append(owner)


def working_thread() -> int:
    """Return the number of the thread whose work this one does, which may be its own."""
    for owner in _owners:
        number = owner()
        if number is not None:
            return number
    return threading.get_ident()


def observers_here() -> tuple[Observer, ...]:
    """Return the observers of what this thread issues, but for those of all threads."""
    if not BY_THREAD:
        return ()
    found = BY_THREAD.get(threading.get_ident())
    return BY_THREAD.get(working_thread(), ()) if found is None else found


def all_observers_here() -> tuple[Observer, ...]:
    """Return all observers of what this thread issues."""
    return (*BY_THREAD.get(EVERYWHERE, ()), *observers_here())


def issue_observed(collective: Collective, call: Callable[[], Any]) -> Any:
    """Issue a collective and tell its observers; the work that is returned tells of its end."""
    observers = all_observers_here()
    for observer in observers:
        observer.before(collective)
    _issuing.depth += 1
    try:
        work = call()
    finally:
        _issuing.depth -= 1
    for observer in observers:
        observer.issued(collective)
    return _ObservedWork(work, collective, observers) if observers else work


def tell_done(collective: Collective) -> None:
    """Tell the observers of what is over already: what was sent is known only then."""
    observers = all_observers_here()
    seconds = time.perf_counter() - collective.started
    for observer in observers:
        observer.issued(collective)
    for observer in observers:
        observer.waited(collective, seconds)


class _Issuing(threading.local):
    depth = 0


_issuing = _Issuing()


def is_issuing() -> bool:
    """Whether this thread is inside of a collective of ours, which calls torch's in its turn."""
    return _issuing.depth > 0


class _Asking(threading.local):
    now: Asked | None = None


_asking = _Asking()


def asked_now() -> Asked | None:
    """Return what this thread issues collectives for."""
    return _asking.now


class asking:
    """Within it all that this thread issues is one collective of a kind, or a part of a larger one.

    An empty kind changes nothing.
    """

    __slots__ = ("_before", "asked")

    def __init__(self, kind: str) -> None:
        self._before: Asked | None = None
        self.asked = Asked(kind) if kind else None

    def __enter__(self) -> Self:
        self._before = _asking.now
        if self._before is None:
            _asking.now = self.asked
        return self

    def __exit__(self, *error: object) -> None:
        _asking.now = self._before


def counted_as(
    kind: str,
) -> Callable[[Callable[P, Callable[[], T]]], Callable[P, Callable[[], T]]]:
    """Have what a function starts, and what its result still issues, counted as one collective."""

    def decorate(start: Callable[P, Callable[[], T]]) -> Callable[P, Callable[[], T]]:
        @functools.wraps(start)
        def call(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
            if not BY_THREAD:
                return start(*args, **kwargs)
            scope = asking(kind)
            with scope:
                finish = start(*args, **kwargs)

            def finish_counted() -> T:
                with scope:
                    return finish()

            return finish_counted

        return call

    return decorate


class _ObservedWork:
    """Tells when it has been waited for, once."""

    def __init__(self, work: Any, collective: Collective, observers: tuple[Observer, ...]) -> None:
        self._work = work
        self._collective = collective
        self._observers = observers

    def wait(self, *args: Any) -> Any:
        """Wait for the result."""
        result = self._work.wait(*args)
        observers, self._observers = self._observers, ()
        seconds = time.perf_counter() - self._collective.started
        for observer in observers:
            observer.waited(self._collective, seconds)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_NOT_THE_USER = ("contextlib", "dtckpt", "functools", "threading", "torch")


def call_site() -> str:
    """Return ``file:line in function`` of the innermost frame that is neither ours nor torch's.

    Empty where there is none, as in the threads in which autograd runs on an accelerator.
    """
    frame = _user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_THE_USER:
            return frame
        frame = frame.f_back
    return None
