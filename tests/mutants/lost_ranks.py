"""Mutants of how a save goes on without ranks that are lost."""

from __future__ import annotations

from .mutant import Mutant

_LOST = (
    "tests/checkpoint/saving/test_lost_ranks.py",
    "tests/checkpoint/saving/test_stand_ins.py",
)
_LEFT_BEHIND = ("tests/checkpoint/manager/test_left_behind.py",)

MUTANTS = (
    Mutant(
        name="what is written again lies where a slow rank may still write",
        file="checkpoint/saving/job.py",
        old="        self.agreed = replace(self.agreed, save_id=chosen.save_id)",
        new="        pass",
        tests=_LOST,
    ),
    Mutant(
        name="a rank that was taken for dead goes on",
        file="checkpoint/saving/job.py",
        old="set(error.lost) <= self.lost or self.ranks.rank in error.lost:",
        new="set(error.lost) <= self.lost:",
        tests=_LOST,
    ),
    Mutant(
        name="a first rank that was stopped for long replaces what is newer",
        file="checkpoint/saving/job.py",
        old="is_alone=bool(self.lost)",
        new="is_alone=False",
        tests=_LOST,
    ),
    Mutant(
        name="lost ranks are waited for again",
        file="checkpoint/ranks/together.py",
        old="fatal=fatal, without=without)",
        new="fatal=fatal)",
        tests=_LOST,
    ),
    Mutant(
        name="a rank that has failed and left counts as dead",
        file="checkpoint/ranks/failing.py",
        old='not failed and not decision["left"]:',
        new="not failed:",
        tests=("tests/checkpoint/saving/test_save_hazards.py",),
    ),
    Mutant(
        name="ranks write in the background what they have not copied",
        file="checkpoint/saving/finishing.py",
        old="    most = None if num_copies is None else num_copies - 1",
        new="    most = None",
        tests=_LOST,
    ),
    Mutant(
        name="a lost rank is to write for another one",
        file="checkpoint/saving/finishing.py",
        old=" for other in able[:most] if other not in lost]",
        new=" for other in able[:most]]",
        tests=_LOST,
    ),
    Mutant(
        name="tensors that nobody else has are taken for replicas",
        file="checkpoint/saving/finishing.py",
        old="        if (alone := _held_alone(chunks)) or not living:",
        new="        if (alone := ()) or not living:",
        tests=_LOST,
    ),
    Mutant(
        name="replicas of one tensor count as holding all",
        file="checkpoint/saving/writers.py",
        old="ReplicaRanks(fewest, cell) if place(other) == own)",
        new="ReplicaRanks(fewest, cell))",
        tests=_LOST,
    ),
    Mutant(
        name="the image of a second file begins within a page",
        file="checkpoint/staging/area.py",
        old="    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES",
        new="    return num_bytes",
        tests=("tests/checkpoint/staging/test_area.py",),
    ),
    Mutant(
        name="a rank that was left behind and the others refer to other bases",
        file="checkpoint/manager/saves.py",
        old="        if is_first_place and not report.stood_in_for:",
        new="        if is_first_place:",
        tests=_LEFT_BEHIND,
    ),
    Mutant(
        name="a rank that was left behind is asked to promote",
        file="checkpoint/manager/saves.py",
        old="                if report.stood_in_for:",
        new="                if False:",
        tests=_LEFT_BEHIND,
    ),
)
