"""The model whose parameters are optimized, in each form of parallelism, and its gradients.

Nothing is computed forward: gradients are drawn by the name of the parameter and the number of the
step, so that they are the same on every mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dtckpt.dtensor as ours

PARALLELISMS = ("single", "ddp", "fsdp2", "tp", "own")
UNUSED = "unused"
"""A parameter that never has a gradient, and so no state."""


class Model(nn.Module):
    """A convolution, and tied, frozen, 0-dim, bfloat16, unused and very short parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 3)
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.low = nn.Linear(4, 5).bfloat16()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5) + seed)
        self.short = nn.Parameter(torch.randn(2, 3))  # of which ranks have nothing
        self.unused = nn.Parameter(torch.randn(4))
        self.wide = nn.Parameter(torch.randn(64, 256))  # which low-bit optimizers quantize


@dataclass(frozen=True, slots=True)
class Place:
    """A form of parallelism on some ranks."""

    parallelism: str
    size: int
    group: Any
    mesh: DeviceMesh | None
    own_mesh: Any

    @classmethod
    def of(cls, parallelism: str, size: int, group: dist.ProcessGroup) -> Place:
        """Return it on the first ``size`` ranks, whose process group is given; they alone call."""
        mesh = own = None
        if parallelism in ("fsdp2", "tp"):
            mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(size)))
        if parallelism == "own":
            own = ours.DeviceMesh.from_group(group, "cpu", mesh=list(range(size)))
        return cls(parallelism, size, group, mesh, own)

    def model(self, seed: int) -> nn.Module:
        """Return the model, spread over the ranks."""
        model = Model(seed)
        if self.parallelism == "ddp":
            return DistributedDataParallel(model, process_group=self.group)
        if self.parallelism == "fsdp2":
            ignored = {model.scale}  # fully_shard takes no parameters of 0 dims
            for part in (model.conv, model.low):
                fully_shard(part, mesh=self.mesh)
            return cast(nn.Module, fully_shard(model, mesh=self.mesh, ignored_params=ignored))
        if self.parallelism == "tp":
            _distribute(model, self._torch_tensor)
        if self.parallelism == "own":
            _distribute(model, self._own_tensor)
        return model

    def _torch_tensor(self, name: str, value: torch.Tensor) -> Any:
        placement = Replicate() if name in _WHOLE else Shard(_CUT.get(name, 0))
        return distribute_tensor(value, self.mesh, [placement], src_data_rank=None)

    def _own_tensor(self, name: str, value: torch.Tensor) -> Any:
        placement = ours.Replicate() if name in _WHOLE else ours.Shard(_CUT.get(name, 0))
        return ours.distribute_tensor(value, self.own_mesh, [placement], src_data_rank=None)


_WHOLE = ("scale", "low.bias", "frozen.bias")
_CUT = {"low.weight": 1, "wide": 1}


def _distribute(model: nn.Module, distribute: Callable[[str, torch.Tensor], Any]) -> None:
    """Put distributed parameters in the place of all; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, param in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}" if path else key
            if id(param) not in made:
                value = distribute(name, param.detach())
                made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            setattr(module, key, made[id(param)])


def plain_name(name: str) -> str:
    """Return the name of a parameter without what DDP puts before it."""
    return name.removeprefix("module.")


def set_gradients(model: nn.Module, seed: int, *, is_sparse: bool = False) -> None:
    """Give every parameter that is trained the gradient of a step."""
    for name, param in model.named_parameters():
        name = plain_name(name)
        param.grad = None
        if not param.requires_grad or name == UNUSED:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
        whole = torch.randn(tuple(param.shape), generator=generator).to(param.dtype)
        if is_sparse and not name.endswith("embedding.weight"):
            continue
        if is_sparse:
            rows = torch.arange(seed % 2, len(whole), 2)
            param.grad = torch.sparse_coo_tensor(rows[None], whole[rows], whole.shape)
        else:
            param.grad = like(whole, param)


def like(whole: torch.Tensor, beside: Any, placements: Sequence[Any] | None = None) -> Any:
    """Return a whole tensor laid out as another one lies, or otherwise on its mesh."""
    if isinstance(beside, DTensor):
        placements = placements or beside.placements
        if all(placement.is_replicate() for placement in placements):  # in its order in memory
            return DTensor.from_local(whole, beside.device_mesh, placements, run_check=False)
        return distribute_tensor(whole, beside.device_mesh, placements, src_data_rank=None)
    if isinstance(beside, ours.DTensor):
        placements = placements or beside.placements
        return ours.distribute_tensor(whole, beside.device_mesh, placements, src_data_rank=None)
    return whole
