"""torch's own meshes, placements and layouts, translated from and to ours.

Torch hides the order in which several mesh axes cut one tensor dim: in a private placement
``_StridedShard(dim, split_factor)`` or in a field ``shard_order`` of its spec. Here both become the
explicit ``Shard(dim, order)``. A split factor that is no order of cuts says that the dim has so
many parts, each of which is sharded by itself, as transformers does with fused weights: ``Packed``.
Public attributes are read where they exist; private ones only through ``getattr``, so that a torch
without them still works for everything else.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.tensor import placement_types as torch_placements

from dtckpt.errors import PlacementError

from ..geometry.layout import Layout
from ..geometry.mesh import Mesh
from ..geometry.placement import (
    Packed,
    Partial,
    Placement,
    Replicate,
    Shard,
    SplitPlacement,
    format_placements,
)
from ..torch_private import spec_of_torch, strided_shard
from .torch_mesh import mesh_from_torch

_STRIDED = strided_shard()

TRANSLATE = (
    "make them of one kind: from_torch(tensor) is dtckpt's, to_torch(tensor) torch's, and either "
    "shares the memory"
)
"""What to do where DTensors of both kinds meet."""

AnyPlacement = Placement | torch_placements.Placement
"""A placement of ours or of torch."""


def is_placement(value: object) -> bool:
    """Whether a value is a placement, ours or torch's."""
    return isinstance(value, Placement | torch_placements.Placement)


def placements_from_torch(
    placements: Iterable[AnyPlacement], mesh_shape: Sequence[int], tensor_ndim: int
) -> tuple[Placement, ...]:
    """Return placements of ours for torch's, one per mesh axis; ours pass through.

    ``mesh_shape`` and ``tensor_ndim`` are needed to decode the shard order that torch hides in a
    split factor. Raises PlacementError for torch's internal placements that have no global
    meaning (masked and norm partials), and for split factors that are no order: what they say
    depends on the size of the dim (``layout_from_torch``).

    >>> placements_from_torch((torch_tensor.Replicate(), Shard(0)), (2, 2), 1)
    (Replicate(), Shard(dim=0, order=None))
    """
    return _decoded(placements, mesh_shape, tensor_ndim)


def _decoded(
    placements: Iterable[AnyPlacement],
    mesh_shape: Sequence[int],
    ndim: int,
    *,
    shape: Sequence[int] | None = None,
    factors_are_orders: bool = True,
) -> tuple[Placement, ...]:
    """Return placements of ours; parts of a dim take their sizes from the ``shape`` of a tensor."""
    found = tuple(placements)
    if all(isinstance(p, Placement) for p in found):
        return cast("tuple[Placement, ...]", found)
    decoded = [_one_from_torch(p, ndim) for p in found]
    for dim in {p.dim for p in decoded if isinstance(p, Shard)}:
        axes = [a for a, p in enumerate(decoded) if isinstance(p, Shard) and p.dim == dim]
        if all(split_factor(found[axis]) is None for axis in axes):
            continue
        if any(getattr(found[axis], "order", None) is not None for axis in axes):
            raise PlacementError(
                f"{found} says the order of cuts of dim {dim} twice, by an order and by "
                "torch's split factors; use Shard(dim, order) for all axes that cut it"
            )
        order = _cutting_order(found, axes, mesh_shape) if factors_are_orders else None
        if order is None:
            decoded[axes[0]] = _packed(found, axes, dim, shape)
            continue
        for position, axis in enumerate(order):
            decoded[axis] = Shard(dim, position)
    return tuple(decoded)


def _packed(
    placements: Sequence[AnyPlacement], axes: Sequence[int], dim: int, shape: Sequence[int] | None
) -> Packed:
    """Return what a split factor says that is no order of cuts, on the first axis that cuts a dim.

    Axes after it cut what it leaves to a rank, as torch reads placements: from left to right.
    """
    first, *others = (split_factor(placements[axis]) for axis in axes)
    if first is None or others.count(None) < len(others):
        raise PlacementError(
            f"{tuple(placements)}: the split factors of dim {dim} are no order of cuts, and not "
            "the first axis alone has one. Where the elements are cannot be told: torch's "
            "fully_shard cuts from right to left there, and all other code of torch reads it from "
            "left to right. Let the axes cut different dims (shard_placement_fn of fully_shard)"
        )
    if shape is None:
        raise PlacementError(
            f"{placements[axes[0]]!r} on axis {axes[0]} is no order of cuts: no axes to its right "
            f"make {first} pieces. It says that dim {dim} has {first} parts of which each is "
            f"sharded by itself, which is Packed({dim}, sizes) here: state their sizes"
        )
    return Packed(dim, Shard(dim).sizes_over(shape[dim], first))


def _one_from_torch(placement: AnyPlacement, tensor_ndim: int) -> Placement:
    if isinstance(placement, Placement):
        return placement
    # Of classes derived from torch's nobody knows what they say.
    if type(placement) is torch_tensor.Shard or split_factor(placement) is not None:
        dim = int(getattr(placement, "dim", 0))
        return Shard(dim % tensor_ndim if -tensor_ndim <= dim < 0 else dim)
    if type(placement) is torch_tensor.Replicate:
        return Replicate()
    if type(placement) is torch_tensor.Partial:
        return Partial(placement.reduce_op)
    if not is_placement(placement):
        raise PlacementError(
            f"expected a placement, as Shard(0) or Replicate(), got {placement!r} of type "
            f"{type(placement).__name__}"
        )
    raise PlacementError(
        f"the placement {placement!r} of {type(placement).__module__}."
        f"{type(placement).__qualname__} does not say what a rank holds; redistribute the tensor "
        "to Shard or Replicate first, or derive the class from dtckpt's SplitPlacement"
    )


