"""``dtckpt export``: what a checkpoint holds as files that other programs load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ..common.console import count, iec, printable
from ..common.options import PLACE, debug_option, mapping_option, store_at, two_store_options
from ..common.telling import bar, quiet_option, say
from .rewrite_options import parse_size

if TYPE_CHECKING:
    from ....checkpoint import MappingTable


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option(
    "--format",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    show_default=True,
    help="As Hugging Face's libraries load it, or torch.distributed.checkpoint.",
)
@click.option(
    "--part",
    default="",
    metavar="NAME",
    help="The part of the state that is meant, such as model; names are those below it.",
)
@click.option(
    "--max-file-size",
    "max_file_bytes",
    callback=parse_size,
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Where files are cut, such as 500MB or 2GiB; a larger tensor has its own.",
)
@click.option("--overwrite", is_flag=True, help="Replace the weights at TARGET, if any.")
@mapping_option
@two_store_options
@quiet_option
@debug_option
def export(
    source: str,
    target: str,
    format: Literal["safetensors", "dcp"],
    part: str,
    max_file_bytes: int,
    overwrite: bool,
    mapping: MappingTable | None,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
) -> None:
    """Write the checkpoint SOURCE to TARGET as files that other programs load.

    As safetensors, TARGET is a directory, in which model.safetensors is made, or several files and
    their index; or the path of one file that ends in .safetensors. They hold tensors only. As dcp,
    TARGET is a checkpoint of torch.distributed.checkpoint, values included.

    Streams in bounded memory, verifying what it reads; SOURCE is not changed. Names are joined by
    dots: model/layers.0.weight becomes layers.0.weight with --part model.

    \b
    Examples:
      dtckpt export run/step-100 weights --part model --max-file-size 2GB
      dtckpt export run/step-100 for-torch --format dcp
    """
    from ....checkpoint import export as export_checkpoint

    with (
        store_at(source, source_options, "SOURCE") as old,
        bar("exporting") as on_progress,
    ):
        report = export_checkpoint(
            old,
            target,
            format=format,
            part=part,
            mapping=mapping,
            max_file_bytes=max_file_bytes,
            overwrite=overwrite,
            target_options=target_options,
            on_progress=on_progress,
        )
    tied = f", {count(len(report.tied), 'name')} tied to others" if report.tied else ""
    say(
        f"{printable(report.url)}: {count(len(report.tensors), 'tensor')}, "
        f"{iec(report.num_bytes)}, in {count(len(report.files), 'file')}{tied}"
    )
