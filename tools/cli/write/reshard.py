"""``dtckpt reshard``: rewrite a checkpoint for another mesh, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import DtckptError

from ..common.console import count, iec, mesh_text, printable
from ..common.options import (
    PLACE,
    debug_option,
    mapping_option,
    parse_mesh,
    parse_rule_sets,
    store_at,
    two_store_options,
)
from ..common.telling import bar, json_option, print_json, quiet_option, say, warn
from .rewrite_options import (
    check_rules,
    memory_option,
    processes_option,
    rewrite_options,
    with_renames,
)

if TYPE_CHECKING:
    from ....checkpoint import DTypeRule, Manifest, MappingTable, Rule
    from ....dtensor import Mesh


@click.command()
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option("--mesh", callback=parse_mesh, metavar="AXIS=N,...", help="The mesh of TARGET.")
@click.option(
    "--placements",
    "rules",
    callback=parse_rule_sets,
    multiple=True,
    metavar="RULES",
    help="How tensors lie on the mesh; see above. Repeatable.",
)
@click.option(
    "--to-world",
    type=click.IntRange(min=1),
    metavar="N",
    help="In place of both: the layouts of SOURCE for N ranks, see above.",
)
@rewrite_options
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at TARGET, if any.")
@click.option("--compress", is_flag=True, help="Compress the data files of TARGET.")
@click.option(
    "-n", "--dry-run", is_flag=True, help="Show what every tensor would become; write nothing."
)
@processes_option
@memory_option
@mapping_option
@two_store_options
@json_option
@quiet_option
@debug_option
def reshard(
    source: str,
    target: str,
    mesh: Mesh | None,
    rules: tuple[Rule, ...],
    to_world: int | None,
    select: tuple[str, ...],
    dtypes: tuple[DTypeRule, ...],
    renames: tuple[tuple[str, str], ...],
    overwrite: bool,
    compress: bool,
    dry_run: bool,
    processes: int | None,
    memory_bytes: int,
    mapping: MappingTable | None,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Write a checkpoint anew as if saved from another mesh.

    Streams from SOURCE to TARGET in bounded memory, by several processes, verifying what it reads.
    TARGET is committed at the end or not at all; SOURCE is not changed. What was interrupted is
    gone on with by the same command: files that are whole are verified and kept. Started by
    torchrun -m dtckpt reshard ..., the processes of all hosts share the files; TARGET must be in
    reach of all.

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
    dims, are replicated. A rule of any kind that matches nothing is refused. What a rank kept for
    itself (PerRank) stays with its rank.

    With --to-world N placements stay, and the data axis of the mesh becomes as long as N ranks
    take: dp_shard, fsdp, dp or data, or the only axis. N must be a multiple of the other axes.

    \b
    Examples:
      dtckpt reshard run/step-100 new --mesh dp=2,tp=2 \\
          --placements "*weight=S(0),S(1)"
      dtckpt reshard run/step-100 half --to-world 2 --dtype bfloat16
    """
    if (mesh is None) == (to_world is None) or (mesh is None) != (not rules):
        raise click.UsageError("give --mesh and --placements, or --to-world N in their place")
    if mesh is not None:
        check_rules(mesh, rules)
    with _ranks() as group:
        made = rewrite(
            source,
            target,
            mesh=mesh,
            rules=rules,
            to_world=to_world,
            select=select or None,
            dtypes=dtypes,
            mapping=with_renames(mapping, renames),
            overwrite=overwrite,
            compress="zstd" if compress else None,
            dry_run=dry_run,
            processes=processes,
            memory_bytes=memory_bytes,
            process_group=group,
            as_json=as_json,
            source_options=source_options,
            target_options=target_options,
        )
        if made is not None and _is_first(group):
            tell(made, target, as_json=as_json, kind="reshard")


def tell(made: Manifest, target: str, *, as_json: bool, kind: str) -> None:
    """Say what was written."""
    num_bytes = sum(tensor.stored_bytes for tensor in made.tensors.values())
    if as_json:
        document = {
            "target": target,
            "save_id": made.save_id,
            "num_tensors": len(made.tensors),
            "num_bytes": num_bytes,
            "files": [made.path_of(record) for record in made.files],
        }
        print_json(kind, document)
        return
    meshes = _meshes(made)
    where = f" for {mesh_text(meshes[0])}" if len(meshes) == 1 else ""
    say(
        f"{printable(target)}: {count(len(made.tensors), 'tensor')}, {iec(num_bytes)}, in "
        f"{count(len(made.files), 'file')}{where}"
    )


def _meshes(made: Manifest) -> list[Mesh]:
    """Return the meshes of tensors, without what ranks kept for themselves."""
    from ....checkpoint.resharding.placing import is_of_rank
    from ....dtensor import Layout

    layouts = [tensor.layout for tensor in made.tensors.values() if not is_of_rank(tensor)]
    return [*dict.fromkeys(layout.mesh for layout in layouts if isinstance(layout, Layout))]


def rewrite(
    source: str,
    target: str,
    *,
    rules: Sequence[Rule],
    dry_run: bool = False,
    as_json: bool = False,
    process_group: Any = None,
    source_options: dict[str, Any],
    target_options: dict[str, Any],
    **options: Any,
) -> Manifest | None:
    """Reshard, with progress; None where that was only shown. Of ranks one shows for all."""
    with (
        store_at(source, source_options, "SOURCE") as old,
        store_at(target, target_options, "TARGET") as new,
    ):
        from ....checkpoint.steps import refuse_others

        refuse_others(new)
        if (rules or dry_run) and _is_first(process_group):
            is_alone = dry_run or process_group is None  # else all ranks fail together, below
            with nullcontext() if is_alone else suppress(DtckptError):
                _show(old, new, rules=rules, dry_run=dry_run, as_json=as_json, **options)
        if dry_run:
            return None
    from ....checkpoint import reshard as reshard_checkpoint

    with bar("writing") if _is_first(process_group) else nullcontext() as on_progress:
        try:
            return reshard_checkpoint(
                source,
                target,
                rules=rules,
                process_group=process_group,
                source_options=source_options,
                target_options=target_options,
                on_progress=on_progress,
                **options,
            )
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise click.UsageError(str(error)) from error


def _show(
    old: Any, new: Any, *, dry_run: bool, as_json: bool, overwrite: bool, **options: Any
) -> None:
    """Warn of rules that place nothing, and show a dry run."""
    from ....checkpoint import read_manifest
    from ....checkpoint.files.committing import check_free
    from ....checkpoint.resharding.changes import Changes
    from .reshard_plan import plan_document, unused

    names = ("mesh", "rules", "to_world", "select", "dtypes", "mapping")
    changes = Changes(**{name: options[name] for name in names})
    check_free(new, overwrite=overwrite)
    plan = changes.plan(read_manifest(old), old.url)
    for rule in unused(plan.placed, changes.rules):
        warn(f"the rule {rule.pattern!r} places no tensor: others before it do")
    if dry_run and as_json:
        print_json("reshard-plan", plan_document(plan, source=old.url, target=new.url))
    elif dry_run:
        from .reshard_text import show_plan

        show_plan(plan, source=old.url, target=new.url)


@contextmanager
def _ranks() -> Generator[Any]:
    """Yield the group of all processes that torchrun has started; None where there is one."""
    # Its own variable: pods and batch jobs set WORLD_SIZE for whatever runs in them.
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return
    import torch

    torch.distributed.init_process_group("gloo")
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def _is_first(group: Any) -> bool:
    """Whether this process speaks for all."""
    return group is None or group.rank() == 0
