"""Exceptions that a signal handler of the program has raised, wherever the library was then.

An alarm, a timeout of a test, or a handler of SIGTERM that raises is meant for the program. It is
no failure of storage and no damage of a file, and must not be repeated, wrapped or logged away.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import CodeType
from typing import Any


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether an exception comes out of a handler that is registered for some signal.

    Handlers run in the main thread; elsewhere it is False.

    >>> raised_by_signal_handler(ValueError("of a file"))
    False
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    codes = set(_codes_of_handlers())
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _codes_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if handler is signal.default_int_handler or not callable(handler):
            continue
        while isinstance(handler, partial):
            handler = handler.func  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        function: Any = getattr(handler, "__func__", handler)
        if not hasattr(function, "__code__"):  # an object that is called
            function = vars(type(function)).get("__call__")
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code
