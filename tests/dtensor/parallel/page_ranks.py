"""One of the ranks on which examples of torch's documentation run with our imports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.device_mesh as torch_device_mesh
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

from dtckpt.dtensor import (
    DTensor,
    PlacementError,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.device_mesh import init_device_mesh
from dtckpt.dtensor.experimental import context_parallel, local_map, register_sharding
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
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


def check_comm_debug_mode() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mod = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
    comm_mode = CommDebugMode()
    with comm_mode:
        mod.sum().backward()
    assert comm_mode.get_comm_counts() == {}, "nothing asked for the value of the sum"
    with comm_mode:
        print(mod.sum().item())
    assert comm_mode.get_total_counts() == 1


def check_creation() -> None:
    """The ways to make a DTensor, with the mesh of a context and its default placements."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with mesh:
        assert distribute_tensor(torch.ones(3)).placements == (Replicate(),)
        assert DTensor.from_local(torch.ones(3)).placements == (Replicate(),)
    rows = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=True)
    assert rows.shape == (2 * dist.get_world_size(), 3)
    with mesh:
        made = [
            zeros(4, 3),
            ones((4, 3)),
            empty([4, 3]),
            full((4, 3), 2.0),
            rand(4, 3),
            randn(4, 3),
        ]
    assert all(tensor.shape == (4, 3) for tensor in made)
    parameters: Any = distribute_module(nn.Linear(3, 2), mesh).parameters()
    assert all(p.placements == (Replicate(),) for p in parameters)


def check_parallelize_module() -> None:
    """As in the documentation of the parallel styles: a block by columns, then by rows."""
    tp_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    m = nn.Sequential()
    m.w1, m.w2 = nn.Linear(6, 5), nn.Linear(5, 6)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    m = parallelize_module(m, tp_mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    parameters: Any = m.parameters()
    whole = [p.full_tensor() for p in parameters]
    found = m(x)
    expected = F.linear(F.linear(x, *whole[:2]), *whole[2:])
    torch.testing.assert_close(found, expected)


def check_loss_parallel() -> None:
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    input = torch.randn(4, 15, requires_grad=True, generator=torch.Generator().manual_seed(0))
    dist_input: Any = distribute_tensor(input.detach(), device_mesh, placements=[Shard(1)])
    dist_input.requires_grad_()
    target = torch.arange(4)
    with loss_parallel():
        loss = F.cross_entropy(dist_input, target, reduction="mean")
        loss.backward()
    F.cross_entropy(input, target).backward()
    torch.testing.assert_close(dist_input.grad.full_tensor(), input.grad)


def check_context_parallel() -> None:
    """A model trains on parts of the sequence, on a mesh of torch and on ours."""
    batch = [torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def model(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = F.linear(x, weight).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def train(inputs: Tensor, labels: Tensor, reduce: Callable[[Tensor], Any]) -> Tensor:
        weight = torch.arange(192.0).view(24, 8).sin().requires_grad_()
        for _ in range(3):
            loss = (model(inputs, weight) - labels).square().sum()
            (grad,) = torch.autograd.grad(loss, weight)
            reduce(grad)
            weight.data -= 0.01 * grad
        return weight.detach()

    def keep(grad: Tensor) -> Tensor:
        return grad

    alone = train(batch[0], batch[1], keep)
    for cp_mesh in (
        torch_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)),
        init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))["cp"],
    ):
        inputs, labels = (tensor.clone() for tensor in batch)
        with context_parallel(
            cp_mesh,
            buffers=[inputs, labels],
            buffer_seq_dims=[1, 1],
            no_restore_buffers={labels},
        ):
            assert inputs.shape[1] == 16 // dist.get_world_size()
            found = train(inputs, labels, dist.all_reduce)
        torch.testing.assert_close(found, alone)
        assert torch.equal(inputs, batch[0])
        assert labels.shape[1] == 16 // dist.get_world_size()


def check_torchs_styles_on_our_mesh_and_ours_on_torchs() -> None:
    """Whole plans of either go onto meshes of either; styles of both in one plan are refused."""
    size = dist.get_world_size()
    our_mesh = init_device_mesh("cpu", (size,))
    their_mesh = torch_device_mesh.init_device_mesh("cpu", (size,))
    theirs: Any = {"0": torch_parallel.ColwiseParallel(), "2": torch_parallel.RowwiseParallel()}
    ours: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), torch.randn(3, 6)
    expected = model(x).detach()
    for treat, plan, kind in (
        (torch_parallel.parallelize_module, theirs, torch_tensor.DTensor),
        (parallelize_module, ours, DTensor),
    ):
        for mesh in (our_mesh, their_mesh):
            made: Any = treat(copy.deepcopy(model), mesh, plan)  # pyright: ignore[reportArgumentType]
            assert all(isinstance(p.data, kind) for p in made.parameters())
            torch.testing.assert_close(made(x).detach(), expected)
    mixed: Any = [theirs, {**ours, "2": theirs["2"]}]
    for plan in mixed:
        with pytest.raises(PlacementError, match="expected a ParallelStyle of dtckpt"):
            parallelize_module(copy.deepcopy(model), our_mesh, plan)
    parallel = torch_parallel.parallelize_module(copy.deepcopy(model), their_mesh, theirs)
    with pytest.raises(PlacementError, match=r"'0.weight' takes a plain tensor, got DTensor of t"):
        parallelize_module(parallel, our_mesh, ours)
    with pytest.raises(PlacementError, match=r"fully_shard of '0.weight' .* with from_torch"):
        fully_shard(parallel, mesh=our_mesh)
    with pytest.raises(TypeError, match="found!"):
        torch_parallel.parallelize_module(copy.deepcopy(model), their_mesh, ours)


def main() -> None:
    """Run the examples on this rank."""
    join_group()
    for check in EXAMPLES:
        check()
    leave_group()


EXAMPLES = (
    check_local_map,
    check_register_sharding,
    check_comm_debug_mode,
    check_creation,
    check_parallelize_module,
    check_loss_parallel,
    check_context_parallel,
    check_torchs_styles_on_our_mesh_and_ours_on_torchs,
)


if __name__ == "__main__":
    main()
