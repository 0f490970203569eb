"""The vocabulary of injected faults: which call, and what goes wrong in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Op = Literal[
    "stat", "read", "read_into", "create", "write", "close", "abort", "publish", "list", "delete"
]
"""``write``, ``close`` and ``abort`` are those of streams; the rest are those of stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One storage call that is about to happen."""

    number: int
    """1 for the first call on the store."""
    op: Op
    name: str
    """The object's name (for ``list`` the prefix), seen from the outermost faulty store."""
    size: int = 0
    """Bytes written, announced or asked for; 0 where there are none or it is not known."""


class Fault:
    """What may go wrong within one call; this one does nothing. Subclass it for your own.

    The hooks are called in the order in which they stand here. Those for data are skipped by calls
    that carry none. An exception raised by a hook is what the caller of the store gets.
    """

    __slots__ = ()

    def before(self) -> None:
        """Called before the effect."""

    def sent(self, data: memoryview) -> memoryview:
        """The bytes to write in place of ``data`` (read-only)."""
        return data

    def received(self, data: memoryview) -> memoryview:
        """The bytes to hand out in place of ``data`` (a writable copy)."""
        return data

    def after(self) -> None:
        """Called after the effect, before the caller learns of it."""


Plan = Callable[[Call], Fault | None]
"""Chooses the fault of each call; called under a lock, so it must not call the store."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``fault`` for the calls that match ``op`` and ``name`` (both globs, case-sensitive)."""

    fault: Fault
    op: str = "*"
    name: str = "*"
    nth: int | None = None
    """Only for the nth matching call, counted from 1; ``None``: for all of them."""

    def matches(self, call: Call) -> bool:
        """Whether ``op`` and ``name`` fit; ``nth`` is for the store to count."""
        return fnmatchcase(call.op, self.op) and fnmatchcase(call.name, self.name)


@dataclass(frozen=True, slots=True)
class RaiseError(Fault):
    """Raise ``error``: before the effect, or ``after`` it, as when a reply is lost."""

    error: BaseException
    after_effect: bool = False

    def before(self) -> None:
        if not self.after_effect:
            raise self.error.with_traceback(None)  # else it keeps what it met each time

    def after(self) -> None:
        if self.after_effect:
            raise self.error.with_traceback(None)


@dataclass(frozen=True, slots=True)
class FlipBit(Fault):
    """Flip one bit of the data read. ``read_into`` counts over its buffers, in request order."""

    bit: int = 0
    """Taken modulo the number of bits; negative counts from the end."""

    def received(self, data: memoryview) -> memoryview:
        if data.nbytes:
            byte, bit = divmod(self.bit % (8 * data.nbytes), 8)
            data[byte] ^= 1 << bit
        return data


@dataclass(frozen=True, slots=True)
class ShortRead(Fault):
    """Hand out only the first ``keep`` bytes, silently; other buffers of a batch stay as they are.

    It breaks the contract of stores: checksums must notice.
    """

    keep: int = 0

    def received(self, data: memoryview) -> memoryview:
        return data[: self.keep]


@dataclass(frozen=True, slots=True)
class TornWrite(Fault):
    """Write only the first ``keep`` bytes, then raise ``error``.

    A ``publish`` torn so leaves a truncated object, as no honest store would.
    """

    error: BaseException
    keep: int = 0

    def sent(self, data: memoryview) -> memoryview:
        return data[: self.keep]

    def after(self) -> None:
        raise self.error


@dataclass(frozen=True, slots=True)
class Delay(Fault):
    """Sleep for ``seconds`` before the effect."""

    seconds: float

    def before(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Kill(Fault):
    """End the process by SIGKILL: before the effect, or ``after`` it."""

    after_effect: bool = False

    def before(self) -> None:
        if not self.after_effect:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self) -> None:
        if self.after_effect:
            os.kill(os.getpid(), signal.SIGKILL)
