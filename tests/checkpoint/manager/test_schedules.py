"""Runs of several lives, with failures and processes that die, beside a model of what must be left.

``python -m tests.checkpoint.manager.test_schedules 1000 2000`` takes these seeds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import CheckpointManager, Keep
from dtckpt.storage import Call, Fault, FaultyStore, LocalStore, RaiseError, StorageError

KEEPS = (Keep(), Keep(last=1), Keep(last=2), Keep(last=3, every=4))

Saved = tuple[int, int]
"""A step, and which of all saves of the schedule it was."""


def state(step: int, save: int) -> dict[str, Any]:
    return {
        "frozen": torch.arange(2000.0),
        "slow": torch.full((600,), save // 3),
        "w": torch.full((64,), float(save)),
        "save": save,
        "step": step,
    }


def check(got: dict[str, Any]) -> Saved:
    expected = state(got["step"], got["save"])
    for name in ("frozen", "slow", "w"):
        assert torch.equal(got[name], expected[name]), name
    return got["step"], got["save"]


class Trouble:
    """Calls of a store that fail: some of them, or all from one on, as when a process has died."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        kind = chance.choice(["none", "none", "some", "dies"])
        self._share = 0.03 if kind == "some" else 0.0
        self._last = chance.randint(1, 120) if kind == "dies" else None
        self._number = 0
        self.is_on = False
        self.is_any = kind != "none"

    def __call__(self, call: Call) -> Fault | None:
        if not self.is_on:
            return None
        self._number += 1
        if self._last is not None and self._number >= self._last:
            return RaiseError(StorageError("dead"))
        if self._chance.random() < self._share:
            return RaiseError(StorageError("503"), after_effect=self._chance.random() < 0.3)
        return None


class Schedule:
    """A directory, and what of it has to be there."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.chance = random.Random(seed)
        self.save = 0
        self.sure: Saved | None = None
        """The newest that was told to be saved, of the line that the run is in."""
        self.possible: set[Saved] = set()
        """What may stand as the newest, though nobody was told."""
        self.attempts: set[Saved] = set()

    def live(self) -> None:
        """Begin, go on from something, save some steps and end."""
        trouble = Trouble(self.chance)
        options: dict[str, Any] = {
            "keep": self.chance.choice(KEEPS),
            "incremental": self.chance.choice([0, 0, 1, 3]),
            "in_background": self.chance.random() < 0.7,
        }
        store = FaultyStore(LocalStore(self.root), trouble)
        manager = CheckpointManager(store, no_dist=True, on_failure="warn", **options)
        step = self.go_on(manager)
        trouble.is_on = True
        began: list[Saved] = []
        for _ in range(self.chance.randint(1, 6)):
            step += self.chance.choice([1, 1, 2])
            self.save += 1
            began.append((step, self.save))
            manager.save(step, state(step, self.save))
            if self.chance.random() < 0.4:
                manager.wait()
        manager.close()
        self.attempts.update(began)
        failed = {number for number, _ in manager.failures}
        assert trouble.is_any or not failed, manager.failures
        saved = [each for each in began if each[0] not in failed]
        if saved:
            self.sure, self.possible = saved[-1], {e for e in began if e[0] > saved[-1][0]}
        else:
            self.possible.update(began)

    def go_on(self, manager: CheckpointManager) -> int:
        """Restore the newest checkpoint, or an earlier one; return its step."""
        got = state(0, 0)
        steps = manager.all_steps()
        if steps and self.chance.random() < 0.3:
            manager.restore(got, step=self.chance.choice(steps))
            found = check(got)
            # Until it has saved, the run may also be found where it was.
            self.possible.update(filter(None, [self.sure, found]))
            return found[0]
        report = manager.restore_if_any(got)
        if report is None:
            assert self.sure is None
            return 0
        found = check(got)
        assert found in {self.sure, *self.possible}, (found, self.sure, self.possible)
        return found[0]

    def check_all(self) -> None:
        """Load everything that is listed."""
        for step in CheckpointManager(self.root, no_dist=True).all_steps():
            got = state(0, 0)
            dcp.load(got, self.root / f"step-{step}", no_dist=True)
            assert check(got) in self.attempts
            assert got["step"] == step


def run(seed: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        schedule = Schedule(Path(root), seed)
        for _ in range(schedule.chance.randint(2, 4)):
            schedule.live()
            schedule.check_all()


@pytest.mark.parametrize("seed", range(16))
def test_schedules(seed: int) -> None:
    run(seed)


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:3])):
        try:
            run(number)
        except Exception as error:
            print(number, type(error).__name__, str(error)[:300])
