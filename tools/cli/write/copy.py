"""``dtckpt copy``: a checkpoint or a run as it is, in another place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import CheckpointError, NotCommitted

from ..common.console import count, iec, printable
from ..common.options import PLACE, debug_option, store_at, two_store_options
from ..common.telling import bar, json_option, print_json, quiet_option, say

if TYPE_CHECKING:
    from ....checkpoint import Manifest
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
@json_option
@quiet_option
@debug_option
def copy(
    source: str,
    target: str,
    verify: bool,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Copy a checkpoint or a run, as it is, to TARGET.

    From any store to any other, in bounded memory. Each checkpoint is committed at the end, after
    its files were read once more, or not at all; where SOURCE is a run, those to which others refer
    come first, with pins and records. A second call goes on where one was interrupted, and brings a
    run what was saved since.

    \b
    Examples:
      dtckpt copy run/step-300 backup/step-300
      dtckpt copy run backup/run
    """
    with (
        store_at(source, source_options, "SOURCE") as old,
        store_at(target, target_options, "TARGET") as new,
    ):
        copied = _copy(old, new, verify=verify)
        if as_json:
            names = copied if isinstance(copied, list) else None
            told = {"source": old.url, "target": new.url, "checkpoints": names, "verified": verify}
            print_json("copy", told)
        elif isinstance(copied, list):
            say(f"{printable(new.url)}: {count(len(copied), 'checkpoint')} copied")
        else:
            num_bytes = sum(record.size for record in copied.files)
            say(f"{printable(new.url)}: {count(len(copied.files), 'file')}, {iec(num_bytes)}")


def _copy(old: Store, new: Store, *, verify: bool) -> Manifest | list[str]:
    """Copy what there is; return the checkpoint, or the names of those of a run."""
    from ....checkpoint import copy as copy_one
    from ....checkpoint import read_manifest
    from ....checkpoint.runs.copying import copy_run
    from ....checkpoint.runs.overview import look_over
    from ....checkpoint.steps import refuse_others, steps_of_level

    with bar("copying") as on_progress:
        try:
            read_manifest(old)
        except NotCommitted:
            if not steps_of_level(old):
                if programs := sorted({step.format for step in look_over(old)} - {""}):
                    raise CheckpointError(
                        f"the checkpoints in {old.url} are of {', '.join(programs)}, which dtckpt "
                        "does not copy: copy their files, or have dtckpt convert write them anew"
                    ) from None
                raise
            return copy_run(old, new, verify=verify, on_progress=on_progress)
        refuse_others(new)
        return copy_one(old, new, verify=verify, on_progress=on_progress)
