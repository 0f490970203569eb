"""Attention of DTensors whose sequence is sharded along an axis of their mesh."""

from __future__ import annotations

import math
from typing import cast

import torch.nn.functional as F

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import SplitPlacement
from ..mesh.spec import DTensorSpec
from ..tensor.compilers import opaque
from ..tensor.local_parts import kind_of
from ..tensor.wrapper import Wrapper
from .blocks import Sequences
from .ring_attention import Job, ring_attention
from .rotation import RotateMethod, Rotation, rotate_method_of
from .shapes import require_alike, sequences_of, under_autocast

_BATCH, _HEADS, _SEQUENCE, _DIM = range(4)


@opaque
def context_parallel_attention(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    rotate_method: RotateMethod | None = None,
) -> DTensor:
    """Return the attention of ``query`` to ``key``, as ``scaled_dot_product_attention``.

    All are (batch, heads, sequence, dim) and lie alike: one axis of the mesh shards the sequence by
    ``HeadTail``, under which causal attention is the same work on every rank, by ``Shard``, or
    anyhow; others may shard batch and heads, and replicate. Lengths need not divide, and may differ
    between query and key. The result lies as the query.

    Keys and values go round among the ranks of the axis, each of which computes what its queries
    see of them, and nothing that is masked whole [1]_. They go as ``rotate_method`` says, by
    default as ``set_rotate_method``: with "ring" and "alltoall" a rank holds its own, those that it
    computes with, and those that come next, with "allgather" those of all. For the backward pass
    only the local parts, the result and a number for each query are kept; keys and values go round
    again, their gradients with them, in fp32 or wider.

    ``scale`` is 1 / sqrt(dim) by default; with ``enable_gqa`` there may be several query heads for
    a key head. ``is_causal`` counts positions from the beginning of both sequences.

    Raises PlacementError, on all ranks, before anything is sent, for what is no DTensor, for shapes
    and placements that do not go together, and on ranks outside of the mesh; ValueError for an
    unknown ``rotate_method``. Second derivatives are errors.

    >>> import torch
    >>> from dtckpt.dtensor import HeadTail, distribute_tensor, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    >>> q, k, v = (distribute_tensor(torch.ones(1, 2, 6, 8), mesh, [HeadTail(2)]) for _ in "qkv")
    >>> context_parallel_attention(q, k, v, is_causal=True).placements
    (HeadTail(dim=2),)

    .. [1] Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023.
    """
    method = rotate_method_of(rotate_method)
    query, key, value = under_autocast(query, key, value)
    specs = specs_alike(query, key, value)
    of_query, of_key, of_value = specs
    require_alike(of_query.shape, of_key.shape, of_value.shape, grouped=enable_gqa)
    axis = _axis_of_sequence(specs)
    factor = 1 / math.sqrt(max(query.shape[_DIM], 1)) if scale is None else scale
    parts = query.to_local(), key.to_local(), value.to_local()
    if query.is_meta:  # planned alone: nothing is sent, and no key seen
        made = F.scaled_dot_product_attention(*parts, enable_gqa=enable_gqa)
    else:
        made = ring_attention(*parts, _job(specs, axis, is_causal, factor, method))
    shape = (*of_query.shape[:_DIM], of_value.shape[_DIM])
    return DTensor.from_local(made, of_query.mesh, of_query.placements, shape=shape)


def specs_alike(
    query: DTensor, key: DTensor, value: DTensor
) -> tuple[DTensorSpec, DTensorSpec, DTensorSpec]:
    """Return how query, key and value lie; PlacementError where not alike."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Wrapper):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError(
                f"context_parallel_attention: the {name} is {kind_of(tensor)}, expected a DTensor "
                "with its sequence sharded; within context_parallel plain tensors go to "
                "scaled_dot_product_attention"
            )
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise PlacementError(
                f"context_parallel_attention: the {name} is {tensor.spec}, expected floating point "
                "of (batch, heads, sequence, dim)"
            )
    specs = (query.spec, key.spec, value.spec)
    first = specs[0]
    for name, spec in zip(named, specs, strict=True):
        if not spec.mesh.same_ranks_as(first.mesh) or spec.dtype != first.dtype:
            raise PlacementError(
                f"context_parallel_attention: the {name} is {spec} on {spec.mesh.layout_mesh}, the "
                f"query {first} on {first.mesh.layout_mesh}; bring them to one mesh and dtype"
            )
        is_cut = any(p.is_shard(_DIM) or p.is_partial() for p in spec.placements)
        if spec.placements != first.placements or is_cut:
            raise PlacementError(
                f"context_parallel_attention: the {name} is {spec}, the query {first}; they must "
                "lie alike, and be neither Partial nor sharded along their last dim; redistribute "
                "them first"
            )
    if first.mesh.get_coordinate() is None:
        raise PlacementError(
            f"context_parallel_attention: rank {first.mesh.get_rank()} is not in mesh "
            f"{first.mesh.layout_mesh}; call it on ranks of the mesh only"
        )
    _require_whole_groups(specs)
    return specs


def _require_whole_groups(specs: tuple[DTensorSpec, ...]) -> None:
    """Raise PlacementError where some rank has query heads without their key head."""
    query, key = specs[0].layout, specs[1].layout
    if not query.splits[_HEADS]:
        return
    group = query.shape[_HEADS] // max(key.shape[_HEADS], 1)
    if group > 1 and query.orders[_HEADS] is not None:
        raise PlacementError(
            f"context_parallel_attention: {specs[0]} gives ranks heads that are no neighbours, "
            "whose key heads they may lack; shard grouped heads by Shard or Ragged"
        )
    for piece in range(query.grid[_HEADS]):
        start, size = query.interval(_HEADS, piece)
        start_of_keys, num_keys = key.interval(_HEADS, piece)
        if size != group * num_keys or (size and start != group * start_of_keys):
            raise PlacementError(
                f"context_parallel_attention: of {query.shape[_HEADS]} query heads and "
                f"{key.shape[_HEADS]} key heads some rank would have {size} and {num_keys}; shard "
                f"the query heads in groups of {group}, as with Ragged, or replicate the heads"
            )


def _axis_of_sequence(specs: tuple[DTensorSpec, ...]) -> int | None:
    """Return the axis that shards the sequence; None where none does."""
    axes = [axis for axis, p in enumerate(specs[0].placements) if p.is_shard(_SEQUENCE)]
    if len(axes) > 1:
        raise PlacementError(
            f"context_parallel_attention: axes {axes} shard the sequence of {specs[0]}; let one of "
            "them, or flatten them to one axis of a mesh"
        )
    return axes[0] if axes else None


def _job(
    specs: tuple[DTensorSpec, ...],
    axis: int | None,
    is_causal: bool,
    scale: float,
    method: RotateMethod,
) -> Job:
    query, key = specs[0], specs[1]
    sizes = query.shape[_SEQUENCE], key.shape[_SEQUENCE]
    if axis is None:
        queries, keys = ((((0, size),),) for size in sizes)
        return Job(Sequences(queries, keys, is_causal), None, scale)
    placement = cast(SplitPlacement, query.placements[axis])
    count = query.mesh.shape[axis]
    sequences = sequences_of(query.mesh, placement, count, sizes, is_causal=is_causal)
    rotation = Rotation(sequences, query.mesh.peers((axis,)), method) if count > 1 else None
    return Job(sequences, rotation, scale)
