"""Mutants of mapped tensors and of what is traced."""

from __future__ import annotations

from .mutant import Mutant

_MAPPING = "tests/checkpoint/mapping"

MUTANTS = (
    Mutant(
        name="what lies over a boundary of digits is not carried",
        file="checkpoint/copies/digits.py",
        old="    if first and first + size > radix:",
        new="    if False:",
        tests=(f"{_MAPPING}/test_fuzz.py",),
    ),
    Mutant(
        name="two steps that only happen to be alike are taken for a row of steps",
        file="checkpoint/copies/copies.py",
        old="step[1] < 0 or (count > 1 and step != by)",
        new="step[1] < 0",
        tests=(f"{_MAPPING}/test_fuzz.py", f"{_MAPPING}/test_tracing.py"),
    ),
    Mutant(
        name="elements between steps are put, too",
        file="checkpoint/copies/sinks.py",
        old="self._is_run = copy.is_run and copy.numel == box.numel",
        new="self._is_run = copy.is_run",
        equivalent="a run that is not all of its box would be a loop with gaps",
    ),
    Mutant(
        name="copies that share elements are taken for a tensor",
        file="checkpoint/copies/tiling.py",
        old="            if meet(ordered[other], copy):",
        new="            if False:",
        tests=(f"{_MAPPING}/test_tables.py",),
    ),
    Mutant(
        name="what was written over stays in a traced table",
        file="checkpoint/mapping/memories.py",
        old="for rest in without(copy, into)]",
        new="for rest in [copy]]",
        tests=(f"{_MAPPING}/test_tracing.py",),
    ),
    Mutant(
        name="ranks with other mappings load together",
        file="checkpoint/loading/loader.py",
        old="        if mapping != self.mapping_digest():",
        new="        if False:",
        tests=(f"{_MAPPING}/test_loaders.py",),
    ),
    Mutant(
        name="padding is left as it was where ranks read for each other",
        file="checkpoint/loading/filling.py",
        old="                reads = [*reads, *fills]",
        new="                del fills",
        tests=(f"{_MAPPING}/test_loaders.py",),
    ),
    Mutant(
        name="stored tensors of which ranks want overlapping boxes are exchanged",
        file="checkpoint/sharing/striping.py",
        old="        if not entangled:",
        new="        if True:",
        tests=(f"{_MAPPING}/test_loaders.py",),
    ),
)
