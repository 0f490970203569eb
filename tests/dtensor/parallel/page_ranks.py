"""One of the ranks on which examples of torch's documentation run with our imports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from dtckpt.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtckpt.dtensor.experimental import local_map, register_sharding
from tests.processes import join_group, leave_group

aten = torch.ops.aten


def check_local_map() -> None:
    """The mesh is an argument without an entry; what comes out may still be on its way."""
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def mm_allreduce_forward(device_mesh: Any, W: Tensor, X: Tensor) -> Tensor:
        partial_sum_tensor = torch.mm(W, X)
        reduced_tensor = funcol.all_reduce(partial_sum_tensor, "sum", device_mesh)
        return reduced_tensor  # noqa: RET504

    torch.manual_seed(0)
    W = torch.randn(12, 8, requires_grad=False)
    X = torch.randn(8, 16, requires_grad=False)
    Y = torch.mm(W, X)
    row_wise = [Shard(0)]
    col_wise = [Shard(1)]
    local_mm_allreduce_forward = local_map(
        mm_allreduce_forward,
        out_placements=[Replicate()],
        in_placements=[col_wise, row_wise],
        device_mesh=device_mesh,
    )
    W_dt = distribute_tensor(W, device_mesh, (col_wise))
    X_dt = distribute_tensor(X, device_mesh, (row_wise))
    Y_dt = local_mm_allreduce_forward(device_mesh, W_dt, X_dt)
    assert type(Y_dt.to_local()) is Tensor
    torch.testing.assert_close(Y_dt.to_local(), Y)
    assert torch.equal(Y_dt.sum().full_tensor(), Y_dt.to_local().sum())


def check_register_sharding() -> None:
    @register_sharding(aten._softmax.default)
    def custom_softmax_sharding(x: Any, dim: int, half_to_float: bool) -> Any:
        softmax_dim = dim if dim >= 0 else dim + x.ndim
        acceptable_shardings = []

        all_replicate = ([Replicate()], [Replicate(), None, None])
        acceptable_shardings.append(all_replicate)

        for sharding_dim in range(x.ndim):
            if sharding_dim != softmax_dim:
                all_sharded = (
                    [Shard(sharding_dim)],
                    [Shard(sharding_dim), None, None],
                )
                acceptable_shardings.append(all_sharded)

        return acceptable_shardings

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for dim in (0, 1):
        found: Any = torch.softmax(distribute_tensor(x, mesh, [Shard(0)]), dim)
        assert found.placements == (Shard(1 - dim),)
        torch.testing.assert_close(found.full_tensor(), torch.softmax(x, dim))


def main() -> None:
    """Run the examples on this rank."""
    join_group()
    check_local_map()
    check_register_sharding()
    leave_group()


if __name__ == "__main__":
    main()
