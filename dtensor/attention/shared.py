"""``scaled_dot_product_attention`` within ``context_parallel``: of whatever it is called for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from torch import Tensor

from dtckpt.errors import PlacementError, UnsupportedOp

from ..dtensor import DTensor
from ..geometry.placement import SplitPlacement
from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_rows
from ..tensor.wrapper import Wrapper
from .function import context_parallel_attention, specs_alike
from .ring_attention import Job, ring_attention
from .rotation import RotateMethod, Rotation
from .shapes import WHO, require_alike, sequences_of, under_autocast

TORCHS: Any = F.scaled_dot_product_attention
"""Torch's own, whatever stands under its name later."""


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """A sequence that the ranks of a mesh of one axis share, and attention over it."""

    mesh: DeviceMesh
    placement: SplitPlacement
    """Of the sequence, whatever its dim is."""
    lengths: tuple[int, ...]
    """Those that sequences may have, of which no two have as many positions on a rank; where there
    are none, the ranks tell each other what they have."""
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
        """Return what torch's function of these arguments returns for this rank's positions.

        Of plain tensors; of DTensors on other meshes, by their local tensors; of DTensors with
        their sequence sharded along this mesh. Those that know the whole sequence go to torch's.
        """
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if any(isinstance(t, torch_tensor.DTensor) for t in (query, key, value)):
            raise PlacementError(
                f"{WHO} does not know how DTensors of torch lie; pass their to_local(), or "
                "translate them with from_torch"
            )
        tensors = under_autocast(query, key, value)
        if not any(isinstance(tensor, Wrapper) for tensor in tensors):
            _require_possible(attn_mask, dropout_p)
            return self._of_local(*tensors, **options)
        given: Any = tensors
        has_axis = self._is_part_of(next(t.spec.mesh for t in given if isinstance(t, Wrapper)))
        is_cut = any(t.spec.layout.splits[-2] for t in given if isinstance(t, Wrapper))
        if has_axis and not is_cut:  # all ranks of the sequence have the whole of it
            return TORCHS(*tensors, attn_mask, dropout_p, **options)
        _require_possible(attn_mask, dropout_p)
        if has_axis:
            return context_parallel_attention(*given, **options, rotate_method=self.method)
        if is_cut:
            raise PlacementError(
                f"{WHO}: a DTensor on another mesh has its sequence sharded there, which is a part "
                "of one already; shard other dims"
            )
        specs = specs_alike(*given)
        local = self._of_local(*(tensor.to_local() for tensor in given), **options)
        shape = (*specs[0].shape[:3], specs[2].shape[3])
        return DTensor.from_local(local, specs[0].mesh, specs[0].placements, shape=shape)

    def _is_part_of(self, mesh: DeviceMesh) -> bool:
        """Whether some axes of a mesh have all ranks that share the sequence."""
        return set(mesh.layout_mesh.all_ranks()).issuperset(self.mesh.layout_mesh.all_ranks())

    def _of_local(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """Return the attention of plain tensors to those of all ranks."""
        four = [_of_four_dims(tensor) for tensor in (query, key, value)]
        query4, key4, value4 = four
        require_alike(query4.shape, key4.shape, value4.shape, grouped=enable_gqa)
        if len({tensor.dtype for tensor in four}) > 1:
            raise PlacementError(
                f"{WHO}: query, key and value have the dtypes {[t.dtype for t in four]}; make them "
                "one"
            )
        sizes = self._lengths_of(query4.shape[2], key4.shape[2])
        sequences = sequences_of(
            self.mesh, self.placement, self.mesh.size(), sizes, is_causal=is_causal
        )
        several = self.mesh.size() > 1
        peers = self.mesh.peers((0,)) if several else None
        rotation = None if peers is None else Rotation(sequences, peers, self.method)
        factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
        made = ring_attention(query4, key4, value4, Job(sequences, rotation, factor))
        return made.reshape(*query.shape[:-1], value.shape[-1]) if query.ndim != 4 else made

    def _lengths_of(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the lengths of sequences of which this rank has so many positions."""
        if self.lengths:
            return self._known_length(queries), self._known_length(keys)
        rows = gather_rows([queries, keys], self.mesh).values()
        totals: list[int] = []
        for parts in zip(*rows, strict=True):
            expected = self.placement.sizes_over(sum(parts), len(parts))
            if tuple(parts) != expected:
                raise PlacementError(
                    f"{WHO}: the ranks have {list(parts)} of {sum(parts)} positions, expected "
                    f"{list(expected)}; cut the sequence by {type(self.placement).__name__}, as "
                    "the buffers of context_parallel are"
                )
            totals.append(sum(parts))
        return totals[0], totals[1]

    def _known_length(self, own: int) -> int:
        count, here = self.mesh.size(), self.mesh.get_local_rank()
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


def _require_possible(attn_mask: object, dropout_p: float) -> None:
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
