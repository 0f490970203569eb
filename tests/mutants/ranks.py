"""Mutants of what ranks say to each other."""

from __future__ import annotations

from .mutant import Mutant

_CALLS = ("tests/checkpoint/ranks/test_calls.py", "tests/checkpoint/ranks/test_wire_calls.py")

MUTANTS = (
    Mutant(
        name="half a frame may be followed by another",
        file="checkpoint/ranks/link.py",
        old="            self._broken = True\n            self._left.clear()\n            raise",
        new="            self._left.clear()\n            raise",
        tests=("tests/checkpoint/ranks/test_link.py",),
    ),
    Mutant(
        name="a stranger's token is not compared",
        file="checkpoint/ranks/greeting.py",
        old="if magic != _MAGIC or not hmac.compare_digest(token, self._token):",
        new="if magic != _MAGIC:",
        tests=("tests/checkpoint/ranks/test_greeting.py",),
    ),
    Mutant(
        name="a member that is always late by a call stays so",
        file="checkpoint/ranks/wire.py",
        old="self._skip_with(rank) if is_behind else 0",
        new="0",
        tests=_CALLS,
    ),
    Mutant(
        name="another instance of a member is welcome",
        file="checkpoint/ranks/wire.py",
        old=".setdefault(hello.rank, hello.instance) == hello.instance",
        new=".setdefault(hello.rank, hello.instance) >= 0",
        tests=("tests/checkpoint/ranks/test_wire_rules.py",),
    ),
)
