"""Signals that ask for a save, as those who run jobs send them before they end one.

Handlers of others stay what they are: they are called, too, and stand there again at the end.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from dtckpt.logs import logger_of

logger = logger_of("checkpoint")

Ask = Callable[[str, timedelta | None], None]
"""Takes the name of a signal and how long the answer may take; called in signal handlers."""

DEFAULT_SAVE = (signal.SIGUSR1,)
DEFAULT_STOP = (signal.SIGTERM,)


class Signals:
    """Handlers of this process that ask for a save: and go on, or stop afterwards.

    Python's handlers run in the main thread, between two steps of the interpreter: not while that
    thread waits in a collective that never ends. Processes forked from this one have the handlers
    that were there before.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        save: Iterable[int] = DEFAULT_SAVE,
        stop: Iterable[int] = DEFAULT_STOP,
        within: timedelta | None = None,
    ) -> None:
        """``ask`` is called with the name of a signal, for those to stop with ``within`` as well.

        Outside of the main thread, and where a handler stands that Python does not know of
        (``faulthandler.register``), nothing is installed, and a warning says so.
        """
        stops = {signal.Signals(number) for number in stop}
        wanted = stops | {signal.Signals(number) for number in save}
        self._stops = frozenset(number.name for number in stops)
        self._handlers: dict[signal.Signals, _Handler] = {}
        if not _is_main_thread():
            names = ", ".join(sorted(number.name for number in wanted))
            if wanted:
                logger.warning("%s are not handled: only the main thread can do that", names)
            return
        for number in sorted(wanted):
            if _is_foreign(number):
                logger.warning(
                    "%s is not handled: a handler stands there that Python does not know of, as "
                    "of faulthandler.register. Choose another signal",
                    number.name,
                )
                continue
            before: Any = signal.getsignal(number)
            handler = _Handler(ask, before, within if number in stops else None, number in stops)
            signal.signal(number, handler)
            self._handlers[number] = handler
        _open.add(self)

    def stops(self, reasons: Iterable[str]) -> bool:
        """Whether one of the reasons for a save is a signal to stop, on whichever rank it came."""
        return not self._stops.isdisjoint(reasons)

    def raise_held(self) -> None:
        """Raise what a handler of others had raised at a signal to stop, SystemExit for one.

        To be called once the save is over.
        """
        for handler in self._handlers.values():
            held, handler.held = handler.held, None
            if held is not None:
                raise held

    def close(self) -> None:
        """Put back the handlers that were there, unless others have been installed since.

        Those call ours, which then only calls the one before it.
        """
        _open.discard(self)
        for handler in self._handlers.values():
            handler.is_open = False
        if _is_main_thread():
            self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handler.before())

    def become_child(self) -> None:
        """Put back the handlers in a forked process, which takes part in no save.

        Else a data loader that is told to end would ask for one, and go on.
        """
        for handler in self._handlers.values():
            handler.is_open = False
        with suppress(ValueError):  # no main thread; the handlers pass on all the same
            self._put_back()


class _Handler:
    """What the system calls; it may stay in the chain of somebody else's after it was closed."""

    def __init__(self, ask: Ask, before: Any, within: timedelta | None, is_stop: bool) -> None:
        self._ask = ask
        self._before = before
        self._within = within
        self._is_stop = is_stop
        self.is_open = True
        self.held: BaseException | None = None

    def before(self) -> Any:
        """Return the handler before this one that still does something."""
        found = self._before
        while isinstance(found, _Handler) and not found.is_open:
            found = found._before
        return found

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.is_open:
            self._pass_on(number, frame)
            return
        self._ask(signal.Signals(number).name, self._within)
        before = self.before()
        if not callable(before):
            return
        try:
            before(number, frame)
        except BaseException as error:
            if not self._is_stop:
                raise
            self.held = self.held or error

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self.before()
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and signal.getsignal(number) is self:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_foreign(number: signal.Signals) -> bool:
    """Whether a signal is handled by something that is not Python's, as far as can be seen."""
    if callable(signal.getsignal(number)):
        return False
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (number - 1) & 1)
    return False


_open: weakref.WeakSet[Signals] = weakref.WeakSet()


def _forget_in_child() -> None:
    for signals in list(_open):
        signals.become_child()


os.register_at_fork(after_in_child=_forget_in_child)
