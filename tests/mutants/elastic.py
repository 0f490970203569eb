"""Mutants of steps whose bits do not depend on the mesh."""

from __future__ import annotations

from .mutant import Mutant

_STEPS = ("tests/dtensor/elastic/test_elastic_steps.py",)

MUTANTS = [
    Mutant(
        name="elastic: gradients of a round are added backwards",
        file="dtensor/elastic/ordered_sums.py",
        old="    for row in others:\n",
        new="    for row in reversed(others):\n",
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: each round is summed before it is added",
        file="dtensor/elastic/ordered_sums.py",
        old="    first, *others = rows.unbind(0)\n",
        new="    first, *others = rows.sum(0, keepdim=True).unbind(0)\n",
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: gradients are divided before they are added",
        file="dtensor/elastic/ordered_sums.py",
        old="            return term.detach().to(one.sent_dtype).reshape(1, *shape)\n",
        new="            return (term.detach() / 3 * 3).to(one.sent_dtype).reshape(1, *shape)\n",
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: a part that does not count is noted",
        file="dtensor/elastic/steps.py",
        old="        if now.own is not None:\n",
        new="        if now is not None:\n",
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: replicas of gradients count each",
        file="dtensor/elastic/steps.py",
        old="        return not any(i for i, p in zip(",
        new="        return True or any(i for i, p in zip(",
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: groups share random numbers",
        file="dtensor/elastic/steps.py",
        old='f"{self._seed} {self.count} {group}"',
        new='f"{self._seed} {self.count}"',
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: parts are where the batch has them",
        file="dtensor/elastic/batches.py",
        old="plain[group * size : (group + 1) * size].clone()",
        new="plain[group * size : (group + 1) * size]",
        tests=_STEPS,
    ),
    Mutant(
        name="elastic: the trial of optimizers looks at whole tensors only",
        file="dtensor/elastic/trial.py",
        old="            for part in (NUM_ELEMENTS, PART)\n",
        new="            for part in (NUM_ELEMENTS, NUM_ELEMENTS)\n",
        tests=("tests/dtensor/elastic/test_elastic_errors.py",),
    ),
]
