"""``dtckpt convert``: what a checkpoint holds in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ..common.console import count, iec, printable
from ..common.options import (
    PLACE,
    debug_option,
    mapping_option,
    parse_mesh,
    parse_rule_sets,
    store_at,
    two_store_options,
)
from ..common.telling import bar, json_option, print_json, quiet_option, say
from .reshard import rewrite, tell
from .rewrite_options import check_rules, memory_option, parse_size, processes_option

if TYPE_CHECKING:
    from ....checkpoint import MappingTable, Rule
    from ....dtensor import Mesh

_DTCKPT, _OTHERS = ("mesh", "rules", "processes", "memory_bytes"), ("part", "max_file_bytes")
"""Arguments that one format has and others have not."""


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option(
    "--to",
    "format",
    type=click.Choice(["safetensors", "dcp", "dtckpt"]),
    required=True,
    help="As Hugging Face's libraries load it, torch.distributed.checkpoint, or dtckpt.",
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
@click.option(
    "--mesh", callback=parse_mesh, metavar="AXIS=N,...", help="To dtckpt: the mesh of TARGET."
)
@click.option(
    "--placements",
    "rules",
    callback=parse_rule_sets,
    multiple=True,
    metavar="RULES",
    help="To dtckpt: how tensors lie on the mesh, as 'dtckpt reshard --help' tells. Repeatable.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is at TARGET, if anything.")
@processes_option
@memory_option
@mapping_option
@two_store_options
@json_option
@quiet_option
@debug_option
@click.pass_context
def convert(
    ctx: click.Context,
    source: str,
    target: str,
    format: Literal["safetensors", "dcp", "dtckpt"],
    part: str,
    max_file_bytes: int,
    mesh: Mesh | None,
    rules: tuple[Rule, ...],
    overwrite: bool,
    processes: int | None,
    memory_bytes: int,
    mapping: MappingTable | None,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Write a checkpoint in another program's format, or ours.

    SOURCE is of any format that dtckpt reads. To safetensors, TARGET is a directory, in which
    model.safetensors is made, or several files and their index; or the path of one file that ends
    in .safetensors. They hold tensors only. To dcp, TARGET is a checkpoint of
    torch.distributed.checkpoint, values included. In both names are joined by dots:
    model/layers.0.weight becomes layers.0.weight with --part model.

    To dtckpt, tensors and values are written with checksums. Layouts stay as they are, unless
    --mesh and --placements tell others.

    Streams in bounded memory, verifying what it reads; SOURCE is not changed.

    \b
    Examples:
      dtckpt convert run/step-100 weights --to safetensors --part model
      dtckpt convert run/step-100 for-torch --to dcp
      dtckpt convert dcp ours --to dtckpt --mesh dp=2 --placements "*=S(0)"
    """
    _refuse(ctx, format, _OTHERS if format == "dtckpt" else _DTCKPT)
    if format == "dtckpt":
        if (mesh is None) != (not rules):
            raise click.UsageError("--mesh and --placements go together")
        if mesh is not None:
            check_rules(mesh, rules)
        made = rewrite(
            source,
            target,
            mesh=mesh,
            rules=rules,
            to_world=None,
            select=None,
            dtypes=(),
            mapping=mapping,
            overwrite=overwrite,
            processes=processes,
            memory_bytes=memory_bytes,
            source_options=source_options,
            target_options=target_options,
        )
        if made is not None:
            tell(made, target, as_json=as_json, kind="convert")
        return
    from ....checkpoint import export

    with store_at(source, source_options, "SOURCE") as old, bar("converting") as on_progress:
        report = export(
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
    if as_json:
        document = {
            "target": report.url,
            "num_tensors": len(report.tensors),
            "num_bytes": report.num_bytes,
            "files": list(report.files),
            "tied": dict(report.tied),
        }
        print_json("convert", document)
        return
    tied = f", {count(len(report.tied), 'name')} tied to others" if report.tied else ""
    say(
        f"{printable(report.url)}: {count(len(report.tensors), 'tensor')}, "
        f"{iec(report.num_bytes)}, in {count(len(report.files), 'file')}{tied}"
    )


def _refuse(ctx: click.Context, format: str, names: tuple[str, ...]) -> None:
    """Raise a usage error for options that a format has not."""
    given = click.core.ParameterSource.COMMANDLINE
    for param in ctx.command.params:
        if param.name in names and ctx.get_parameter_source(param.name) is given:
            raise click.UsageError(f"{param.opts[0]} is not for --to {format}")
