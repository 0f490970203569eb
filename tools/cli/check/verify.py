"""``dtckpt verify``: read every byte of a checkpoint and name every fault."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import Corrupt

from ..common.console import count, iec, printable
from ..common.exit_codes import FINDING
from ..common.options import debug_option, store_at, store_option
from ..common.telling import bar, json_option, print_json, quiet_option, say

if TYPE_CHECKING:
    from ....checkpoint import Problem, VerifyReport
    from ....storage import Store


@click.command()
@click.argument("checkpoint")
@json_option
@store_option()
@quiet_option
@debug_option
@click.pass_context
def verify(ctx: click.Context, checkpoint: str, as_json: bool, option: dict[str, Any]) -> None:
    """Read all of CHECKPOINT and check every byte against its checksums.

    Files of other programs, which have none, are only compared with what their headers state.

    Exits with 0 if it is intact. Otherwise prints every problem, with file, byte range and
    tensors, and exits with 1. Nothing is changed.
    """
    from ....checkpoint import Problem

    began = time.monotonic()
    with store_at(checkpoint, option) as store:
        report = None
        try:
            report = _run(store)
            problems = report.problems
        except Corrupt as error:
            problems = (Problem(message=str(error), file="manifest.json"),)
        seconds = time.monotonic() - began
        if as_json:
            print_json("verification", _document(store.url, report, problems))
        else:
            _print(store.url, report, problems, seconds)
    ctx.exit(FINDING if problems else 0)


def _run(store: Store) -> VerifyReport:
    from ....checkpoint import verify as verify_checkpoint

    with bar("verifying") as on_progress:
        return verify_checkpoint(store, on_progress=on_progress)


def _document(url: str, report: VerifyReport | None, problems: Sequence[Problem]) -> dict[str, Any]:
    return {
        "url": url,
        "intact": not problems,
        "num_tensors": report.num_tensors if report else None,
        "num_files": report.num_files if report else None,
        "bytes_checked": report.bytes_checked if report else 0,
        "has_checksums": report.has_checksums if report else True,
        "problems": [asdict(problem) for problem in problems],
    }


def _print(
    url: str, report: VerifyReport | None, problems: Sequence[Problem], seconds: float
) -> None:
    if report is not None:
        found = (
            f"{count(report.num_tensors, 'tensor')} in {count(report.num_files, 'file')}, "
            f"{iec(report.bytes_checked)} checked in {seconds:.1f} s"
        )
    else:
        found = "the manifest cannot be read, so nothing else could be checked"
    verdict = f"damaged, {count(len(problems), 'problem')}" if problems else "intact"
    if not problems and report is not None and not report.has_checksums:
        verdict = "complete, but without checksums: bytes may have changed"
    say(f"{printable(url)}: {verdict} ({found})")
    for problem in problems:
        click.echo(f"  {printable(problem.message.removeprefix(f'{url}/'))}")
