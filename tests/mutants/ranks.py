"""Mutants of what ranks say to each other."""

from __future__ import annotations

from .mutant import Mutant

_WIRES = ("tests/checkpoint/test_wires.py", "tests/checkpoint/test_frames.py")
_CALLS = ("tests/checkpoint/test_calls.py", "tests/checkpoint/test_frames.py")
_MEETING = ("tests/checkpoint/test_rendezvous.py",)

MUTANTS = (
    Mutant(
        name="half a frame may be followed by another",
        file="checkpoint/link.py",
        old="            self._broken = True\n            self._left.clear()\n            raise",
        new="            self._left.clear()\n            raise",
        tests=_WIRES,
    ),
    Mutant(
        name="a process that was itself stopped blames the others",
        file="checkpoint/wire.py",
        old="                if now - expected > 1.0:",
        new="                if False:",
        tests=_WIRES,
    ),
    Mutant(
        name="a stranger's token is not compared",
        file="checkpoint/greeting.py",
        old="if magic != _MAGIC or not hmac.compare_digest(token, self._token):",
        new="if magic != _MAGIC:",
        tests=_MEETING,
    ),
    Mutant(
        name="a rank that is stuck counts as getting on",
        file="checkpoint/wire.py",
        old="            held.heard[rank] -= age\n",
        new="",
        tests=_WIRES,
    ),
    Mutant(
        name="a member that has gone on to a later call is waited for",
        file="checkpoint/wire.py",
        old="                if number < call and rank in held.awaited:",
        new="                if False:",
        tests=_CALLS,
    ),
    Mutant(
        name="a member that has left before the call begins is waited for",
        file="checkpoint/wire.py",
        old="        for frame in link.early:\n            self._keep(held, rank, *frame)",
        new="        pass",
        tests=_CALLS,
    ),
    Mutant(
        name="a member that is always late by a call stays so",
        file="checkpoint/wire.py",
        old="self._skip_with(rank) if is_behind else 0",
        new="0",
        tests=_CALLS,
    ),
    Mutant(
        name="another instance of a member is welcome",
        file="checkpoint/wire.py",
        old=".setdefault(hello.rank, hello.instance) == hello.instance",
        new=".setdefault(hello.rank, hello.instance) >= 0",
        tests=_CALLS,
    ),
)
