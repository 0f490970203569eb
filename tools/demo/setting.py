"""What all stages of the demo share: the plan of the runs, and where things go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .checks import Claims
from .launch import Launcher, Outcome, Training

STEPS = 36
SAVE_EVERY = 6
SAVES = tuple(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
KILL_STEP = 24
KILL_RANK = 2
NEWEST = KILL_STEP - SAVE_EVERY
"""The newest committed step once a rank has died in the save of ``KILL_STEP``."""

RANKS = 4
MESH = "dp=2,tp=2"
RANKS_RESUMED = 2
MESH_RESUMED = "dp=2"

_SHOWN_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Who prints, who checks, who starts processes, and the directory of it all."""

    console: Console
    claims: Claims
    launcher: Launcher
    output: Path

    @property
    def reference(self) -> Path:
        """Checkpoints of the uninterrupted run."""
        return self.output / "reference"

    @property
    def run(self) -> Path:
        """Checkpoints of the run that is killed and resumed."""
        return self.output / "run"

    def step(self, number: int) -> Path:
        """Return where a step of the run is, or is to be."""
        return self.run / f"step-{number}"

    def train(
        self, name: str, checkpoints: Path, mesh: str, ranks: int, *, is_killed: bool = False
    ) -> Outcome:
        """Run a training job; ``is_killed`` says that a rank is to die in it."""
        job = Training(
            name=name,
            checkpoints=checkpoints,
            ranks=ranks,
            mesh=mesh,
            steps=STEPS,
            save_every=SAVE_EVERY,
            kill_rank=KILL_RANK if is_killed else None,
            kill_step=KILL_STEP if is_killed else None,
        )
        return self.launcher.train(job)

    def say(self, text: str) -> None:
        """Print the beginning of what a command printed."""
        lines = text.rstrip().splitlines()
        for line in lines[:_SHOWN_LINES]:
            self.console.print(
                f"    {line.rstrip()}",
                markup=False,
                highlight=False,
                no_wrap=True,
                overflow="ellipsis",
            )
        if len(lines) > _SHOWN_LINES:
            self.console.print(f"    ... and {len(lines) - _SHOWN_LINES} lines more", style="dim")
