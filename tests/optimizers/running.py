"""Runs cells of the matrix on ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..processes import run_processes
from .cells import Cell, left_out


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a cell."""

    cell: Cell
    stage: str
    """What failed: "steps", "save", "load", "wrong", or "" for nothing."""
    told: str

    def problem(self) -> str:
        """Return what is not as it should be: a wrong cell, or one left out that is not so."""
        why = left_out(self.cell)
        told = f"{self.stage}: {self.told}" if self.stage else "it is right"
        if why is not None:
            wrong = not why.is_right(self.stage, self.told)
            return f"it is left out for another reason ({why.reason}), and now: {told}" * wrong
        return told if self.stage else ""


def results(cells: Sequence[Cell]) -> list[Result]:
    """Run cells on four ranks, forked from one process that has imported all optimizers."""
    listed = json.dumps(list(map(astuple, cells)))
    with tempfile.TemporaryDirectory() as folder:
        (text, *_) = run_processes(
            "tests.optimizers.ranks",
            4,
            folder,
            listed,
            compiler=False,
            timeout=900,
        )
    line = next(line for line in text.splitlines() if line.startswith("[["))
    return [Result(Cell(*told[:4]), *told[4:]) for told in json.loads(line)]
