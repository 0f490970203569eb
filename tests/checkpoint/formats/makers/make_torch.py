"""Make ``tests/data/torch-VERSION.tar.xz`` anew: what one torch saves on four ranks.

    python -m tests.checkpoint.formats.makers.make_torch

Run with the Python of an environment that has this torch, 2.2 or later (2.2 needs numpy below 2);
nothing else is needed. ``dcp`` is a folder of ``torch.distributed.checkpoint``, ``ranks`` has what
each rank gave to ``torch.save``, with its meshes, in files with the names that verl gives them.
"""

# pyright: reportPrivateImportUsage=false, reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from . import making

RANKS = 4
CUTS: Mapping[str, tuple[int | None, int | None]] = {
    "rows": (0, None),
    "uneven": (0, 0),
    "columns": (None, 1),
    "both": (0, 1),
    "replicated": (None, None),
}
"""Along which dimension each axis of the mesh cuts a tensor, by name."""


def tensors() -> dict[str, Tensor]:
    """Return the tensors of the state that are distributed, whole."""
    return {
        "rows": torch.arange(24.0).reshape(6, 4),
        "uneven": torch.arange(5, dtype=torch.float64) / 8,
        "columns": torch.arange(12.0).reshape(2, 6).to(torch.bfloat16),
        "both": torch.arange(20).reshape(4, 5),
        "replicated": torch.tensor([True, False, True]),
    }


def plain() -> dict[str, Any]:
    """Return the rest of the state: tensors that each rank has, and values."""
    return {
        "optimizer": {
            "state": {"rows": {"step": torch.tensor(3.0), "exp_avg": torch.arange(24.0) / 4}},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.75), "params": ["rows"], "fused": None}],
        },
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "nothing": torch.empty(0, 4),
        "list": [torch.arange(3, dtype=torch.uint8), {"deep": torch.ones(2).half()}, "text"],
        "step": 7,
        "name": "run",
    }


def distributed(values: Mapping[str, Tensor], mesh: Any) -> dict[str, Any]:
    """Return tensors as DTensors of this torch on a mesh of two axes."""
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:  # up to torch 2.4
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor

    def placed(name: str) -> list[Any]:
        return [Replicate() if dim is None else Shard(dim) for dim in CUTS[name]]

    return {name: distribute_tensor(value, mesh, placed(name)) for name, value in values.items()}


def save(rank: int, store: str, place: str) -> None:
    """Save the state, on one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"model": distributed(tensors(), mesh), **plain()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{place}/dcp"))
    os.makedirs(f"{place}/ranks", exist_ok=True)
    torch.save(state["model"], f"{place}/ranks/model_world_size_{RANKS}_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    release = torch.__version__.partition("+")[0]
    with making(f"torch-{release}") as place, tempfile.TemporaryDirectory() as beside:
        arguments = (f"{beside}/store", place)
        torch.multiprocessing.spawn(save, arguments, nprocs=RANKS)
