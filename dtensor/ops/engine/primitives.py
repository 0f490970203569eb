"""What decompositions are made of: where a tensor is cut, replicas of it, work on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from ...geometry.placement import Placement, Replicate, Shard, SplitPlacement
from ...mesh.spec import DTensorSpec, replicated_spec, spec_of
from ...redistribute import redistribute_locals
from ...tensor.autograd import placed
from ...tensor.views.irregular import regular_local
from ...tensor.wrapper import Wrapper, require_part
from .table import Decomposition

Move = tuple[int, DTensorSpec, DTensorSpec]
"""Which tensor of a list is redistributed, how it lies, and how it is to lie."""


def move(locals_: list[Tensor], moves: Sequence[Move]) -> None:
    """Redistribute some local tensors together, each in its place in the list."""
    moved = redistribute_locals(
        [locals_[index] for index, _, _ in moves], [(source, to) for _, source, to in moves]
    )
    for (index, _, _), local in zip(moves, moved, strict=True):
        locals_[index] = local


def cut_axes(tensor: Tensor, dims: Iterable[int]) -> tuple[int, ...]:
    """Return the axes of the mesh that split one of ``dims``."""
    wanted = set(dims)
    if not isinstance(tensor, Wrapper):
        return ()
    return tuple(
        axis
        for axis, p in enumerate(tensor.spec.placements)
        if isinstance(p, SplitPlacement) and p.dim in wanted
    )


def ascending(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a tensor whose ranks hold neighbouring indices of ``dims``, the same if they do."""
    if not isinstance(tensor, Wrapper) or not any(tensor.spec.layout.orders[d] for d in dims):
        return tensor
    placements = tuple(
        Shard(p.dim) if isinstance(p, SplitPlacement) and p.dim in dims else p
        for p in tensor.spec.placements
    )
    return placed(tensor, placements)


def is_cut(tensor: Tensor, dims: Sequence[int]) -> bool:
    """Whether parts along ``dims`` have to be combined; of nothing there are no extremes."""
    return bool(cut_axes(tensor, dims)) and all(tensor.shape[d] for d in dims)


def has_terms(tensor: Tensor) -> bool:
    """Whether some axis holds terms that are still to be reduced."""
    return isinstance(tensor, Wrapper) and tensor.spec.layout.is_partial


def all_distributed(*args: Any) -> list[Any]:
    """Return arguments with the plain tensors among them, the same on all ranks, as replicas.

    They share memory with those: what is written to them is written to the plain tensors.
    """
    first = next(arg for arg in args if isinstance(arg, Wrapper))
    mesh, cls = first.spec.mesh, first.ordinary
    return [
        cls(arg, replicated_spec(mesh, arg))
        if isinstance(arg, Tensor) and not isinstance(arg, Wrapper)
        else arg
        for arg in args
    ]


def with_replicas(run: Decomposition) -> Decomposition:
    """Return a decomposition that gets plain tensors as replicas.

    That of a gradient needs it: torch's formulas make plain those that are constant (``copysign``).
    """

    @wraps(run)
    def distributed(*args: Any, **kwargs: Any) -> Any:
        return run(*all_distributed(*args), **kwargs)

    return distributed


def reduced(tensor: Tensor) -> Wrapper:
    """Return the tensor with every Partial axis reduced to replicas."""
    own = cast(Wrapper, tensor)
    target = own.spec.reduced()
    return own if target is own.spec else placed(own, target.placements)


def reduced_sum(tensor: Tensor, dims: Sequence[int]) -> Wrapper:
    """Return the sum over some dims, which are kept, on all ranks that have terms of it."""
    return reduced(tensor.sum(tuple(dims), keepdim=True))


def replicated(tensor: Tensor, axes: Iterable[int]) -> Wrapper:
    """Return the tensor with replicas along some axes."""
    own = cast(Wrapper, tensor)
    placements = list(own.spec.placements)
    for axis in axes:
        placements[axis] = Replicate()
    same = tuple(placements) == own.spec.placements
    return own if same else placed(own, tuple(placements))


def reduced_spec(
    source: Wrapper,
    dims: Sequence[int],
    on_cut: Placement,
    *,
    keepdim: bool,
    dtype: torch.dtype,
    lead: int | None = None,
) -> DTensorSpec:
    """Return the spec of what is left of ``source`` without ``dims``.

    Axes that cut one of the dims get ``on_cut``. ``lead`` is the size of a dim put in front.
    """
    own = source.spec
    offset = 0 if lead is None else 1
    left = [d for d in range(own.ndim) if keepdim or d not in dims]
    position = {d: offset + i for i, d in enumerate(left)}
    placements: list[Placement] = []
    for p in own.placements:
        if isinstance(p, SplitPlacement):
            placements.append(on_cut if p.dim in dims else replace(p, dim=position[p.dim]))
        else:
            placements.append(p)
    shape = [1 if d in dims else own.shape[d] for d in left]
    return spec_of(own.mesh, placements, shape if lead is None else [lead, *shape], None, dtype)


def on_locals(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], outputs: Sequence[DTensorSpec]
) -> list[Wrapper]:
    """Return what ``run`` makes of the local tensors, which have the local shapes of ``outputs``.

    A rank outside of the mesh runs nothing.
    """
    first = cast(Wrapper, inputs[0])
    if first.spec.box is None:
        made: Sequence[Tensor] = [torch.empty(0, dtype=out.dtype) for out in outputs]
    else:
        made = run(*[regular_local(t) for t in inputs])
    for local, out in zip(made, outputs, strict=True):
        require_part(getattr(run, "__qualname__", run), local, out)
    cls = first.ordinary
    return [cls(local, out) for local, out in zip(made, outputs, strict=True)]
