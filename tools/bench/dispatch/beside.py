"""Two checkouts of the library: each in a process of its own, one round of each in turn.

Both processes run the code of this benchmark, on the ``dtckpt`` that the Python of their checkout
has installed. They speak JSON, a line a message, over standard input and output; one waits while
the other one measures.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dtckpt

from ..frame.timing import Trial
from .rows import ALL_ROWS, ColdRow, WarmRow
from .sides import sides
from .timing import trial_of

ROOT = Path(__file__).parents[3]
PYTHON = Path(".venv", "bin", "python")
"""Of a checkout, in which its library is installed."""


class CheckoutFailed(Exception):
    """A checkout cannot be measured."""


class Checkout:
    """A process in which the library of a checkout is measured."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder = folder
        self._process = process
        installed = Path(self.ask("where"))
        if not installed.is_relative_to(folder):
            raise CheckoutFailed(
                f"{folder / PYTHON} has dtckpt from {installed}, not from its own checkout: "
                "run make install there"
            )

    def trial(self, row: WarmRow | ColdRow, batch_seconds: float) -> Trial:
        """Return a trial of a row in the process."""
        return _Remote(self, self.ask("start", ALL_ROWS.index(row), batch_seconds))

    def ask(self, what: str, *arguments: object) -> Any:
        """Return what the process answers."""
        asks, hears = self._process.stdin, self._process.stdout
        if asks is None or hears is None:
            raise TypeError("the process has no pipes")
        try:
            print(json.dumps([what, *arguments]), file=asks, flush=True)
        except BrokenPipeError:
            told = ""
        else:
            told = hears.readline()
        if not told:
            raise CheckoutFailed(f"the process of {self._folder} ended: {self._process.wait()}")
        return json.loads(told)


@dataclass(frozen=True, slots=True)
class _Remote:
    checkout: Checkout
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def round(self, turn: int) -> dict[str, float]:
        """Time every side once."""
        times, failed = self.checkout.ask("round", turn)
        self.failed.update(failed)
        return times


@contextmanager
def checkout(folder: Path) -> Generator[Checkout]:
    """Start the process of a checkout; it ends with the block."""
    folder = folder.resolve()
    python = Path(sys.executable) if folder == ROOT else folder / PYTHON
    if not python.exists():
        raise CheckoutFailed(f"{folder} has no {PYTHON}: run make install there")
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    process = subprocess.Popen(
        [str(python), "-m", __spec__.name],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Checkout(folder, process)
        finally:
            process.kill()


def revision(folder: Path) -> str:
    """Return the commit of a checkout, or its folder where git knows none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or folder.resolve().name


def serve() -> None:
    """Answer until nobody asks any more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed is no answer
    torch.set_num_threads(1)
    by_axes = sides()
    trial: Trial | None = None
    for line in sys.stdin:
        match json.loads(line):
            case ["where"]:
                told: object = next(iter(dtckpt.__path__))
            case ["start", index, batch_seconds]:
                gc.collect()
                gc.disable()  # its pauses would fall on whom they like
                row = ALL_ROWS[index]
                trial = trial_of(row, by_axes[row.axes], batch_seconds)
                told = trial.failed
            case ["round", turn] if trial is not None:
                told = (trial.round(turn), trial.failed)
            case other:
                raise ValueError(f"a question that is none: {other!r}")
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    serve()
