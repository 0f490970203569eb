"""``dtckpt copy``: a checkpoint or a run as it is, in another place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import Corrupt, NotCommitted

from ..common.console import count, iec, printable
from ..common.options import PLACE, debug_option, store_at, two_store_options
from ..common.telling import bar, quiet_option, say

if TYPE_CHECKING:
    from ....storage import Store


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Whether to read the copy once more; what is read of SOURCE is always verified.",
)
@two_store_options
@quiet_option
@debug_option
def copy(
    source: str,
    target: str,
    verify: bool,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
) -> None:
    """Copy a checkpoint or a run, as it is, to TARGET.

    From any store to any other, in bounded memory. Each checkpoint is committed at the end or not
    at all; where SOURCE is a run, those to which others refer come first, with pins and records. A
    second call goes on where one was interrupted, and brings a run what was saved since.

    \b
    Examples:
      dtckpt copy run/step-300 backup/step-300
      dtckpt copy run backup/run
    """
    with (
        store_at(source, source_options, "SOURCE") as old,
        store_at(target, target_options, "TARGET") as new,
    ):
        names = _copy(old, new)
        for place in [new.substore(name) if name else new for name in names] if verify else ():
            _verify(place)
        if names != [""]:
            say(f"{printable(new.url)}: {count(len(names), 'checkpoint')} copied")


def _copy(old: Store, new: Store) -> list[str]:
    """Copy what there is; return the names of what was copied, "" for the place itself."""
    from ....checkpoint import copy as copy_one
    from ....checkpoint import read_manifest
    from ....checkpoint.runs.copying import copy_run
    from ....checkpoint.steps import steps_of_level

    with bar("copying") as on_progress:
        try:
            manifest = read_manifest(old)
        except NotCommitted:
            if not steps_of_level(old):
                raise
            return copy_run(old, new, on_progress=on_progress)
        copy_one(old, new, on_progress=on_progress)
    num_bytes = sum(record.size for record in manifest.files)
    say(f"{printable(new.url)}: {count(len(manifest.files), 'file')}, {iec(num_bytes)}")
    return [""]


def _verify(place: Store) -> None:
    from ....checkpoint import verify

    with bar("verifying") as on_progress:
        report = verify(place, on_progress=on_progress)
    if report.problems:
        raise Corrupt(f"the copy is damaged: {report.problems[0].message}")
