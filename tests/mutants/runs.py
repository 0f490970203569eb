"""Mutants of what stays of a run, what it goes on from, and what its upkeep may touch."""

from __future__ import annotations

from .mutant import Mutant

_KEEP = ("tests/checkpoint/runs/test_keep.py",)
_MANAGER = ("tests/checkpoint/manager/test_manager.py",)
_ELSEWHERE = ("tests/checkpoint/saving/test_elsewhere.py",)

MUTANTS = (
    Mutant(
        name="the newest checkpoint may go",
        file="checkpoint/runs/keep.py",
        old="    wanted.update(step.name for step in line[-1:])",
        new="    pass",
        tests=_KEEP,
    ),
    Mutant(
        name="bases go while others refer to them",
        file="checkpoint/runs/keep.py",
        old="free=tuple(step.name for step in rest if step.name not in needing),",
        new="free=tuple(step.name for step in rest),",
        tests=_KEEP,
    ),
    Mutant(
        name="older checkpoints go before the newest is known to be whole",
        file="checkpoint/runs/upkeep.py",
        old="                self.run.check_whole(step.name)",
        new="                pass",
        tests=_MANAGER,
    ),
    Mutant(
        name="directories of dead saves are taken away by the manifest",
        file="checkpoint/runs/run.py",
        old='self.store.delete([f"{name}/nothing"])',
        new='self.store.delete([f"{name}/{MANIFEST}"])',
        tests=_MANAGER,
    ),
    Mutant(
        name="a run goes on from what it has gone back from",
        file="checkpoint/runs/finding.py",
        old="steps = listing.line if step is None else listing.steps",
        new="steps = listing.steps",
        tests=_MANAGER,
    ),
    Mutant(
        name="a run that begins anew writes over the one that is there",
        file="checkpoint/manager/line.py",
        old="if restored is None and line and line[-1] >= step:",
        new="if False:",
        tests=_MANAGER,
    ),
    Mutant(
        name="later checkpoints are not abandoned before a save",
        file="checkpoint/manager/line.py",
        old="        place.upkeep.abandon(later)",
        new="        pass",
        tests=_MANAGER,
    ),
    Mutant(
        name="what is in the way of a save stays",
        file="checkpoint/manager/line.py",
        old="        place.run.delete(name)\n\n\ndef",
        new="        pass\n\n\ndef",
        tests=_MANAGER,
    ),
    Mutant(
        name="a pinned checkpoint makes way",
        file="checkpoint/manager/line.py",
        old="        if there.is_pinned:",
        new="        if False:",
        tests=_MANAGER,
    ),
    Mutant(
        name="what nobody has restored may go",
        file="checkpoint/manager/line.py",
        old="            place.upkeep.unrestored.update",
        new="            set().update",
        tests=_MANAGER,
    ),
    Mutant(
        name="a failure before a stop keeps the last save from being made",
        file="checkpoint/manager/saves.py",
        old="        self.settle(ending, is_quiet=True)",
        new="        self.settle(ending)",
        tests=("tests/checkpoint/manager/test_requests.py",),
    ),
    Mutant(
        name="the clock asks once only",
        file="checkpoint/manager/due.py",
        old="            self._asked = asked and reason is None",
        new="            self._asked = asked",
        tests=("tests/checkpoint/manager/test_due.py",),
    ),
    Mutant(
        name="what a damaged checkpoint has overwritten need not be filled again",
        file="checkpoint/manager/restoring.py",
        old="            if overwritten:",
        new="            if False:",
        tests=_MANAGER,
    ),
    Mutant(
        name="what is written elsewhere refers to the base",
        file="checkpoint/saving/job.py",
        old="self.lender, self.written_bytes = None, 0",
        new="self.written_bytes = 0",
        tests=_ELSEWHERE,
    ),
    Mutant(
        name="a checkpoint is detached although others refer to it",
        file="checkpoint/detaching.py",
        old="    check_free(store, overwrite=True)",
        new="    pass",
        equivalent="the commit refuses as well; this one comes before anything is written",
    ),
)
