"""The choice of an attention kernel, which must be the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .table import decomposition

aten = torch.ops.aten

_MATH = 0


@decomposition(aten._fused_sdp_choice.default)
def fused_sdp_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> int:
    """Return what torch would choose for plain tensors of the global shapes.

    With dropout it is the definition, whose random numbers do not depend on the mesh.
    """
    if dropout_p > 0:
        return _MATH
    tensors = [None if t is None else _of_shape(t) for t in (query, key, value, attn_mask)]
    return aten._fused_sdp_choice(*tensors, dropout_p, is_causal, **options)


def _of_shape(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the same shape and dtype that has next to no memory."""
    last = tensor.shape[-1] if tensor.ndim else 1
    row = torch.empty(last, dtype=tensor.dtype, device=tensor.device)
    made = row.view(*(1,) * (tensor.ndim - 1), last) if tensor.ndim else row.view(())
    return made.expand(tensor.shape).requires_grad_(tensor.requires_grad)
