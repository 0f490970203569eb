"""``input_reshard``: replicated activations are kept sharded between forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtckpt.errors import PlacementError

from ..dtensor import AnyMesh, DTensor
from ..geometry.placement import Placement, Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.plain_tensors import may_be_plain
from ..mesh.resolving import resolve_mesh

__all__ = ["input_reshard"]


def input_reshard(
    module: nn.Module, tp_device_mesh: AnyMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Keep replicated tensors that ``module`` saves for its backward pass sharded until then.

    Each rank keeps its part along ``input_reshard_dim``, and the backward pass gathers the whole.
    Replicated are DTensors on ``tp_device_mesh`` that are, and plain tensors that the ranks find to
    be the same, by one fingerprint of each. Parameters, which stay in memory, are left as they are.
    None as the dim changes nothing. Returns ``module``.

    Raises PlacementError for a mesh of several dims.
    """
    mesh = resolve_mesh(tp_device_mesh)
    if mesh.ndim != 1:
        raise PlacementError(f"input_reshard: expected a mesh of one dim, got {mesh.layout_mesh}")
    if input_reshard_dim is None:
        return module
    dim = input_reshard_dim
    entered: list[saved_tensors_hooks] = []

    def before(*_: Any) -> None:
        hooks = saved_tensors_hooks(lambda tensor: _pack(tensor, mesh, dim), _unpack)
        hooks.__enter__()
        entered.append(hooks)

    def after(*_: Any) -> None:
        if entered:  # a hook before ours may have failed
            entered.pop().__exit__()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return module


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of a saved tensor."""

    tensor: DTensor
    is_plain: bool
    """Whether the whole was a plain tensor."""


def _pack(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor | _Part:
    if not -tensor.ndim <= dim < tensor.ndim or isinstance(tensor, nn.Parameter):
        return tensor
    where: list[Placement] = [Shard(dim)]
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            spec = tensor.spec
            if not spec.mesh.same_ranks_as(mesh) or spec.placements != (Replicate(),):
                return tensor
            return _Part(tensor.redistribute(placements=where), is_plain=False)
        if tensor.numel() < mesh.size() or not may_be_plain(tensor, mesh):
            return tensor
        whole = DTensor.from_local(tensor, mesh, [Replicate()])
        return _Part(whole.redistribute(placements=where), is_plain=True)


def _unpack(kept: Tensor | _Part) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.tensor.full_tensor() if kept.is_plain else kept.tensor.redistribute()
