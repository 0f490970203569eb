"""How ranks share a training: one cell of the matrix is a kind of parallelism on some ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.nn.parallel import DistributedDataParallel

import dtckpt.dtensor.fsdp as our_fsdp
import dtckpt.dtensor.parallel as our_parallel
from dtckpt.dtensor import DeviceMesh, DTensor, Ragged

from .matrix_model import EXPERTS, UNITS, Model, make_model


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind on some ranks, with the sizes of its axes."""

    kind: str
    sizes: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def world(self) -> int:
        return int(torch.tensor(self.sizes).prod())

    def __str__(self) -> str:
        named = zip(self.axes, self.sizes, strict=True)
        return f"{self.kind} {' '.join(f'{axis}{size}' for axis, size in named)}"


WHOLE = "DTCKPT_WHOLE_MATRIX" in os.environ
"""Whether every cell is loaded into every other, which takes minutes."""


def _cells() -> list[Cell]:
    sizes: dict[tuple[str, tuple[str, ...]], list[tuple[int, ...]]] = {
        ("single", ("dp",)): [(1,)],
        ("DDP", ("dp",)): [(3,), (8,)],
        ("FSDP2", ("dp",)): [(2,), (3,)],
        ("TP", ("tp",)): [(4,)],
        ("EP", ("ep",)): [(3,), (4,)],
        ("HSDP", ("rep", "dp")): [(2, 2)],
        ("FSDP2 x TP", ("dp", "tp")): [(2, 2)],
        ("PP", ("pp", "dp")): [(2, 1), (4, 2)],
        ("own", ("dp", "tp")): [(1, 3), (2, 2)],
        ("own", ("rep", "dp", "tp")): [(2, 2, 2)],
    }
    if WHOLE:
        for kind, axis in [("DDP", "dp"), ("FSDP2", "dp"), ("TP", "tp"), ("EP", "ep")]:
            sizes[kind, (axis,)] = [(2,), (3,), (4,), (8,)]
        sizes["HSDP", ("rep", "dp")] += [(2, 4)]
        sizes["FSDP2 x TP", ("dp", "tp")] += [(4, 2)]
        sizes["PP", ("pp", "dp")] += [(3, 1), (4, 1)]
        sizes["own", ("dp", "tp")] += [(2, 1)]
    return [Cell(kind, size, axes) for (kind, axes), found in sizes.items() for size in found]


CELLS = _cells()
STAGES: dict[int, list[tuple[str, ...]]] = {
    2: [UNITS[:2], UNITS[2:]],
    3: [UNITS[:1], UNITS[1:3], UNITS[3:]],
    4: [(unit,) for unit in UNITS],
}


def make_mesh(cell: Cell) -> Any:
    """Return the mesh of a cell, with its groups; all ranks of the job call it."""
    ranks = torch.arange(cell.world).view(cell.sizes)
    ours = cell.kind in ("own", "EP")
    if ours:
        return DeviceMesh("cpu", ranks, mesh_dim_names=cell.axes)
    return TorchMesh("cpu", ranks, mesh_dim_names=cell.axes)


def data_axes(cell: Cell) -> dict[str, tuple[str, ...]]:
    """Return the axes along which ranks have other data, as one."""
    found = tuple(axis for axis in cell.axes if axis in ("rep", "dp"))
    return {"dp": found} if found else {}


def data_place(cell: Cell, mesh: Any) -> tuple[int, int]:
    """Return this rank's number among those with other data, and how many there are."""
    index, count = 0, 1
    for axis in data_axes(cell).get("dp", ()):
        size = cell.sizes[cell.axes.index(axis)]
        index, count = index * size + mesh.get_local_rank(axis), count * size
    return index, count


def spread(cell: Cell, mesh: Any, group: Any, seed: int) -> nn.Module:
    """Return this rank's part of the model."""
    if cell.kind == "PP":
        return make_model(seed, STAGES[cell.sizes[0]][mesh.get_local_rank("pp")])
    model = make_model(seed)
    if cell.kind == "DDP":
        return DistributedDataParallel(model, process_group=group)
    if cell.kind == "EP":
        _give_experts(model, mesh, group)
    parallel, fsdp = torch_parallel, torch_fsdp
    if cell.kind == "own":
        parallel, fsdp = our_parallel, our_fsdp
    sizes = dict(zip(cell.axes, cell.sizes, strict=True))
    if sizes.get("tp", 1) > 1:
        plan: Any = {
            "block.up": parallel.ColwiseParallel(),
            "block.down": parallel.RowwiseParallel(),
        }
        over = mesh["tp"] if len(cell.axes) > 1 else mesh
        parallel.parallelize_module(model, over, plan)
    if cell.kind in ("FSDP2", "HSDP", "FSDP2 x TP") or (cell.kind == "own" and sizes["dp"] > 1):
        over = mesh if cell.kind in ("FSDP2", "HSDP") else mesh["dp"]
        if "rep" in sizes and cell.kind == "own":
            over = mesh["rep", "dp"]
        for module in (model.get_submodule("block"), model.get_submodule("mixture"), model):
            fsdp.fully_shard(module, mesh=over)
    return model


def _give_experts(model: Model, mesh: Any, group: Any) -> None:
    """Leave this rank some experts, of which ranks have unequal numbers, perhaps none."""
    count, rank = mesh.size(), mesh.get_local_rank()
    sizes = [EXPERTS // count] * count
    sizes[-1] += EXPERTS - sum(sizes)
    if count == 2:
        sizes = [1, EXPERTS - 1]
    mixture: Any = model.get_submodule("mixture")
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    part = mixture.experts.detach()[mine].clone()
    placed = DTensor.from_local(part, mesh, [Ragged(0, tuple(sizes))], shape=mixture.experts.shape)
    mixture.experts = nn.Parameter(placed)
    mixture.mine = mine

    def enter(x: Tensor) -> Tensor:
        made: Any = _Enter.apply(x, group)
        return made

    def leave(x: Tensor) -> Tensor:
        made: Any = _Leave.apply(x, group)
        return made

    mixture.enter, mixture.leave = enter, leave


class _Enter(torch.autograd.Function):
    """The same for all ranks, each of which has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """The sum of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