def split_factor(placement: AnyPlacement) -> int | None:
    """Return the factor by which torch hides an order of cuts, or blocks dealt out in turn."""
    if isinstance(placement, Placement | torch_tensor.Shard):
        return None
    factor = getattr(placement, "split_factor", None)
    return None if factor is None else int(factor)


def _cutting_order(
    placements: Sequence[AnyPlacement], axes: Sequence[int], mesh_shape: Sequence[int]
) -> list[int] | None:
    """Return axes in the order in which they cut a dim; None where factors tell no order."""
    # An axis of split factor n cuts the pieces of axes to its right that make n pieces together.
    order: list[int] = []
    for axis in reversed(axes):
        factor = split_factor(placements[axis]) or 1
        for position in range(len(order) + 1):
            if math.prod(mesh_shape[a] for a in order[:position]) == factor:
                order.insert(position, axis)
                break
        else:
            return None
    return order


_layouts: weakref.WeakKeyDictionary[Any, dict[Any, Layout]] = weakref.WeakKeyDictionary()
"""Layouts by torch mesh, placements, shape and order: a state has few, for very many tensors."""
_MAX_LAYOUTS = 4096


def layout_from_torch(tensor: torch_tensor.DTensor) -> Layout:
    """Return the layout of a torch DTensor; PlacementError where it is none of ours."""
    spec = spec_of_torch(tensor)
    order = getattr(spec, "shard_order", None) or ()
    as_order = getattr(spec, "use_strided_shard_as_shard_order", None)
    known = _layouts.setdefault(tensor.device_mesh, {})
    kinds = tuple(map(type, tensor.placements))  # a derived class may equal its base
    key = (tensor.placements, kinds, tuple(tensor.shape), order, as_order)
    layout = known.get(key)
    if layout is None:
        mesh = mesh_from_torch(tensor.device_mesh)
        layout = layout_of_spec(mesh, tensor.placements, tuple(tensor.shape), spec)
        if len(known) < _MAX_LAYOUTS:
            known[key] = layout
    return layout


def layout_of_spec(
    mesh: Mesh, given: Sequence[AnyPlacement], shape: tuple[int, ...], spec: Any
) -> Layout:
    """Return the layout that torch's placements say, read as its ``spec`` tells how.

    ``spec`` is a DTensorSpec of torch, or has those attributes of one that there are. Raises
    PlacementError where it is no layout of ours.
    """
    # Views of torch make split factors that are no order of cuts, and say so.
    factors_are_orders = getattr(spec, "use_strided_shard_as_shard_order", None) is not False
    placements = list(
        _decoded(given, mesh.shape, len(shape), shape=shape, factors_are_orders=factors_are_orders)
    )
    for entry in getattr(spec, "shard_order", None) or ():
        axes = entry.mesh_dims
        if any(isinstance(placements[axis], Packed) for axis in axes):
            if list(axes) != sorted(axes):
                raise PlacementError(
                    f"torch tensor of shape {shape} with placements {tuple(given)} has both "
                    f"split factors and an order of cuts, {entry}; redistribute it to Shard first"
                )
            continue
        for order, axis in enumerate(axes):
            placements[axis] = Shard(entry.tensor_dim, order)
    return Layout(mesh, tuple(placements), shape)


def placements_to_torch(layout: Layout) -> tuple[torch_placements.Placement, ...]:
    """Return torch's placements of a layout, a shard order as torch's split factors.

    Raises PlacementError for what torch cannot express: a ``Packed`` of parts that are not even,
    and all else that splits a dim and is no ``Shard``.
    """
    return tuple(_one_to_torch(layout, axis) for axis in range(layout.mesh.ndim))


def _one_to_torch(layout: Layout, axis: int) -> torch_placements.Placement:
    placement = layout.placements[axis]
    if isinstance(placement, Shard):
        earlier = [split.axis for split in layout.splits[placement.dim]]
        earlier = earlier[: earlier.index(axis)]
        factor = math.prod(layout.mesh.shape[a] for a in earlier if a > axis)
        if factor == 1:
            return torch_tensor.Shard(placement.dim)
        if _STRIDED is None:
            raise PlacementError(
                f"this torch ({torch.__version__}) has no placement for the shard order of "
                f"({format_placements(layout.placements)}); redistribute to the default order first"
            )
        return _STRIDED(placement.dim, split_factor=factor)
    if isinstance(placement, Packed) and _STRIDED is not None:
        count = len(placement.sizes)
        even = Shard(placement.dim).sizes_over(layout.shape[placement.dim], count)
        is_first = all(split.axis >= axis for split in layout.splits[placement.dim])
        if count > 1 and placement.sizes == even and is_first:
            return _STRIDED(placement.dim, split_factor=count)
    if isinstance(placement, SplitPlacement):
        raise PlacementError(
            f"torch has no {type(placement).__name__.lower()} placement: "
            f"({format_placements(layout.placements)}) of shape {layout.shape}; redistribute to "
            f"Shard({placement.dim}) first"
        )
    if isinstance(placement, Partial):
        return torch_tensor.Partial(placement.reduce_op)
    return torch_tensor.Replicate()
