"""Norms of many tensors at once: one packed reduction per process group, whatever they lie on.

Clipping gradients needs the norm of every one of them. Each rank takes those of its parts; their
powers travel together and in double precision, so that nothing but the parts is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.caches import Cache
from ..comm.collectives import Peers
from ..comm.reductions import all_reduce
from ..geometry.placement import Placement, Replicate, Shard
from ..mesh.modes import require_order_free
from ..mesh.spec import DTensorSpec, spec_of
from ..tensor.wrapper import Wrapper, new_wrapper
from ..torch_private import called
from .engine.dtypes import is_low
from .engine.primitives import Move, move
from .engine.table import across_meshes

aten = torch.ops.aten

_norm_of_each = called(aten._foreach_norm.Scalar)

MAX_PLANS = 64
"""Plans remembered per mesh; each is as long as its list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormPlan:
    """How the norms of a list are taken: what follows from its specs and dtypes."""

    moves: tuple[Move, ...]
    missing: tuple[int, ...]
    """Tensors that have elements, but none here."""
    kinds: tuple[tuple[torch.dtype | None, tuple[int, ...]], ...]
    """By the dtype that their norms are computed in, as it is told to torch: indices."""
    groups: tuple[tuple[Peers, tuple[int, ...]], ...]
    """By process group: what is cut along it, as positions in ``waiting``."""
    waiting: tuple[int, ...]
    """Tensors whose norms do not follow from this rank's parts alone."""
    dtypes: tuple[torch.dtype, ...]
    outputs: tuple[DTensorSpec | None, ...]


@across_meshes(aten._foreach_norm.Scalar)
def foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of every tensor, replicated on the mesh of that tensor."""
    plan = _plan_of(tensors, dtype)
    locals_ = [t.local if isinstance(t, Wrapper) else t for t in tensors]
    if plan.moves:
        move(locals_, plan.moves)
    for index in plan.missing:  # what is in no part changes no norm
        locals_[index] = locals_[index].new_full((1,), 0.0 if ord >= 0 else math.inf)
    norms = _local_norms(locals_, ord, plan)
    if plan.waiting:
        wide = torch.stack(_chosen(norms, plan.waiting)).to(torch.float64)
        reduced = _reduced(wide, ord, plan).to(norms[plan.waiting[0]].dtype)
        # To memory of their own: wrappers of what begins elsewhere take twice as long to make.
        aten._foreach_copy_(_chosen(norms, plan.waiting), list(reduced.unbind()))
    return _wrapped(tensors, norms, plan)


def _chosen(items: list[Tensor], indices: tuple[int, ...]) -> list[Tensor]:
    return items if len(indices) == len(items) else [items[i] for i in indices]


def _plan_of(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> _NormPlan:
    """Return the plan of a list, made once for lists of the same specs."""
    key = (dtype, *[t.spec if isinstance(t, Wrapper) else t.dtype for t in tensors])
    mesh = next(t.spec.mesh for t in tensors if isinstance(t, Wrapper))
    plans: Cache[Any, _NormPlan] = mesh.cache("list_norms", MAX_PLANS)
    plan = plans.get(key)
    if plan is None:
        plan = _make_plan(tensors, dtype)
        plans.put(key, plan)
    return plan


def _make_plan(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> _NormPlan:
    given = [t.spec if isinstance(t, Wrapper) else None for t in tensors]
    wanted = [spec and _summed(spec) for spec in given]
    pairs = enumerate(zip(given, wanted, strict=True))
    groups = _groups(wanted)
    waiting = sorted({index for _, indices in groups for index in indices})
    positions = {index: position for position, index in enumerate(waiting)}
    dtypes = [(dtype or tensor.dtype).to_real() for tensor in tensors]
    return _NormPlan(
        moves=tuple((i, a, b) for i, (a, b) in pairs if a is not None and b is not None and a != b),
        missing=tuple(i for i, spec in enumerate(wanted) if spec is not None and _is_missing(spec)),
        kinds=_kinds(tensors, dtype),
        groups=tuple((peers, tuple(positions[i] for i in found)) for peers, found in groups),
        waiting=tuple(waiting),
        dtypes=tuple(dtypes),
        outputs=tuple(
            spec and spec_of(spec.mesh, (Replicate(),) * spec.mesh.ndim, (), (), found)
            for spec, found in zip(given, dtypes, strict=True)
        ),
    )


def _summed(spec: DTensorSpec) -> DTensorSpec:
    """Return how a tensor must lie: the norm of a sum does not follow from those of its terms."""
    if not spec.layout.is_partial:
        return spec
    placements: list[Placement] = [Replicate() if p.is_partial() else p for p in spec.placements]
    if spec.ndim:
        cuts = [split.axis for split in spec.layout.splits[0] if split.starts is None]
        terms = [axis for axis, p in enumerate(spec.placements) if p.is_partial()]
        for order, axis in enumerate([*cuts, *terms]):  # the last cuts need no other axis to move
            placements[axis] = Shard(0, order)
    return spec.with_placements(placements)


def _is_missing(spec: DTensorSpec) -> bool:
    return math.prod(spec.local_shape) == 0 < spec.shape.numel()


def _kinds(
    tensors: Sequence[Tensor], dtype: torch.dtype | None
) -> tuple[tuple[torch.dtype | None, tuple[int, ...]], ...]:
    """Return which norms are computed in which dtype: half precision in single precision."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(dtype or tensor.dtype, []).append(index)
    return tuple(
        (torch.float32 if is_low(wanted) else dtype, tuple(found))
        for wanted, found in by_dtype.items()
    )


def _local_norms(locals_: list[Tensor], ord: float, plan: _NormPlan) -> list[Tensor]:
    """Return the norms of local tensors."""
    norms: list[Tensor] = list(locals_)
    for computed, indices in plan.kinds:
        found = _norm_of_each(_chosen(locals_, indices), ord, computed)
        if len(plan.kinds) == 1:
            return list(found)
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


def _reduced(norms: Tensor, ord: float, plan: _NormPlan) -> Tensor:
    """Return the norms of the tensors from those of their parts on all ranks."""
    has_root = not math.isinf(ord) and ord not in (0, 1)
    values = norms.pow(ord) if has_root else norms
    for peers, positions in plan.groups:
        if len(positions) == len(plan.waiting):
            values = _combined(values, ord, peers)
        else:
            chosen = list(positions)
            values[chosen] = _combined(values[chosen], ord, peers)
    return values.pow(1 / ord) if has_root else values


def _combined(values: Tensor, ord: float, peers: Peers) -> Tensor:
    if not math.isinf(ord):
        require_order_free(values.dtype, "sum")
        return all_reduce(values, "sum", peers)
    if ord < 0:
        return all_reduce(values, "min", peers)
    # Numbers that are not negative lie in the order of their bits, and not-a-number above them:
    # one reduction instead of one for the numbers and one for what are none.
    bits = torch.where(values.isnan(), math.nan, values).view(torch.int64)
    return all_reduce(bits, "max", peers).view(torch.float64)


def _wrapped(tensors: Sequence[Tensor], norms: list[Tensor], plan: _NormPlan) -> list[Tensor]:
    made: list[Tensor] = []
    for tensor, norm, dtype, spec in zip(tensors, norms, plan.dtypes, plan.outputs, strict=True):
        if norm.dtype != dtype:
            norm = norm.to(dtype)
        if isinstance(tensor, Wrapper) and spec is not None:
            here = norm if spec.box is not None else norm.new_empty(0)
            norm = new_wrapper(tensor.ordinary, here, spec, False)
        made.append(norm)
    return made
