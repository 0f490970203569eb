"""``dtckpt reshard``: rewrite a checkpoint for another mesh, without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from ..common.console import count, iec, mesh_text, printable
from ..common.options import (
    debug_option,
    mapping_option,
    parse_mesh,
    parse_rule_sets,
    store_at,
    two_store_options,
)
from ..common.telling import bar, quiet_option, say, warn

if TYPE_CHECKING:
    from ....checkpoint import Manifest, MappingTable, Rule
    from ....dtensor import Mesh
    from ....storage import Store


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--mesh", callback=parse_mesh, required=True, metavar="AXIS=N,...", help="The mesh of TARGET."
)
@click.option(
    "--placements",
    "rules",
    callback=parse_rule_sets,
    required=True,
    multiple=True,
    metavar="RULES",
    help="How tensors lie on the mesh; see above. Repeatable.",
)
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at TARGET, if any.")
@click.option("--compress", is_flag=True, help="Compress the data files of TARGET.")
@click.option(
    "-n", "--dry-run", is_flag=True, help="Show what every tensor would become; write nothing."
)
@mapping_option
@two_store_options
@quiet_option
@debug_option
def reshard(
    source: str,
    target: str,
    mesh: Mesh,
    rules: tuple[Rule, ...],
    overwrite: bool,
    compress: bool,
    dry_run: bool,
    mapping: MappingTable | None,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
) -> None:
    """Write the checkpoint SOURCE to TARGET as if it had been saved from another mesh.

    Streams from file to file in bounded memory, verifying what it reads. TARGET is committed at
    the end or not at all; SOURCE is not changed.

    \b
    RULES is PATTERN=PLACEMENT,PLACEMENT,... with one placement per axis of
    the mesh; separate rules by ";" or give the option several times.
      PATTERN          a tensor's name, where * matches any characters, /
                       included, ? one, and [ab] one of some
      S(dim)           split along a tensor dim, as torch.chunk does
      S(dim)@order     where several axes split one dim: their cutting order
      R                replicated
      Ragged(dim:n,n)  split along a dim into these sizes, one per rank
      Packed(dim:n,n)  a dim that consists of parts of these sizes, each of
                       them split as by S: fused weights
      HeadTail(dim)    a chunk from either end of the dim: sequences

    The first rule that matches places a tensor. Tensors that none matches, and those without
    dims, are replicated. A rule that matches none is refused. What a rank kept for itself
    (PerRank) stays with its rank.

    \b
    Example:
      dtckpt reshard run/step-100 new --mesh dp=2,tp=2 \\
          --placements "*.embed.weight=R,S(1); model/*=S(0),R"
    """
    _check_rules(mesh, rules)
    with (
        store_at(source, source_options, "SOURCE") as old,
        store_at(target, target_options, "TARGET") as new,
    ):
        _reshard(
            old,
            new,
            mesh,
            rules,
            mapping,
            overwrite=overwrite,
            compress="zstd" if compress else None,
            dry_run=dry_run,
        )


def _check_rules(mesh: Mesh, rules: Sequence[Rule]) -> None:
    """Raise a usage error for rules that fit no tensor on this mesh."""
    for rule in rules:
        axes = "1 axis" if mesh.ndim == 1 else f"{mesh.ndim} axes"
        num = len(rule.placements)
        if num != mesh.ndim:
            problem = f"has {count(num, 'placement')}, but --mesh {mesh} has {axes}"
        elif any(placement.is_partial() for placement in rule.placements):
            problem = "asks for Partial, which a checkpoint cannot hold"
        else:
            continue
        raise click.BadParameter(
            f"the rule {rule.pattern!r} {problem}", param_hint="'--placements'"
        )


def _reshard(
    old: Store,
    new: Store,
    mesh: Mesh,
    rules: Sequence[Rule],
    mapping: MappingTable | None,
    *,
    overwrite: bool,
    compress: Literal["zstd"] | None,
    dry_run: bool,
) -> None:
    from ....checkpoint import place, read_manifest
    from ....checkpoint.files.committing import check_free
    from ....checkpoint.mapping.table import mapped_manifest
    from .reshard_plan import unused

    manifest = mapped_manifest(read_manifest(old), mapping, old.url)
    check_free(new, overwrite=overwrite)
    placed = place(manifest, mesh, rules)
    for rule in unused(placed, rules):
        warn(f"the rule {rule.pattern!r} places no tensor: others before it do")
    if dry_run:
        from .reshard_text import show_plan

        show_plan(placed, mesh, source=old.url, target=new.url)
        return
    written = _write(old, new, mesh, rules, mapping, overwrite=overwrite, compress=compress)
    num_bytes = sum(tensor.num_bytes for tensor in written.tensors.values())
    say(
        f"{printable(new.url)}: {count(len(written.tensors), 'tensor')}, {iec(num_bytes)}, in "
        f"{count(len(written.files), 'file')} for {mesh_text(mesh)}"
    )


def _write(
    old: Store,
    new: Store,
    mesh: Mesh,
    rules: Sequence[Rule],
    mapping: MappingTable | None,
    *,
    overwrite: bool,
    compress: Literal["zstd"] | None,
) -> Manifest:
    from ....checkpoint import reshard as reshard_checkpoint

    with bar("resharding") as on_progress:
        return reshard_checkpoint(
            old,
            new,
            mesh,
            rules,
            mapping=mapping,
            overwrite=overwrite,
            compress=compress,
            on_progress=on_progress,
        )
