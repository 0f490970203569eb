"""How dtckpt's own parallelisms spread the demo's GPT over a mesh."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor import DeviceMesh, Replicate, Shard
from dtckpt.dtensor.fsdp import fully_shard
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

    ``tp`` splits layers, and between them the sequence; ``dp`` shards parameters.
    """
    if "tp" in mesh.layout_mesh.axis_names:
        parallelize_module(model, mesh["tp"], _styles(), src_data_rank=None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def passes(model: GPT, mesh: DeviceMesh, batch: Batch) -> torch.Tensor:
    """Make the passes of this rank's part of a batch and return its loss.

    The mean over all ranks is that of the batch, of losses as of gradients.
    """
    mine = batch.share(mesh.get_local_rank("dp"), mesh.size("dp"))
    # Eight rows on three ranks: who has more of them counts for more.
    share = mine.inputs.numel() * mesh.size("dp") / batch.inputs.numel()
    with loss_parallel():
        loss = model(mine.inputs, mine.targets) * share
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
