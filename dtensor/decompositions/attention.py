"""The choice of an attention kernel, which must be the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import decomposition

aten = torch.ops.aten

_MATH = 0

_PADDING = 1
"""The type of masks that are one row for each sequence; others broadcast to the scores."""


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


@decomposition(aten._native_multi_head_attention.default)
def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what ``MultiheadAttention`` returns in eval mode, without gathering its weights."""
    inputs = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    heads = [
        F.linear(x, w, b).unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)
        for x, w, b in inputs
    ]
    scores = heads[0] @ heads[1].transpose(-2, -1) / math.sqrt(embed_dim // num_head)
    if mask is not None:
        is_padding = mask_type == _PADDING
        hidden = mask.bool()[:, None, None, :] if is_padding else mask.bool()
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    made = F.linear((weights @ heads[2]).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return made, None
    return made, weights.mean(1) if average_attn_weights else weights


@decomposition(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer_fwd(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> Tensor:
    """Return what ``TransformerEncoderLayer`` returns in eval mode."""
    norms, (up, up_bias, down, down_bias), masks = (rest[:2], rest[2:4]), rest[4:8], rest[8:]
    mask, mask_type = (*masks, None, None)[:2]

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *weights, mask, False, mask_type=mask_type
        )[0]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, up, up_bias)
        return F.linear(F.gelu(hidden) if use_gelu else hidden.relu(), down, down_bias)

    for run, (weight, bias) in zip((attend, feed), norms, strict=True):
        shape = [embed_dim]
        if norm_first:
            src = src + run(F.layer_norm(src, shape, weight, bias, eps))
        else:
            src = F.layer_norm(src + run(src), shape, weight, bias, eps)
    return src


@decomposition(aten._nested_tensor_from_mask_left_aligned.default)
def nested_tensor_from_mask_left_aligned(tensor: Tensor, mask: Tensor) -> bool:
    """Return that the sequences cannot be packed: nested tensors have no shape to distribute.

    ``TransformerEncoder`` asks in eval mode, and then computes what it does in training.
    """
    return False


def _of_shape(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the same shape and dtype that has next to no memory."""
    last = tensor.shape[-1] if tensor.ndim else 1
    row = torch.empty(last, dtype=tensor.dtype, device=tensor.device)
    made = row.view(*(1,) * (tensor.ndim - 1), last) if tensor.ndim else row.view(())
    return made.expand(tensor.shape).requires_grad_(tensor.requires_grad)
