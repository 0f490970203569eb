"""What every demo does and shows: numbered stages, their times, and the verdict."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dtckpt.errors import DtckptError
from dtckpt.tools.cli.common.console import iec

from .agreement import compare
from .checks import Claims
from .launch import ChildFailed, Launcher
from .model import make_model
from .runs import train_resumed, train_uninterrupted, train_until_killed
from .setting import Plan, Setting
from .text import find_texts, write_corpus

_MIN_COLUMNS = 110
_INTERRUPTED = 130


class Stages:
    """Numbers the stages, times them, and sums up."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._times: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, title: str) -> Generator[None]:
        """Announce a stage and take its time."""
        self._console.print(f"\n[bold cyan]{len(self._times) + 1}. {title}[/]", highlight=False)
        started = time.monotonic()
        yield
        self._times.append((title, time.monotonic() - started))
        self._console.print(f"  ({self._times[-1][1]:.1f} s)", style="dim", highlight=False)

    def sum_up(self, claims: Claims) -> None:
        """Print the time of every stage and the verdict."""
        self._console.print("\n[bold cyan]Time[/]")
        total = ("in all", sum(seconds for _, seconds in self._times))
        for title, seconds in (*self._times, total):
            self._console.print(f"  {seconds:6.1f} s  {title}", highlight=False)
        if claims.failed:
            self._console.print(f"\n[bold red]{len(claims.failed)} claims do not hold:[/]")
            for text in claims.failed:
                self._console.print(f"  {text}", style="red", markup=False)
        else:
            self._console.print(f"\n[bold green]All {claims.num_checked} claims hold.[/]")


def run_demo(
    output: Path, plan: Plan, afterwards: Callable[[Setting, Stages], None] | None = None
) -> int:
    """Run a demo and return its exit code: 0 only if every claim was checked and holds.

    ``afterwards`` has further stages, with the checkpoints that the training has left.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=max(console.width, _MIN_COLUMNS))
    claims, stages = Claims(console), Stages(console)
    try:
        with stages.stage("Text and model"):
            demo = _prepared(console, claims, output, plan)
        _train(demo, stages)
        if afterwards is not None:
            afterwards(demo, stages)
    except KeyboardInterrupt:
        console.print("\n[red]Interrupted; all processes have been ended.[/]")
        return _INTERRUPTED
    except (ChildFailed, DtckptError, OSError) as error:
        console.print("\n[bold red]The demo could not go on:[/]")
        console.print(str(error), markup=False, highlight=False)
        return 1
    stages.sum_up(claims)
    console.print(f"Checkpoints and logs are in {output}/.", highlight=False)
    return claims.exit_code


def _train(demo: Setting, stages: Stages) -> None:
    """Train without interruption, train until a rank is killed, resume, and compare."""
    plan = demo.plan
    with stages.stage(f"{plan.steps} steps without interruption: {plan.uninterrupted.title}"):
        reference = train_uninterrupted(demo)
    with stages.stage(
        f"{plan.killed.title}: rank {plan.kill_rank} is killed in the middle of the save of step "
        f"{plan.kill_step}"
    ):
        killed = train_until_killed(demo)
    with stages.stage(f"{plan.resumed.title}: resumed from step {plan.newest}"):
        resumed = train_resumed(demo)
    with stages.stage("The losses agree with those of the uninterrupted run"):
        compare(demo, reference, killed, resumed)


def _prepared(console: Console, claims: Claims, output: Path, plan: Plan) -> Setting:
    shutil.rmtree(output, ignore_errors=True)
    logs = output / "logs"
    logs.mkdir(parents=True)
    corpus = output / "corpus.txt"
    texts = find_texts()
    size = write_corpus(texts, corpus)
    model = make_model(seed=0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for line in (
        f"{len(texts)} files of documentation and of Python's standard library, {iec(size)}",
        f"a GPT of {parameters / 1e6:.1f} million parameters, {model.config.blocks} blocks, AdamW",
    ):
        console.print(f"  {line}", highlight=False)
    launcher = Launcher(console, logs, corpus)
    return Setting(console=console, claims=claims, launcher=launcher, output=output, plan=plan)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
