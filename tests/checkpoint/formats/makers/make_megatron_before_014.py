"""Make ``tests/data/megatron-core-0.12.2.tar.xz`` anew: tensors that its optimizer has flattened.

    pip install --no-deps --target PLACE megatron-core==0.12.2
    PYTHONPATH=PLACE python -m tests.checkpoint.formats.makers.make_megatron_before_014

Each of two tensor-parallel ranks has a block of rows of two stacked layers; of that, flattened, two
data-parallel ranks have a part each.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# pyright: reportMissingImports=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat

from . import making

FULL = torch.arange(48.0).view(2, 6, 4)
RANKS = 4


def rank_main(rank: int, place: str) -> None:
    """Save, on one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29657"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    patch = pytest.MonkeyPatch()  # of what it calls without a GPU, too
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(np, "product", np.prod, raising=False)  # gone since numpy 2
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def write(*given: Any) -> Any:
        write_item: Any = torch_filesystem._write_item
        return write_item(*given, SerializationFormat.TORCH_SAVE)

    patch.setattr(filesystem_async, "_write_item", write)  # torch has one argument more now
    from megatron.core.dist_checkpointing import ShardedTensor

    tensor, data = divmod(rank, 2)
    state = {}
    for layer in range(2):
        block = FULL[layer].chunk(2)[tensor]
        part = (slice(0, 5), slice(5, 12))[data]
        state[f"layer {layer}"] = ShardedTensor.from_rank_offsets_flat(
            "optimizer.state.exp_avg.w",
            block.flatten()[part].clone(),
            tuple(block.shape),
            (0, layer, 2),
            (1, tensor, 2),
            prepend_axis_num=1,
            flattened_range=part,
        )
    state["plain"] = ShardedTensor.from_rank_offsets("w", FULL[0].clone(), replica_id=rank)
    dist_checkpointing.save(state | {"iteration": 3}, place)
    dist.destroy_process_group()


if __name__ == "__main__":
    with making("megatron-core-0.12.2") as place:
        torch.multiprocessing.spawn(rank_main, (place,), nprocs=RANKS)
