"""Every operator of torch's database on distributed tensors, compared with one device.

``python -m tests.operators --ops add,mm`` tries two operators in seconds; without
``--ops`` all are tried, which takes some twenty minutes on two cores.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

import click

from .database import SIZES, NoDatabase
from .outcome import RIGHT, OpResult
from .page import page
from .summary import WAYS, Summary, is_unsafe, summary_of
from .trial import Setting
from .workers import names_of, try_all

MESHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "4": ((4,),),
    "2x2": ((2, 2),),
    "both": ((4,), (2, 2)),
}


@click.command("operators")
@click.option("--ops", help="Operators to try, separated by commas; parts and * are fine.")
@click.option("--sizes", default="both", type=click.Choice([*SIZES, "both"]))
@click.option("--mesh", default="both", type=click.Choice(list(MESHES)))
@click.option("--samples", default=5, type=click.IntRange(1), help="Most samples of an operator.")
@click.option("--choices", default=64, type=click.IntRange(1), help="Most placements of a sample.")
@click.option("--jobs", default=2, type=click.IntRange(1), help="Processes of four ranks each.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write results, one a line."
)
@click.option("--write", "page_file", type=click.Path(path_type=Path), help="Write the page.")
def main(
    ops: str | None,
    sizes: str,
    mesh: str,
    samples: int,
    choices: int,
    jobs: int,
    json_file: Path | None,
    page_file: Path | None,
) -> None:
    """Try operators; status 1 where one computes a wrong value or parts the ranks."""
    setting = Setting(
        sizes=tuple(SIZES) if sizes == "both" else (sizes,),
        meshes=MESHES[mesh],
        samples=samples,
        choices=(choices, min(choices, 10)),
    )
    names = _named(ops, setting.sizes[0])
    with open(json_file or os.devnull, "w") as lines:
        results = _try(names, setting, jobs, lines)
    for each in setting.sizes:
        click.echo(_line(summary_of(results, each)))
    if page_file is not None:
        page_file.write_text(page(results, setting))
    sys.exit(any(map(is_unsafe, results)))


def _named(ops: str | None, sizes: str) -> list[str]:
    try:
        known = names_of(sizes)
    except NoDatabase as error:
        raise click.ClickException(str(error)) from error
    if ops is None:
        return known
    found: dict[str, None] = {}
    for pattern in ops.split(","):
        matching = [name for name in known if _matches(name, pattern)]
        if not matching:
            raise click.BadParameter(f"the database has no operator {pattern!r}")
        found.update(dict.fromkeys(matching))
    return list(found)


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (name, *name.split(".")))


def _try(names: Sequence[str], setting: Setting, jobs: int, lines: TextIO) -> list[OpResult]:
    tasks = [(sizes, name) for sizes in setting.sizes for name in names]
    start = time.monotonic()
    results: list[OpResult] = []
    for result in try_all(tasks, setting, jobs):
        results.append(result)
        print(json.dumps(result.to_json()), file=lines, flush=True)
        click.echo(f"{len(results)}/{len(tasks)} {time.monotonic() - start:.0f} s  {_told(result)}")
    order = {task: index for index, task in enumerate(tasks)}
    return sorted(results, key=lambda result: order[(result.sizes, result.name)])


def _told(result: OpResult) -> str:
    name = f"{result.name} [{result.sizes}]"
    if result.untestable:
        return f"{name}: not testable: {result.untestable}"
    counts = ", ".join(f"{count} {kind}" for kind, count in result.counts.items())
    steps = f" of {', '.join(result.gathered)}" if result.gathered else ""
    lines = [f"{name}: {counts} ({result.runs or 'does not run'}{steps}; {result.seconds} s)"]
    for kind, example in result.examples.items():
        lines += [f"    {kind}: {example.case}", f"        {example.text}"]
        lines += [f"        at {example.where}"] if example.where else []
    return "\n".join(lines)


def _line(summary: Summary) -> str:
    failing = _counted((kind, n) for kind, n in summary.kinds.items() if kind != RIGHT)
    ways = _counted((way, summary.ways.get(way, 0)) for way in WAYS)
    return (
        f"{summary.sizes} sizes: {summary.right} of {summary.testable} testable operators entirely "
        f"right ({100 * summary.share:.1f} %; {summary.returns_right} without forms that write in "
        f"place or to out=), others: {failing or 'none'}; {ways}; "
        f"{summary.cases} cases"
    )


def _counted(pairs: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in pairs)


if __name__ == "__main__":
    main()
