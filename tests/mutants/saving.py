"""Mutants of planning, staging and writing a save, here and in the background."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="data files go though their manifest may have been published",
        file="checkpoint/saver.py",
        old="            if error.is_certain:  # other failures to publish may have gone through",
        new="            if True:",
        tests=("tests/checkpoint/test_commit.py", "tests/checkpoint/test_failure_points.py"),
    ),
    Mutant(
        name="the staged image is written though some of its chunks are borrowed",
        file="checkpoint/saver.py",
        old="            image = image if len(chunks) == len(self.chunks) else None",
        new="            pass",
        tests=("tests/checkpoint/test_incremental.py",),
    ),
)
