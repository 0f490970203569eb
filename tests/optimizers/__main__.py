"""The whole matrix of optimizers. Run by ``make optimizers``."""

from __future__ import annotations

import sys

import click

from .cells import all_cells, left_out
from .every import KINDS
from .models import PARALLELISMS
from .running import results


@click.command("optimizers")
@click.option("--only", help="Optimizers, separated by commas.")
@click.option("--parallelism", type=click.Choice(PARALLELISMS))
def main(only: str | None, parallelism: str | None) -> None:
    """Resume every optimizer; status 1 where a cell is wrong."""
    names = only.split(",") if only else [kind.name for kind in KINDS]
    right, out, wrong = 0, dict[object, int](), list[str]()
    for each in [parallelism] if parallelism else PARALLELISMS:
        for result in results(all_cells(names, each)):
            why = left_out(result.cell)
            if result.problem():
                wrong.append(f"{result.cell}: {result.problem()}")
            elif why is not None:
                out[why] = out.get(why, 0) + 1
            else:
                right += 1
    for why, count in out.items():
        click.echo(f"left out, {count} cells: {why}")
    for line in wrong:
        click.echo(f"WRONG {line}")
    click.echo(f"{right} cells right, {sum(out.values())} left out, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
