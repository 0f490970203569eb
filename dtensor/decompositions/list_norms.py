"""Norms of many tensors at once: one packed reduction per process group, whatever they lie on.

Clipping gradients needs the norm of every one of them. Each rank takes those of its parts; their
powers travel together and in double precision, so that nothing but the parts is rounded.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import Peers, all_reduce
from ..placement import Placement, Replicate, Shard
from ..redistribute import redistribute_local
from ..spec import DTensorSpec, spec_of
from ..wrapper import Wrapper
from .table import unbound

aten = torch.ops.aten


@unbound(aten._foreach_norm.Scalar)
def foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of every tensor, replicated on the mesh of that tensor."""
    parts = [_part(tensor, ord) for tensor in tensors]
    norms = _local_norms([local for local, _ in parts], ord, dtype)
    groups = _groups([spec for _, spec in parts])
    waiting = sorted({index for _, indices in groups for index in indices})
    if waiting:
        wide = torch.stack([norms[i] for i in waiting]).to(torch.float64)
        reduced = _reduced(wide, ord, groups, waiting).to(norms[waiting[0]].dtype)
        for index, norm in zip(waiting, reduced.unbind(), strict=True):
            norms[index] = norm
    found = zip(tensors, norms, strict=True)
    return [_wrapped(tensor, norm, _result_dtype(tensor, dtype)) for tensor, norm in found]


def _part(tensor: Tensor, ord: float) -> tuple[Tensor, DTensorSpec | None]:
    """Return what this rank takes the norm of, and how that lies where it is distributed."""
    if not isinstance(tensor, Wrapper):
        return tensor, None
    local, spec = tensor._local_tensor, tensor._spec
    if spec.layout.is_partial:  # the norm of a sum does not follow from those of its terms
        reduced = Shard(0) if spec.ndim else Replicate()
        placements: list[Placement] = [reduced if p.is_partial() else p for p in spec.placements]
        target = spec.with_placements(placements)
        local, spec = redistribute_local(local, spec, target), target
    if local.numel() == 0 and tensor.numel() > 0:  # what is in no part changes no norm
        local = local.new_full((1,), 0.0 if ord >= 0 else math.inf)
    return local, spec


def _local_norms(locals_: list[Tensor], ord: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms of local tensors, those of half precision in single precision."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, local in enumerate(locals_):
        by_dtype.setdefault(dtype or local.dtype, []).append(index)
    norms: list[Tensor] = list(locals_)
    for wanted, indices in by_dtype.items():
        low = wanted.is_floating_point and wanted.itemsize < 4
        computed = torch.float32 if low else dtype
        found = aten._foreach_norm.Scalar([locals_[i] for i in indices], ord, computed)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm
    return norms


def _groups(specs: list[DTensorSpec | None]) -> list[tuple[Peers, list[int]]]:
    """Return which tensors are cut along which process groups, in an order alike on all ranks."""
    found: dict[int, tuple[Peers, list[int]]] = {}
    for index, spec in enumerate(specs):
        if spec is None or spec.box is None:
            continue
        for axis, placement in enumerate(spec.placements):
            if not placement.is_replicate() and spec.mesh.shape[axis] > 1:
                peers = spec.mesh.peers((axis,))
                found.setdefault(id(peers.group), (peers, []))[1].append(index)
    return list(found.values())


def _reduced(
    norms: Tensor, ord: float, groups: list[tuple[Peers, list[int]]], waiting: list[int]
) -> Tensor:
    """Return the norms of the tensors from those of their parts on all ranks."""
    positions = {index: position for position, index in enumerate(waiting)}
    has_root = not math.isinf(ord) and ord not in (0, 1)
    values = norms.pow(ord) if has_root else norms
    for peers, indices in groups:
        chosen = [positions[index] for index in indices]
        values[chosen] = _combined(values[chosen], ord, peers)
    return values.pow(1 / ord) if has_root else values


def _combined(values: Tensor, ord: float, peers: Peers) -> Tensor:
    if not math.isinf(ord):
        return all_reduce(values, "sum", peers)
    if ord < 0:
        return all_reduce(values, "min", peers)
    # Numbers that are not negative lie in the order of their bits, and not-a-number above them:
    # one reduction instead of one for the numbers and one for what are none.
    bits = torch.where(values.isnan(), math.nan, values).view(torch.int64)
    return all_reduce(bits, "max", peers).view(torch.float64)


def _result_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    found = dtype or tensor.dtype
    return found.to_real() if found.is_complex else found


def _wrapped(tensor: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    norm = norm.to(dtype)
    if not isinstance(tensor, Wrapper):
        return norm
    mesh = tensor._spec.mesh
    spec = spec_of(mesh, (Replicate(),) * mesh.ndim, (), (), dtype)
    return type(tensor)(norm if spec.box is not None else norm.new_empty(0), spec)
