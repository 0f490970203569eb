"""Two ranks that shard modules without naming a mesh. Run by test_all_ranks, one process per rank.

The default group is made by ``fully_shard``.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtckpt.dtensor import DeviceMesh, PlacementError, init_device_mesh
from dtckpt.dtensor.fsdp import fully_shard

from ...processes import join_group, leave_group


def trained(model: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def main() -> None:
    """Compare with a model that is not sharded."""
    rank = join_group()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()
    model: Any = copy.deepcopy(whole)
    batch = torch.randn(4, 4, dtype=torch.float64)
    for layer in model:
        fully_shard(layer)
    with init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]:
        fully_shard(model)  # an active mesh is not asked
    meshes: set[DeviceMesh] = {p.device_mesh for p in model.parameters()}
    mesh = meshes.pop()
    assert not meshes
    assert mesh.shape == (2,)
    assert mesh.device_type == "cpu"
    assert mesh.get_group() is dist.group.WORLD
    for _ in range(2):
        trained(whole, batch)
        trained(model, batch.chunk(2)[rank])
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.data, msg=name)

    with pytest.raises(PlacementError, match="do not implement forward"):  # before a mesh is made
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))

    old: Any = dist.group.WORLD
    dist.destroy_process_group()
    join_group(name="again")
    assert dist.group.WORLD is not old
    again: Any = fully_shard(nn.Linear(2, 2))
    assert again.weight.device_mesh.get_group() is dist.group.WORLD
    again(torch.ones(1, 2)).sum().backward()
    leave_group()


if __name__ == "__main__":
    sys.exit(main())
