"""Sequences of several lengths, packed: all first steps, then all second steps, and so on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..redistribute import redistribute_local
from ..tensor.wrapper import Wrapper
from .engine.table import decomposition

aten = torch.ops.aten


@decomposition(aten._pack_padded_sequence.default)
def pack_padded_sequence(
    padded: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the packed steps, as sharded as other dims are, and the sizes of the batches.

    Those stay a plain tensor: what takes them reads their values in C++, where a DTensor has none.
    """
    if isinstance(lengths, Wrapper):
        spec = lengths.spec
        if spec.box is None:
            return NotImplemented
        lengths = redistribute_local(lengths.local, spec, spec.replicated())
    numbers = torch.arange(padded.shape[0] * padded.shape[1]).view(*padded.shape[:2], 1)
    order, sizes = aten._pack_padded_sequence(numbers, lengths, batch_first)
    return padded.flatten(0, 1).index_select(0, order.squeeze(-1).to(padded.device)), sizes
