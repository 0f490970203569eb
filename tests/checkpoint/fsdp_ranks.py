"""Four ranks train with FSDP2 inside of tensor parallel, save, and load on other meshes.

Run by test_fsdp, one process per rank. Every comparison is of full tensors, on every rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor import placement_types
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import from_torch
from dtckpt.errors import LayoutMismatch, Unsavable

from ..dtensor.job_ranks import PublicOnly
from ..processes import join_group, leave_group
from .crossing import check_crossings
from .dcp.dcp_ranks import check_dcp

Full = dict[str, torch.Tensor]
Strided: Any = getattr(placement_types, "_StridedShard", None)  # private


class Model(nn.Module):
    """Two linear layers whose tensor-parallel halves FSDP cannot divide evenly, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(10, 14)
        self.down = nn.Linear(14, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 10] -> [batch, 7]."""
        return self.norm(self.down(torch.relu(self.up(x))))


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Column then row parallel."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model


def full(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank."""
    return value.full_tensor() if isinstance(value, TorchDTensor) else value


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Full:
    """All parameters, buffers and optimizer state, whole."""
    found = {f"model/{n}": full(t).clone() for n, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        entry = optimizer.state[param]
        found |= {f"optim/state/model/{name}/{k}": full(v).clone() for k, v in entry.items()}
    return found


def check_same(given: Full, expected: Full, what: str) -> None:
    """Raise unless all tensors are equal bit for bit."""
    if given.keys() != expected.keys():
        raise AssertionError(f"{what}: {given.keys() ^ expected.keys()}")
    for name, tensor in expected.items():
        if not torch.equal(given[name], tensor):
            raise AssertionError(f"{what}: {name} differs")


def loaded(model: Model, path: str, group: Any = None) -> tuple[Full, dcp.LoadReport]:
    """Load into a fresh model and a fresh optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    state = {"model": model, "optim": optimizer, "step": 0}
    report = dcp.load(state, path, process_group=group)
    if state["step"] != 3 or optimizer.param_groups[0]["lr"] != 0.1:
        raise AssertionError(f"values were not restored: {state['step']}")
    return contents(model, optimizer), report


def train_and_save(path: str) -> Full:
    """Train three steps on (dp=2, tp=2), save, and return the whole state."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(Model(1), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
    report = dcp.save({"model": model, "optim": optimizer, "step": 3}, path)
    if report.num_tensors != 7 + 6 * 3:
        raise AssertionError(f"saved {report.num_tensors} tensors")
    check_same(contents(model, optimizer), loaded_again(mesh, path), "same mesh")
    return contents(model, optimizer)


def loaded_again(mesh: DeviceMesh, path: str) -> Full:
    """The state loaded on the mesh that saved it."""
    model = tensor_parallel(Model(2), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    found, report = loaded(model, path)
    if report.resharded:
        raise AssertionError(f"resharded on the same mesh: {report.resharded}")
    return found


def check_other_meshes(path: str, expected: Full, rank: int) -> None:
    """Load on FSDP over four, HSDP, no parallelism, and tensor parallel over two ranks."""
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = Model(3)
    fully_shard(model, mesh=four)
    found, report = loaded(model, path)
    check_same(found, expected, "FSDP over four")
    if "model/down.weight" not in report.resharded:
        raise AssertionError("the report does not tell that tensors were resharded")

    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model(4)
    fully_shard(model, mesh=hybrid)
    check_same(loaded(model, path)[0], expected, "HSDP")

    check_same(loaded(Model(5), path)[0], expected, "plain tensors")

    pair: Any = dist.new_group([0, 1])
    if rank < 2:
        two = DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("tp",))
        found, _ = loaded(tensor_parallel(Model(6), two), path, pair)
        check_same(found, expected, "tensor parallel over two")


def check_own_dtensors(path: str) -> None:
    """Torch's and our DTensors of one tensor are the same to a checkpoint."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = torch.arange(30.0).reshape(10, 3)
    theirs = torch_distribute(whole, mesh, [TorchShard(0)])
    dcp.save({"a": theirs, "b": from_torch(theirs)}, path)
    into = torch_distribute(torch.zeros(10, 3), mesh, [TorchShard(1)])
    ours = from_torch(torch_distribute(torch.zeros(10, 3), mesh, [TorchShard(1)]))
    dcp.load({"a": ours, "b": into}, path)
    if not (torch.equal(into.full_tensor(), whole) and torch.equal(ours.full_tensor(), whole)):
        raise AssertionError("mixed DTensors do not round trip")


def check_public_names(path: str) -> None:
    """A torch without the private attributes that are read would still do."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = torch.arange(30.0).reshape(10, 3)
    dcp.save({"w": PublicOnly(torch_distribute(whole, mesh, [TorchShard(0)]))}, path)
    into = torch_distribute(torch.zeros(10, 3), mesh, [TorchShard(1)])
    dcp.load({"w": PublicOnly(into)}, path)
    if not torch.equal(into.full_tensor(), whole):
        raise AssertionError("by public names another tensor was saved or loaded")


def check_wrong_locals(path: str) -> None:
    """torch lets ragged shards be wrapped as even ones; saving them must not lose data."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    local = torch.ones(mesh.get_local_rank() + 1, 2)
    wrong = TorchDTensor.from_local(
        local, mesh, [TorchShard(0)], shape=torch.Size((10, 2)), stride=(2, 1)
    )
    try:
        dcp.save({"w": wrong}, path)
    except LayoutMismatch as error:
        if "Ragged" not in str(error):
            raise
    else:
        raise AssertionError("a ragged tensor was saved as an even one")


def check_empty_parts(path: str) -> None:
    """Parts that FSDP2 makes empty along more dims than their layout says are saved and loaded."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(6.0).view(3, 2)

    def narrow(values: torch.Tensor) -> Any:
        net = nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            net.weight.copy_(values)
        parallelize_module(net, mesh["tp"], RowwiseParallel())
        fully_shard(net, mesh=mesh["dp"])
        return net.weight

    dcp.save({"w": narrow(whole)}, path)
    if not torch.equal(dcp.open(path)["w"][...], whole):
        raise AssertionError("what was saved with empty parts is not the tensor")
    into = narrow(torch.zeros(3, 2))
    dcp.load({"w": into}, path)
    if not torch.equal(from_torch(into).full_tensor(), whole):
        raise AssertionError("what was loaded into empty parts is not the tensor")


def check_blocks_in_turn(path: str) -> None:
    """A view of torch deals out blocks in turn, and its chunk list names other elements.

    Fused weights of transformers lie so, too. They are saved as they are, by nothing sent.
    """
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = torch.arange(32.0).view(4, 8)
    blocks = torch_distribute(whole, mesh, [TorchShard(1)]).view(32)
    plain = torch_distribute(whole.view(32), mesh, [TorchShard(0)])
    with TorchCommDebugMode() as sent:
        dcp.save({"w": blocks}, path)
    assert sent.get_total_counts() == 0
    dcp.save({"w": plain}, f"{path}-plain")
    for source in (path, f"{path}-plain"):
        for like in (blocks, plain, whole.view(32)):
            into = torch.zeros_like(like)
            dcp.load({"w": into}, source)
            assert _local(into).equal(_local(like))
    both = TorchDTensor.from_local(
        torch.zeros(8),
        init_device_mesh("cpu", (2, 2)),
        [Strided(0, split_factor=2), Strided(0, split_factor=2)],
        run_check=False,
        shape=torch.Size([32]),
        stride=(1,),
    )
    try:
        dcp.save({"w": both}, f"{path}-both")
    except Unsavable as error:
        if "shard_placement_fn" not in str(error):
            raise
    else:
        raise AssertionError("an order that nobody can tell was taken for one")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, TorchDTensor) else tensor


