"""``make demo``: train, die in a save, resume elsewhere, and prove that nothing was lost."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dtckpt.errors import DtckptError
from dtckpt.tools.cli.console import iec

from .agreement import compare
from .checks import Claims
from .launch import ChildFailed, Launcher
from .model import make_model
from .offline import look, reshard
from .runs import train_resumed, train_uninterrupted, train_until_killed
from .s3 import loopback_bucket, missing_packages
from .setting import (
    KILL_RANK,
    KILL_STEP,
    MESH,
    MESH_RESUMED,
    NEWEST,
    RANKS,
    RANKS_RESUMED,
    STEPS,
    Setting,
)
from .text import find_texts, write_corpus

OUTPUT = Path("demo-output")
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


def main() -> int:
    """Run the demo and return its exit code: 0 only if every claim was checked and holds."""
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=max(console.width, _MIN_COLUMNS))
    missing = missing_packages()
    if missing:
        console.print(
            f"[red]The demo needs {', '.join(missing)}[/] for its S3 server: run it by `make demo`,"
            " or install the development dependencies (pip install --group dev)"
        )
        return 1
    claims = Claims(console)
    try:
        _demonstrate(console, claims)
    except KeyboardInterrupt:
        console.print("\n[red]Interrupted; all processes have been ended.[/]")
        return _INTERRUPTED
    except (ChildFailed, DtckptError, OSError) as error:
        console.print("\n[bold red]The demo could not go on:[/]")
        console.print(str(error), markup=False, highlight=False)
        return 1
    return claims.exit_code


def _demonstrate(console: Console, claims: Claims) -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    logs = OUTPUT / "logs"
    logs.mkdir(parents=True)
    corpus = OUTPUT / "corpus.txt"
    demo = Setting(
        console=console, claims=claims, launcher=Launcher(console, logs, corpus), output=OUTPUT
    )
    stages = Stages(console)
    with stages.stage("Text and model"):
        _prepare(console, corpus)
    with stages.stage(f"{RANKS} ranks on {MESH} train {STEPS} steps without interruption"):
        reference = train_uninterrupted(demo)
    with stages.stage(
        f"The same once more, but rank {KILL_RANK} is killed in the middle of the save of step "
        f"{KILL_STEP}"
    ):
        killed = train_until_killed(demo)
    with stages.stage(f"{RANKS_RESUMED} ranks on {MESH_RESUMED} resume from step {NEWEST}"):
        resumed = train_resumed(demo)
    with stages.stage("The losses agree with those of the uninterrupted run"):
        compare(demo, reference, killed, resumed)
    with loopback_bucket("dtckpt-demo") as bucket:
        with stages.stage("The final checkpoint is resharded offline, on disk and into S3"):
            resharded = reshard(demo, bucket)
        with stages.stage("dtckpt inspect and dtckpt verify"):
            look(demo, bucket, resharded)
    stages.sum_up(claims)
    console.print(f"Checkpoints and logs are in {OUTPUT}/.", highlight=False)


def _prepare(console: Console, corpus: Path) -> None:
    texts = find_texts()
    size = write_corpus(texts, corpus)
    model = make_model(seed=0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for line in (
        f"{len(texts)} files of documentation and of Python's standard library, {iec(size)}",
        f"a GPT of {parameters / 1e6:.1f} million parameters, {model.config.blocks} blocks, AdamW",
    ):
        console.print(f"  {line}", highlight=False)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
