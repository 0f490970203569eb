"""Saves in the background while their process ends: brought to an end, and not failing silently.

A process ends in three steps. The main thread is over; then Python waits for other threads; then
exit handlers run. Thread pools take no work from the first step on, and some versions (3.12.0 and
3.12.1) start no threads either, which drivers of stores need, to resolve a name for one. So saves
that are to be waited for are waited for in the first step, before the pools close.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol

AtExit = Literal["wait", "abort"]
FAILED_EXIT_CODE = 1
"""Of a process that ends while the failure of a save has been told to nobody."""


class Save(Protocol):
    """A save that has not ended, or has failed and nobody knows."""

    at_exit: AtExit

    def end_with_process(self) -> bool:
        """Bring it to its end, log a failure, and return whether all is well."""
        ...


_unsettled: set[Save] = set()
_has_failed = False


def remember(save: Save) -> None:
    """Keep a save until ``forget`` is called: the process does not end well without it."""
    _unsettled.add(save)


def forget(save: Save) -> None:
    """Let go of a save that ended well, or whose failure somebody has been told."""
    _unsettled.discard(save)


def _settle(saves: list[Save]) -> None:
    global _has_failed
    for save in saves:
        if not save.end_with_process():
            _has_failed = True
        forget(save)


def _when_main_thread_ends() -> None:
    # Others may still end, and what follows a save may come to be when that has ended.
    while saves := [save for save in list(_unsettled) if save.at_exit == "wait"]:
        _settle(saves)
    # Last come, first called: other handlers may take away what saves need.
    atexit.unregister(_when_process_ends)
    atexit.register(_when_process_ends)


def _when_process_ends() -> None:
    _settle(list(_unsettled))  # those to be aborted, and those that other threads have begun
    if _has_failed:
        _exit_with_failure()


def _exit_with_failure() -> None:
    """End the process with an exit code that tells of it, after all that Python does at an exit.

    An exception would not do it: handlers of an exit cannot change its code by one.
    """
    atexit.unregister(_when_process_ends)
    handlers: Callable[[], None] | None = getattr(atexit, "_run_exitfuncs", None)
    if handlers is not None:
        handlers()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(FAILED_EXIT_CODE)


def _forget_in_child() -> None:
    # The threads of these saves are the parent's; they will never end here.
    _unsettled.clear()


importlib.import_module("concurrent.futures.thread")  # what is registered later is called first
_register = getattr(threading, "_register_atexit", None)
if _register is not None:  # private to Python; without it pools close before saves are waited for
    with suppress(RuntimeError):  # the main thread has ended already
        _register(_when_main_thread_ends)
atexit.register(_when_process_ends)
os.register_at_fork(after_in_child=_forget_in_child)
