"""Exceptions of every kind, and a way to have them raised at any phase of a save or load."""

from __future__ import annotations

import asyncio
import errno
import importlib
import pkgutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import dtckpt.checkpoint
from dtckpt.checkpoint.ranks import together as together_module
from dtckpt.checkpoint.ranks.base import Ranks
from dtckpt.checkpoint.ranks.together import nothing, together
from dtckpt.errors import (
    AlreadyCommitted,
    Cancelled,
    CheckpointError,
    LayoutMismatch,
    ObjectNotFound,
    RankFailed,
    StorageError,
)

SIZE = 3

Moment = Literal["instead", "afterwards", "decision"]
Errors = Mapping[int, BaseException | None]


class Unpicklable(Exception):
    """Holds what no pickle can carry."""

    def __init__(self) -> None:
        super().__init__("held", threading.Lock())


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Particular(Exception):
    """Can be pickled, but not made again from what was pickled."""

    def __init__(self, *, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


class QuotaExceeded(StorageError):
    """An error of the library's tree that takes arguments of its own."""

    def __init__(self, used: int, limit: int) -> None:
        super().__init__(errno.EDQUOT, f"{used} of {limit} bytes")


KINDS: dict[str, tuple[Callable[[], BaseException], type[CheckpointError], str]] = {
    "ordinary": (lambda: ValueError("bad"), CheckpointError, "ValueError: bad"),
    "unpicklable": (Unpicklable, CheckpointError, "Unpicklable: ('held', <unlocked"),
    "unprintable": (Unprintable, CheckpointError, "Unprintable: (its text could not be made"),
    "particular": (
        lambda: Particular(code=3, where="x"),
        CheckpointError,
        "Particular: code 3 at x",
    ),
    "hostile text": (lambda: OSError("\udcff\n\0é"), CheckpointError, "OSError: \udcff\n\0é"),
    "stop": (lambda: StopIteration(7), CheckpointError, "StopIteration: 7"),
    "group": (
        lambda: ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        CheckpointError,
        "ExceptionGroup: two (2 sub-exceptions)",
    ),
    "memory": (MemoryError, CheckpointError, "MemoryError: "),
    "system": (
        lambda: OSError(errno.ENOSPC, "No space left", "/x"),
        CheckpointError,
        "OSError: [Errno 28] No space left: '/x'",
    ),
    "missing": (
        lambda: ObjectNotFound(errno.ENOENT, "no object"),
        ObjectNotFound,
        "[Errno 2] no object",
    ),
    "mismatch": (lambda: LayoutMismatch("odd shapes"), LayoutMismatch, "odd shapes"),
    "derived": (
        lambda: QuotaExceeded(9, 8),
        StorageError,
        "QuotaExceeded: [Errno 122] 9 of 8 bytes",
    ),
    "committed": (lambda: AlreadyCommitted("there"), AlreadyCommitted, "there"),
    "cancelled": (lambda: Cancelled("no more"), Cancelled, "no more"),
    "rank": (lambda: RankFailed("gone"), RankFailed, "gone"),
    "interrupt": (KeyboardInterrupt, CheckpointError, "KeyboardInterrupt: "),
    "exit": (lambda: SystemExit(3), CheckpointError, "SystemExit: 3"),
    "task": (asyncio.CancelledError, CheckpointError, "CancelledError: "),
}
"""What makes each kind, the type that all ranks are to raise, and the beginning of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failure: who raises what, and when."""

    phase: str
    number: int
    """Of the phase within the save or load, from 0."""
    victim: int
    kind: str
    moment: Moment = "instead"


class Sabotage:
    """Stands in for ``together`` in all modules and has one rank fail in one phase."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for info in pkgutil.walk_packages(dtckpt.checkpoint.__path__, "dtckpt.checkpoint."):
            module = importlib.import_module(info.name)
            if module is not together_module and hasattr(module, "together"):
                monkeypatch.setattr(module, "together", self)
        self.phases: dict[int, list[str]] = {}
        """What each rank went through since it was armed."""
        self.raised: dict[int, BaseException] = {}
        self._cases: dict[int, Case] = {}

    def arm(self, rank: int, case: Case | None) -> None:
        """Begin a save or load on one rank, which is to fail as ``case`` says."""
        self.phases[rank] = []
        self.raised.pop(rank, None)
        self._cases.pop(rank, None)
        if case is not None and case.victim == rank:
            self._cases[rank] = case

    def __call__(
        self,
        ranks: Ranks,
        phase: str,
        body: Callable[[], bytes],
        decide: Callable[[Any], bytes] = nothing,
        **options: Any,
    ) -> bytes:
        """Do as ``together`` does, unless this is the place."""
        rank = ranks.rank
        number = len(self.phases[rank])
        self.phases[rank].append(phase)
        case = self._cases.get(rank)
        if case is None or case.number != number:
            return together(ranks, phase, body, decide, **options)

        def fail() -> bytes:
            if case.moment == "afterwards":
                body()
            raise self._raise(rank, case)

        def fail_to_decide(_: Any) -> bytes:
            raise self._raise(rank, case)

        if case.moment == "decision":
            return together(ranks, phase, body, fail_to_decide, **options)
        return together(ranks, phase, fail, decide, **options)

    def _raise(self, rank: int, case: Case) -> BaseException:
        self.raised[rank] = KINDS[case.kind][0]()
        return self.raised[rank]


def assert_told_alike(case: Case, errors: Errors, raised: BaseException | None) -> None:
    """Assert that all ranks raised what one of them did, or the same account of it."""
    _, kind, text = KINDS[case.kind]
    assert raised is not None, f"{case}: the phase was not reached"
    own = errors[case.victim]
    told = [error for rank, error in errors.items() if rank != case.victim]
    if isinstance(raised, Exception):
        told.append(own)
    else:
        assert own is raised, f"{case}: {own!r}"
    assert {type(error) for error in told} == {kind}, f"{case}: {errors}"
    assert len({str(error) for error in told}) == 1, f"{case}: {errors}"
    where = f"{case.phase} failed on rank {case.victim}: {text}"
    assert str(told[0]).startswith(where), f"{case}: {told[0]}"
