"""What all stages of the demo share: the plan of the runs, and where things go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .checks import Claims
from .launch import Launcher, Outcome, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who trains."""

    count: int
    mesh: str
    """Names and sizes of its axes, as "dp=2,tp=2"; "" for one device without any."""
    by: str = ""
    """What spreads the model over them, in words."""

    @property
    def title(self) -> str:
        """Who trains, and by what."""
        return f"{self} by {self.by}" if self.by else str(self)

    def __str__(self) -> str:
        if not self.mesh:
            return "one device"
        return f"{self.count} rank{'s' * (self.count > 1)} on {self.mesh}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which jobs train what, for how long, and who dies on the way."""

    worker: str
    """The module that every rank runs."""
    uninterrupted: Ranks
    killed: Ranks
    resumed: Ranks
    steps: int
    save_every: int
    kill_step: int
    """The save in which a rank is killed."""
    kill_rank: int
    parameter_tolerance: float
    """Largest absolute difference of final parameters from those of the uninterrupted run."""

    @property
    def saves(self) -> tuple[int, ...]:
        """The steps that are saved."""
        return tuple(range(self.save_every, self.steps + 1, self.save_every))

    @property
    def newest(self) -> int:
        """The newest committed step once a rank has died in the save of ``kill_step``."""
        return self.kill_step - self.save_every


_SHOWN_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Who prints, who checks, who starts processes, and the directory of it all."""

    console: Console
    claims: Claims
    launcher: Launcher
    output: Path
    plan: Plan

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
        self, name: str, checkpoints: Path, ranks: Ranks, *, is_killed: bool = False
    ) -> Outcome:
        """Run a training job; ``is_killed`` says that a rank is to die in it."""
        plan = self.plan
        job = Training(
            name=name,
            worker=plan.worker,
            checkpoints=checkpoints,
            ranks=ranks.count,
            mesh=ranks.mesh,
            steps=plan.steps,
            save_every=plan.save_every,
            kill_rank=plan.kill_rank if is_killed else None,
            kill_step=plan.kill_step if is_killed else None,
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
