"""``scaled_dot_product_attention`` within ``context_parallel``: of whatever it is called for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from ..mesh.same_mesh import code_of
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
    """Those that sequences may have, of which no two have as many positions on a rank; any where
    there are none."""
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
        settings = f"{is_causal=} {scale=} {enable_gqa=} {self.method}"
        of_query, of_key, of_value = self._whole_shapes(four, settings)
        require_alike(of_query, of_key, of_value, grouped=enable_gqa)
        if len({tensor.dtype for tensor in four}) > 1:
            raise PlacementError(
                f"{WHO}: query, key and value have the dtypes {[t.dtype for t in four]}; make them "
                "one"
            )
        sequences = sequences_of(
            self.mesh,
            self.placement,
            self.mesh.size(),
            (of_query[2], of_key[2]),
            is_causal=is_causal,
        )
        several = self.mesh.size() > 1
        peers = self.mesh.peers((0,)) if several else None
        rotation = None if peers is None else Rotation(sequences, peers, self.method)
        factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
        made = ring_attention(query4, key4, value4, Job(sequences, rotation, factor))
        return made.reshape(*query.shape[:-1], value.shape[-1]) if query.ndim != 4 else made

    def _whole_shapes(self, tensors: Sequence[Tensor], settings: str) -> list[tuple[int, ...]]:
        """Return the shapes of what the ranks share, of which each has its positions.

        The ranks tell each other what they have: those whose messages had other sizes than others
        expect would read what nobody wrote. A GPU would have to be waited for; there each rank
        goes by its own part of the buffers, if there are any.
        """
        own = [tensor.shape[2] for tensor in tensors]
        if self.lengths and self.mesh.device.type != "cpu":
            here = self.mesh.get_local_rank()
            lengths = [self._length({here: size}) for size in own]
        else:
            rest = [(*t.shape[:2], t.shape[3], t.dtype) for t in tensors]
            told = f"{rest} {settings}, buffers of lengths {list(self.lengths)}"
            rows = gather_rows([*own, code_of(told)], self.mesh)
            *parts, codes = zip(*rows.values(), strict=True)
            if len(set(codes)) > 1:
                raise PlacementError(
                    f"{WHO}: the ranks differ in batch, heads, dim, dtype, settings or buffers; "
                    f"this rank has {told}; call it alike on all"
                )
            lengths = [self._length(dict(enumerate(sizes))) for sizes in parts]
        return [(*t.shape[:2], n, t.shape[3]) for t, n in zip(tensors, lengths, strict=True)]

    def _length(self, parts: Mapping[int, int]) -> int:
        """Return the length of a sequence of which ranks have so many positions."""
        count = self.mesh.size()
        lengths = self.lengths or (sum(parts.values()),)
        expected = {length: self.placement.sizes_over(length, count) for length in lengths}
        for length, sizes in expected.items():
            if all(sizes[rank] == size for rank, size in parts.items()):
                return length
        who = "the ranks have" if len(parts) == count else f"rank {next(iter(parts))} has"
        wanted = (f"{[sizes[rank] for rank in parts]} of {n}" for n, sizes in expected.items())
        cut = f"cut the sequence by {type(self.placement).__name__}, as buffers are"
        buffers = (
            "give context_parallel every tensor with the sequence as a buffer, and attend over "
            "another sequence outside of it"
        )
        raise PlacementError(
            f"{WHO}: {who} {list(parts.values())} positions, expected {' or '.join(wanted)}; "
            f"{buffers if self.lengths else cut}"
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
