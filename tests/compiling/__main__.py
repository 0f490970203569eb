"""Compiled models and functions beside what they compute and send without a compiler.

``python -m tests.compiling --names conv1d,amax --backends aot_eager --ranks 2`` tries two in a
minute; all of them take hours on two cores, most of it in Inductor's C++ compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from .families import FAMILIES, PARTS
from .functions import OF_A_NUMBER, OF_ONE
from .trial import Case, Outcome, try_cases

MODES = ("forward", "backward", "recomputing", "budget")
BACKENDS = ("aot_eager", "inductor")


@click.command("compiling")
@click.option("--names", help="Models and functions, separated by commas; all by default.")
@click.option("--parts", default=",".join(PARTS), help="Of even, uneven, empty.")
@click.option("--modes", default="forward,backward", help=f"Of {', '.join(MODES)}.")
@click.option("--backends", default=",".join(BACKENDS), help="What compiles.")
@click.option("--ranks", default="2,4", help="Numbers of ranks.")
@click.option("--write", "page_file", type=click.Path(path_type=Path), help="Write the page.")
def main(
    names: str | None, parts: str, modes: str, backends: str, ranks: str, page_file: Path | None
) -> None:
    """Try cases; status 1 where one is wrong."""
    chosen = names.split(",") if names else [*FAMILIES, *OF_ONE, *OF_A_NUMBER]
    outcomes: dict[tuple[Case, int], Outcome] = {}
    for size in map(int, ranks.split(",")):
        cases = [
            Case(name, part, mode, backend)
            for backend in backends.split(",")
            for name in chosen
            for part in parts.split(",")
            for mode in modes.split(",")
            if name not in OF_A_NUMBER or mode == "forward"
        ]
        # A few at a time, so that something is seen of it.
        for first in range(0, len(cases), 12):
            for outcome in try_cases(cases[first : first + 12], size):
                outcomes[outcome.case, size] = outcome
                said = "; ".join(outcome.told) or "right"
                click.echo(
                    f"{size} ranks {' '.join(outcome.case)}: {said} ({outcome.seconds:.0f} s)"
                )
    table = table_of(chosen, outcomes)
    click.echo("\n".join(table))
    if page_file is not None:
        page_file.write_text("\n".join([*_ABOUT, *table, ""]))
    sys.exit(any(outcome.told for outcome in outcomes.values()))


_ABOUT = (
    "# Compiled models",
    "",
    "Written by `make compile-matrix` (`tests/compiling`). Each model or function runs on one",
    f"device, distributed, and so under `torch.compile` (torch {torch.__version__.split('+')[0]}):",
    "with parts that are even, uneven, or empty on some rank, forward alone and with its",
    "gradients. A case is right where results and gradients are equal up to rounding, twice, and",
    "all ranks send the same in the same order in either pass. Functions of a number take several.",
    "",
)


def table_of(names: Sequence[str], outcomes: dict[tuple[Case, int], Outcome]) -> list[str]:
    """Return a table of how many cases are right, a line each for what was compiled."""
    columns = sorted({(case.backend, size) for case, size in outcomes})
    heads = [f"{backend}, {size} ranks" for backend, size in columns]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name in names:
        cells: list[str] = []
        for backend, size in columns:
            found = [
                outcome
                for (case, ranks), outcome in outcomes.items()
                if (case.name, case.backend, ranks) == (name, backend, size)
            ]
            wrong = [f"{o.case.parts} {o.case.mode}" for o in found if o.told]
            right = f"{len(found) - len(wrong)} of {len(found)}"
            cells.append(f"{right}, wrong: {', '.join(wrong)}" if wrong else right)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
