"""Make ``tests/data/torch_checkpointing-0.1.1.tar.xz`` anew, by its CheckpointManager on two ranks.

    pip install --no-deps --target PLACE torch_checkpointing==0.1.1
    PYTHONPATH=PLACE python -m tests.checkpoint.formats.makers.make_torch_checkpointing

Its ranks tell each other where tensors lie through the memory of a GPU; here through Gloo, by a
function of three lines in the place of that one. ``described`` has items with resharders and so a
``metadata.pkl``; ``bare`` has none, and says in its files alone what lies where; ``alone`` is of
one process. ``expected.pt`` is what the ranks held together, by torch.
"""

# pyright: reportPrivateImportUsage=false, reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from . import making
from .make_verl import whole

RANKS = 2
FULL = torch.arange(24.0).view(6, 4)


class Boxes(Tensor):
    """A tensor of which a rank has several boxes, by the protocol of torch_checkpointing."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


def boxes(rank: int, cls: Any = Boxes) -> Any:
    """Return every other column of ``FULL``."""
    starts = (rank, rank + 2)
    made = FULL[:, rank::2].clone().as_subclass(cls)
    made.global_shape = (6, 4)
    made.global_offsets = tuple((0, at) for at in starts)
    made.local_offsets = ((0, 0), (0, 1))
    made.local_sizes = ((6, 1), (6, 1))
    return made


def rank_main(rank: int, place: str) -> None:
    """Train a step and save, on one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import (
        JsonSerialization,
        LayoutInfo,
        SafetensorsSerialization,
    )
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(_self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, data, process_group)
        return dict(enumerate(found))

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    model.register_buffer("scale", torch.arange(3.0))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
    optimizer.step()
    resharder = DefaultResharder()
    files = LayoutInfo("weights/rank_{rank}.safetensors", SafetensorsSerialization())
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "weights": dict(model.state_dict()),
        "boxes": {"columns": boxes(rank)},
        "step": 7,
        "rng": {"seed": 100 + rank, "state": torch.full((4,), rank)},
        "config": {"lr": 0.01},
    }
    specs = {name: ItemSpec(resharder=resharder) for name in ("model", "optimizer", "boxes")}
    specs["weights"] = ItemSpec(resharder=resharder, layout=files)
    specs["config"] = ItemSpec(layout=LayoutInfo("config_{rank}.json", JsonSerialization()))
    common: Any = {
        "save": SyncCheckpointSaverConfig(),
        "storage_config": LocalFileSystemStorageConfig(use_direct_io=False),
    }
    config = CheckpointManager.Config(items=specs, **common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultMetadataManager, "_all_gather_pickled_data", gather)
        CheckpointManager(config).save(place + "/described", state)
    plain = CheckpointManager(CheckpointManager.Config(**common))
    bare = {"model": model.state_dict(), "boxes": {"columns": boxes(rank, Tensor)}, "step": 7}
    plain.save(place + "/bare", bare)
    expected = {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict())}
    dist.destroy_process_group()
    if rank == 0:
        torch.save(expected, Path(place) / "expected.pt")
        alone = CheckpointManager(CheckpointManager.Config(**common))
        alone.save(place + "/alone", {"model": expected["model"], "step": 7})


if __name__ == "__main__":
    with making("torch_checkpointing-0.1.1") as place:
        torch.multiprocessing.spawn(rank_main, (place,), nprocs=RANKS)
