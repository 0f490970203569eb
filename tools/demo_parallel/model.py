"""How dtckpt's own parallelisms spread the demo's GPT over a mesh."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from dtckpt.dtensor import DeviceMesh, Replicate, Shard
from dtckpt.dtensor.experimental import context_parallel
from dtckpt.dtensor.fsdp import DataParallelMeshDims, fully_shard
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ..demo.model import GPT
from ..demo.text import Batch


def spread(model: GPT, mesh: DeviceMesh) -> GPT:
    """Spread a model, which all ranks have alike, over the axes of a mesh; return it.

    ``tp`` splits layers, and between them the sequence. ``dp`` shares the rows of a batch and
    ``cp`` its sequences; parameters are sharded over both.
    """
    names = mesh.layout_mesh.axis_names
    if "tp" in names:
        parallelize_module(model, mesh["tp"], _styles(), src_data_rank=None)
    over = DataParallelMeshDims(shard=tuple(name for name in ("dp", "cp") if name in names))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=over)
    fully_shard(model, mesh=mesh, dp_mesh_dims=over)
    return model


def passes(model: GPT, mesh: DeviceMesh, batch: Batch) -> torch.Tensor:
    """Make the passes of this rank's part of a batch and return its loss.

    The mean over all ranks is that of the batch, of losses as of gradients.
    """
    mine = batch.share(mesh.get_local_rank("dp"), mesh.size("dp"))
    inputs, targets = mine.inputs.clone(), mine.targets.clone()
    places = torch.arange(inputs.shape[1])
    parts = mesh.size("dp")
    with ExitStack() as stack:
        if "cp" in mesh.layout_mesh.axis_names:
            parts *= mesh.size("cp")
            buffers = (inputs, targets, places)
            sharing = context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=(1, 1, 0))
            stack.enter_context(sharing)  # the buffers are this rank's part of the sequence now
        stack.enter_context(loss_parallel())
        # Eight rows on three ranks, 65 positions on two: who has more of them counts for more.
        share = inputs.numel() * parts / batch.inputs.numel()
        loss = model(inputs, targets, places) * share
        loss.backward()
    return torch.tensor(loss.item())


def _styles() -> dict[str, ParallelStyle]:
    # DTensors go from layer to layer: they know which part of the sequence a rank has.
    part: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), **part),
        "positions": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
        ),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(**part),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "blocks.*.down": RowwiseParallel(**part),
        "norm": SequenceParallel(),
        # Each rank has the logits of some bytes of the vocabulary; the loss is taken of these.
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
