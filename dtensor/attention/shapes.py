"""Shapes and dtypes of query, key and value, and how ranks divide the work of such lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.caches import Cache
from ..geometry.placement import SplitPlacement
from ..mesh.device_mesh import DeviceMesh
from ..mesh.modes import is_autocasting
from .blocks import Sequences

MAX_SEQUENCES = 64
"""Divisions of work that a mesh remembers."""

T = TypeVar("T", bound=Tensor)

WHO = "scaled_dot_product_attention over a shared sequence"


def require_alike(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, grouped: bool
) -> None:
    """Raise PlacementError unless shapes of (batch, heads, sequence, dim) go together."""
    fits = key[:3] == value[:3] and query[0] == key[0] and query[3] == key[3]
    heads = query[1] == key[1] or (grouped and bool(key[1]) and query[1] % key[1] == 0)
    if not fits or not heads:
        rest = "" if heads else "; with enable_gqa=True query heads may be a multiple of key heads"
        raise PlacementError(
            f"{WHO}: query {tuple(query)}, key {tuple(key)} and value {tuple(value)} do not go "
            f"together, as (batch, heads, sequence, dim){rest}"
        )


def sequences_of(
    mesh: DeviceMesh,
    placement: SplitPlacement,
    count: int,
    sizes: tuple[int, int],
    *,
    is_causal: bool,
) -> Sequences:
    """Return the division of work for so many queries and keys that ``count`` ranks share."""
    kept: Cache[Any, Sequences] = mesh.cache("sequences", MAX_SEQUENCES)
    key = (placement, count, sizes, is_causal)
    found = kept.get(key)
    if found is None:
        queries, keys = (placement.ranges_over(size, count) for size in sizes)
        found = Sequences(queries, keys, is_causal)
        kept.put(key, found)
    return found


def under_autocast(*tensors: T) -> list[T]:
    """Return tensors in the dtype in which torch's function would compute here."""
    kind = tensors[0].device.type
    if not is_autocasting(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    casts = [t.is_floating_point() and t.dtype != torch.float64 for t in tensors]
    return [t.to(dtype) if cast else t for t, cast in zip(tensors, casts, strict=True)]  # pyright: ignore[reportReturnType]
