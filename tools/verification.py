"""``dtckpt verify``: read every byte of a checkpoint and name every fault."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import Corrupt

from .console import count, iec, printable, progress
from .options import DAMAGE, SCHEMA_VERSION, debug_option, json_option, store_at, store_option

if TYPE_CHECKING:
    from ..checkpoint import Manifest, VerifyReport
    from ..storage import Store

_MAX_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault."""

    message: str
    """What is wrong, naming file, byte range and tensors."""
    file: str | None
    """The file's name in the checkpoint, where the fault is in one."""


@click.command()
@click.argument("checkpoint")
@json_option
@store_option("--option", "the store")
@debug_option
@click.pass_context
def verify(ctx: click.Context, checkpoint: str, as_json: bool, option: dict[str, Any]) -> None:
    """Read all of CHECKPOINT and check every byte against its checksums.

    Exits with 0 if it is intact. Otherwise prints every problem, with file, byte range and
    tensors, and exits with 1. Nothing is changed.
    """
    from ..checkpoint import read_manifest

    began = time.monotonic()
    with store_at(checkpoint, option, argument="'CHECKPOINT'", option="'--option'") as store:
        report = None
        try:
            manifest = read_manifest(store)
            report = _run(store)
            problems = [_explain(text, store.url, manifest) for text in report.problems]
        except Corrupt as error:
            problems = [_of_manifest(str(error), store.url)]
        seconds = time.monotonic() - began
        if as_json:
            click.echo(json.dumps(_document(store.url, report, problems), indent=2))
        else:
            _print(store.url, report, problems, seconds)
    ctx.exit(DAMAGE if problems else 0)


def _run(store: Store) -> VerifyReport:
    from ..checkpoint import verify as verify_checkpoint

    with progress("verifying") as on_progress:
        return verify_checkpoint(store, on_progress=on_progress)


def _explain(text: str, url: str, manifest: Manifest) -> Problem:
    """Return a problem with the file that it is about and the tensors that are lost with it."""
    for record in manifest.files:
        name = manifest.path_of(record)
        if text.startswith(f"{url}/{name}:"):
            message = text.removeprefix(f"{url}/")
            if not _names_a_tensor(message, manifest):
                message += _held(manifest, record.rank, record.size)
            return Problem(message=message, file=name)
    return Problem(message=text, file=None)


def _of_manifest(text: str, url: str) -> Problem:
    name = "manifest.json" if text.startswith(f"{url}/manifest.json:") else None
    return Problem(message=text.removeprefix(f"{url}/"), file=name)


def _names_a_tensor(text: str, manifest: Manifest) -> bool:
    words = set(re.split(r"[\s,;'\"]+", re.sub(r"\[[\d:,]*\]", "", text)))
    return any(name in words or f"{name!r}" in text for name in manifest.tensors)


def _held(manifest: Manifest, rank: int, size: int) -> str:
    """Return which tensors have data in a rank's file."""
    names = [name for name, t in manifest.tensors.items() if any(True for _ in t.chunks_of(rank))]
    if not names:
        return ""
    rest = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return (
        f". Of no use now: bytes 0 to {size}, which hold {count(len(names), 'tensor')}: "
        f"{', '.join(names[:_MAX_NAMES])}{rest}"
    )


def _document(url: str, report: VerifyReport | None, problems: Sequence[Problem]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "verification",
        "url": url,
        "intact": not problems,
        "num_tensors": report.num_tensors if report else None,
        "num_files": report.num_files if report else None,
        "bytes_checked": report.bytes_checked if report else 0,
        "problems": [{"file": p.file, "message": p.message} for p in problems],
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
    click.echo(f"{printable(url)}: {verdict} ({found})")
    for problem in problems:
        click.echo(f"  {printable(problem.message)}")
