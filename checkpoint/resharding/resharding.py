"""Offline resharding: rewrite a checkpoint for another mesh, in bounded memory.

It is the same algorithm as everywhere: the boxes of the new layout are intersected with those of
the old one, and exactly those bytes are streamed from file to file, verified as they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from ...dtensor.geometry.mesh import Mesh
from ...storage.base import Store
from ..files.manifest import Manifest
from ..mapping.table import TensorMapping, table_of
from ..reading.batches import counted
from .changes import Changes
from .dtype_rules import DTypeRule
from .placing import Rule
from .work import Order, Work
from .workers import num_processes, write_with

MEMORY_BYTES = 512 << 20


def reshard(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    mesh: Mesh | None = None,
    rules: Sequence[Rule] = (),
    *,
    to_world: int | None = None,
    select: str | Sequence[str] | None = None,
    dtypes: Sequence[DTypeRule] = (),
    mapping: TensorMapping | None = None,
    overwrite: bool = False,
    compress: Literal["zstd"] | None = None,
    processes: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    process_group: Any = None,
    timeout: timedelta | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write ``source`` anew at ``target`` as if it had been saved from ``mesh``.

    ``rules`` place the tensors as ``place`` says. In their place ``to_world`` keeps the placements
    of the source for so many ranks: the data axis of its meshes is made as long as it takes
    (``dp_shard``, ``fsdp``, ``dp`` or ``data``, or the only axis). With neither layouts stay as
    they are. ``mapping`` makes others of the tensors before all else: all names are then those
    that it gives. ``select`` are leaves as in ``load``; nothing else is written. ``dtypes`` are
    conversions by the rules of ``Tensor.to``. ``compress`` is that of ``save``. A rule of any kind
    that fits nothing is an error.

    Several ``processes`` of this machine write, by default as many as it has processors and
    ``memory_bytes`` has room for, which bounds the memory of all together whatever the size of the
    checkpoint. Stores that are given as objects are those of this process, which writes alone then.
    The ranks of a ``process_group`` call this together and write files in parallel, each by itself
    unless ``processes`` says otherwise; they fail together, and a rank that shows no sign of life
    for ``timeout`` is given up. ``on_progress(done, total)`` is called with bytes that were read,
    of this rank's files.

    The target is committed at the end or not at all. A call that was killed or has failed leaves
    the files that it had finished, under a name that follows from the source and all options: the
    same call again verifies them and writes the others only; ``clean`` takes them away. What comes
    of another program's files, which have no checksums, is written anew.

    Errors are those of ``load`` and ``save``, and ValueError for options that exclude each other.
    """
    if compress not in (None, "zstd"):
        raise ValueError(f"compress is None or 'zstd', got {compress!r}")
    order = Order(
        source=source,
        target=target,
        changes=Changes(
            mesh=mesh,
            rules=tuple(rules),
            to_world=to_world,
            select=None if select is None else (select,) if isinstance(select, str) else (*select,),
            dtypes=tuple(dtypes),
            mapping=None if mapping is None else table_of(mapping),
            is_compressed=compress is not None,
        ),
        source_options=dict(source_options or {}),
        target_options=dict(target_options or {}),
        overwrite=overwrite,
    )
    if process_group is not None:
        from .by_ranks import reshard_together  # which needs torch

        return reshard_together(order, process_group, timeout, processes, memory_bytes, on_progress)
    work = Work(order)
    order = work.begin()
    plan = work.plan()
    on_read = work.on_read = counted(on_progress, plan.num_bytes)
    count = num_processes(order, processes, memory_bytes, plan.ranks, plan.num_bytes)
    with work.giving_up(plan.ranks):
        if count == 0:
            files = list(work.write_all(plan.ranks))
        else:
            files = list(write_with(count, order, plan.ranks, on_read))
    return work.finish(files)
