"""``scaled_dot_product_attention`` of plain tensors: each rank has a part of the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dtckpt.errors import PlacementError, UnsupportedOp

from ..comm.caches import Cache
from ..geometry.placement import SplitPlacement
from ..mesh.device_mesh import DeviceMesh
from .blocks import Sequences
from .ring_attention import Job, ring_attention
from .rotation import RotateMethod, Rotation

MAX_SEQUENCES = 64
"""Divisions of work that a mesh remembers."""

WHO = "scaled_dot_product_attention over a shared sequence"


def require_possible(attn_mask: object, dropout_p: float) -> None:
    """Raise UnsupportedOp for what cannot be done without the whole sequence."""
    if attn_mask is not None:
        raise UnsupportedOp(
            f"{WHO} takes no attn_mask, of which every rank would need the columns of all others; "
            "pass is_causal=True for a causal mask. For another one, call it on DTensors, which "
            "gathers keys and values"
        )
    if dropout_p:
        raise UnsupportedOp(
            f"{WHO} has no dropout, got dropout_p={dropout_p}: no rank has the scores of a whole "
            "row. Apply dropout to the result, or pass dropout_p=0.0"
        )


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


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """A sequence that the ranks of a mesh of one axis share, and attention over it."""

    mesh: DeviceMesh
    placement: SplitPlacement
    """Of the sequence, whatever its dim is."""
    lengths: tuple[int, ...]
    """Those that sequences may have, of which no two have as many positions on a rank; where there
    are none, every rank has as many positions."""
    method: RotateMethod

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return what torch's function of these arguments returns for this rank's positions."""
        require_possible(attn_mask, dropout_p)
        four = [_of_four_dims(tensor) for tensor in (query, key, value)]
        query4, key4, value4 = four
        require_alike(query4.shape, key4.shape, value4.shape, grouped=enable_gqa)
        if len({tensor.dtype for tensor in four}) > 1:
            raise PlacementError(
                f"{WHO}: query, key and value have the dtypes {[t.dtype for t in four]}; make them "
                "one"
            )
        sizes = self._length_of(query4.shape[2]), self._length_of(key4.shape[2])
        sequences = sequences_of(
            self.mesh, self.placement, self.mesh.size(), sizes, is_causal=is_causal
        )
        several = self.mesh.size() > 1
        peers = self.mesh.peers((0,)) if several else None
        rotation = None if peers is None else Rotation(sequences, peers, self.method)
        factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
        made = ring_attention(query4, key4, value4, Job(sequences, rotation, factor))
        return made.reshape(*query.shape[:-1], value.shape[-1]) if query.ndim != 4 else made

    def _length_of(self, own: int) -> int:
        """Return the length of the sequence of which this rank has so many positions."""
        count, here = self.mesh.size(), self.mesh.get_local_rank()
        if not self.lengths:
            return own * count
        for length in self.lengths:
            if self.placement.sizes_over(length, count)[here] == own:
                return length
        expected = [self.placement.sizes_over(length, count)[here] for length in self.lengths]
        raise PlacementError(
            f"{WHO}: rank {here} of {count} got {own} positions, expected {expected}, its parts of "
            f"the buffers' {list(self.lengths)}; give context_parallel every tensor with the "
            "sequence as a buffer, and attend over another sequence outside of it"
        )


def _of_four_dims(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim < 2:
        raise PlacementError(
            f"{WHO} takes (..., sequence, dim), got a tensor of shape {tuple(tensor.shape)}"
        )
    return tensor.flatten(0, -4) if tensor.ndim > 4 else tensor[(None,) * (4 - tensor.ndim)]
