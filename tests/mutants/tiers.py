"""Mutants of what is brought from place to place, and of copies."""

from __future__ import annotations

from .mutant import Mutant

_TIERS = (
    "tests/checkpoint/manager/test_tiers.py",
    "tests/checkpoint/manager/test_tiers_ranks.py",
)
_BRINGING = ("tests/checkpoint/manager/test_bringing_on.py",)
_COPYING = ("tests/checkpoint/test_copying.py",)

MUTANTS = (
    Mutant(
        name="tiers: damaged blocks are copied",
        file="checkpoint/copying.py",
        old="        for stretch in stretches(file, file.layout.entries.values()):\n"
        "            _refuse_damage(stretch.damaged)\n",
        new="        for stretch in stretches(file, file.layout.entries.values()):\n",
        tests=_COPYING,
    ),
    Mutant(
        name="tiers: what lies at the target is taken as it is",
        file="checkpoint/copying.py",
        old="    for stretch in stretches(there, there.layout.entries.values()):\n"
        "        _refuse_damage(stretch.damaged)\n",
        new="    for stretch in stretches(there, there.layout.entries.values()):\n",
        tests=_COPYING,
    ),
    Mutant(
        name="tiers: nobody waits for the turn of a checkpoint",
        file="checkpoint/manager/promotion.py",
        old="and self._tickets[0] is not ticket:",
        new="and False:",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: forced saves are left out like others",
        file="checkpoint/manager/promotion.py",
        old="return not ticket.must and any(",
        new="return any(",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: a tier loses what is on its way",
        file="checkpoint/runs/upkeep.py",
        old="return name not in self.unrestored and name not in self.spare()",
        new="return name not in self.unrestored",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: files of a promotion that failed stay",
        file="checkpoint/manager/promotion.py",
        old="            for rank in self._created:",
        new="            for rank in ():",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: a run ends well without its last checkpoint in the root",
        file="checkpoint/manager/promotion.py",
        old="        if is_durable:\n            self.lacking = error\n        self.on_failure",
        new="        self.on_failure",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: a process ends while a checkpoint is on its way",
        file="checkpoint/manager/promotion.py",
        old="        remember(self)",
        new="        pass",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: an old checkpoint of the step stays in the root",
        file="checkpoint/manager/promotion.py",
        old="        if there is not None and self._place.run.store.exists(name + ABANDONED):",
        new="        if False:",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: records are not passed on",
        file="checkpoint/runs/places.py",
        old="            if record is not None:\n                target.run.add_record(record)\n",
        new="",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: every rank copies every file",
        file="checkpoint/manager/promotion.py",
        old="            if copied_by(record.rank, self._ranks.all) == self._ranks.rank\n",
        new="",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: one that cannot be looked at ends the search",
        file="checkpoint/runs/finding.py",
        old="            if place == len(runs) - 1:\n                raise\n",
        new="            raise\n",
        tests=_TIERS,
    ),
    Mutant(
        name="tiers: a root that cannot be looked at is passed over",
        file="checkpoint/runs/finding.py",
        old="            if place == len(runs) - 1:\n                raise\n",
        new="",
        tests=_TIERS,
    ),
    Mutant(
        name="bringing on: what only a tier has stays there",
        file="checkpoint/manager/saves.py",
        old="            self._promotions.begin_restored(*self._restored)",
        new="            pass",
        tests=_BRINGING,
    ),
    Mutant(
        name="bringing on: a save waits for it",
        file="checkpoint/manager/saves.py",
        old="self._promotions.wait(after=-1 if self.last is None else self.last)",
        new="self._promotions.wait()",
        tests=_BRINGING,
    ),
    Mutant(
        name="bringing on: what the run has gone back to is deleted",
        file="checkpoint/manager/saves.py",
        old="return [*self._promotions.steps(), *restored]",
        new="return self._promotions.steps()",
        tests=_BRINGING,
    ),
    Mutant(
        name="bringing on: what is gone on with is collected",
        file="checkpoint/runs/upkeep.py",
        old="            if name in spared:",
        new="            if False:",
        tests=_BRINGING,
    ),
)