def check_announced_boxes(path: str) -> None:
    """Hooks on the local tensor of a DTensor of torch count before its placements."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = torch.arange(24.0).view(8, 3)
    start = 6 - 2 * mesh.get_local_rank()  # the order of the ranks is turned

    def turned(values: torch.Tensor) -> TorchDTensor:
        local = values[start : start + 2].clone()
        made = TorchDTensor.from_local(
            local, mesh, [TorchShard(0)], run_check=False, shape=whole.shape, stride=(3, 1)
        )
        chunk = ChunkStorageMetadata(offsets=torch.Size((start, 0)), sizes=torch.Size((2, 3)))
        made._local_tensor.__create_chunk_list__ = lambda: [chunk]  # pyright: ignore
        return made

    dcp.save({"w": turned(whole)}, path)
    if not torch.equal(dcp.open(path)["w"][...], whole):
        raise AssertionError("what the local tensor announces was not asked for at the save")
    into = turned(torch.zeros(8, 3))
    dcp.load({"w": into}, path)
    if not torch.equal(into.to_local(), whole[start : start + 2]):
        raise AssertionError("what the local tensor announces was not asked for at the load")


def main(folder: str) -> None:
    """Run all checks on this rank."""
    rank = join_group()
    torch.set_num_threads(1)
    expected = train_and_save(f"{folder}/step-3")
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")
    check_other_meshes(f"{folder}/step-3", expected, rank)
    check_own_dtensors(f"{folder}/mixed")
    check_public_names(f"{folder}/public")
    check_wrong_locals(f"{folder}/wrong")
    check_empty_parts(f"{folder}/empty")
    check_blocks_in_turn(f"{folder}/blocks")
    check_announced_boxes(f"{folder}/announced")
    check_crossings(f"{folder}/crossings")
    check_dcp(f"{folder}/dcp")
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
