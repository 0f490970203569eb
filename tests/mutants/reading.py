"""Mutants of manifests, data files and reads."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="gaps that were not verified are kept in the cache",
        file="checkpoint/read_execution.py",
        old="        if self._cache is not None and fresh and not fresh[-1][0].has_gaps:",
        new="        if self._cache is not None and fresh:",
        tests=("tests/checkpoint/test_reading.py", "tests/checkpoint/test_damage.py"),
    ),
    Mutant(
        name="a data file of another save is read",
        file="checkpoint/stored.py",
        old="    if layout.save_id != save_id:",
        new="    if False:",
        equivalent="the digest of its header, held by the manifest, differs and is checked first",
    ),
    Mutant(
        name="any text is a save id",
        file="checkpoint/manifest.py",
        old='            if not re.fullmatch(r"[0-9a-f]+", save_id):',
        new="            if False:",
        tests=("tests/checkpoint/test_format.py", "tests/checkpoint/test_damage.py"),
    ),
)
