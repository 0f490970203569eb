"""Four ranks with torch's own DTensors beside ours. Run by test_interop, one process per rank."""

# pyright: reportPrivateImportUsage=false
# torch does not mark what its checkpoint package exports.

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtckpt.dtensor import (
    DeviceMesh,
    Replicate,
    Shard,
    distribute_tensor,
    from_torch,
    init_device_mesh,
    layout_from_torch,
    to_torch,
)

from ..processes import join_group, leave_group


def main(folder: str) -> None:
    """Run all checks on this rank."""
    join_group()
    torch_mesh = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Linear(3, 11, bias=False)
    whole = torch.arange(33.0).view(11, 3)
    with torch.no_grad():
        net.weight.copy_(whole)
    parallelize_module(net, torch_mesh["tp"], ColwiseParallel())
    fully_shard(net, mesh=torch_mesh["dp"])
    weight: Any = net.weight
    assert layout_from_torch(weight).placements == (Shard(0, 1), Shard(0, 0))
    ours = from_torch(weight)
    assert torch.equal(ours.full_tensor(), whole)
    assert to_torch(ours).placements == weight.placements
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reversed_mesh = DeviceMesh("cpu", [[3, 1], [2, 0]])
    for other in (mesh, reversed_mesh, mesh["tp", "dp"]):
        moved = distribute_tensor(whole, other, [Shard(0), Shard(1)])
        assert torch.equal(moved.redistribute(placements=[Shard(1), Shard(0)]).full_tensor(), whole)
        assert moved.sum().item() == whole.sum().item()
    torch_checkpoint.save({"w": ours.detach(), "m": moved}, checkpoint_id=f"{folder}/saved")
    target = {"w": distribute_tensor(torch.zeros(11, 3), mesh, [Replicate(), Shard(1)])}
    torch_checkpoint.load(target, checkpoint_id=f"{folder}/saved")
    assert torch.equal(target["w"].full_tensor(), whole)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
