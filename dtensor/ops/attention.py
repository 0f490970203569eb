"""Scaled dot product attention: one rule for all backends, by the roles that arguments have.

Batch and heads may be split; with fewer key heads than query heads, at multiples of a group. The
query sequence may be split if attention is not causal, with whole keys and values, whose gradients
are then Partial. Which backend runs is the same on all ranks. The fused operators of transformers
in eval mode are made of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..tensor.schemas import base_name
from ..torch_private import schema_of
from .engine.factors import FIRST, Dim, Dims, Factors
from .engine.forms import operators
from .engine.local_kernels import zeros_of_nothing
from .engine.table import RULES, LocalCall, OpCall, Rule, decomposition, in_any_order

aten = torch.ops.aten

_LETTERS = "bhq"

_QUERY, _KEY, _MASK = "bhq.", "bg..", "bhq."

ROLES = {
    "query": _QUERY,
    "key": _KEY,
    "value": _KEY,
    "attn_mask": _MASK,
    "attn_bias": _MASK,
    "output": _QUERY,
    "out": _QUERY,
    "grad_out": _QUERY,
    "grad_out_": _QUERY,
    "logsumexp": "bhq",
    "log_sumexp": "bhq",
}
"""Dims by role: b batch, h query heads, g key heads, q query sequence. Other roles have none."""

_GRADIENTS = ("query", "key", "value", "attn_bias")

BACKENDS = {
    "_scaled_dot_product_flash_attention_for_cpu": {},
    "_scaled_dot_product_flash_attention": {},
    "_scaled_dot_product_efficient_attention": {"logsumexp": "bh.", "log_sumexp": "bh."},
    "_scaled_dot_product_cudnn_attention": {"logsumexp": "bhq."},
    "_scaled_dot_product_fused_attention_overrideable": {},
}
"""By operator, what it does otherwise; the efficient kernel pads the sequence of its sums."""


def _attention(call: OpCall, roles: dict[str, str]) -> Rule | None:
    named = _named(call)
    query, key = named["query"], named["key"]
    if not isinstance(query, DTensorSpec) or not isinstance(key, DTensorSpec):
        return None
    if query.ndim != 4 or named["dropout_p"] > 0:
        return None  # without a rule it is refused: replicas would drop other elements
    padded = any("q" not in text for role, text in roles.items() if "sum" in role)
    whole = "q" if named["is_causal"] or padded else ""
    group = query.shape[1] // max(key.shape[1], 1)
    inputs = [name for name, value in named.items() if isinstance(value, DTensorSpec)]
    is_backward = base_name(call.op).endswith("_backward")
    results = tuple(result.name for result in schema_of(call.op).returns)
    outputs = _GRADIENTS if is_backward else results

    def dims(role: str, shape: Sequence[int]) -> Dims:
        text = roles.get(role, "")[-len(shape) :] if shape else ""
        if len(text) != len(shape):
            return (None,) * len(shape)
        return tuple(
            _dim(letter, size, query, group) if letter not in whole else None
            for letter, size in zip(text, shape, strict=True)
        )

    shapes = [meta.shape if meta else () for meta in call.outputs]
    names = outputs[: len(shapes)]
    return Factors(
        call,
        inputs=tuple(dims(n, s.shape) for n, s in zip(inputs, call.specs, strict=True)),
        outputs=tuple(dims(n, shape) for n, shape in zip(names, shapes, strict=True)),
        reduce=dict.fromkeys(range(len(_LETTERS)), "sum") if is_backward else {},
        linear=FIRST if is_backward else (),
        untouched=tuple(
            frozenset() if name in roles else frozenset(range(len(_LETTERS))) for name in names
        ),
        local=_local,
    )


def _dim(letter: str, size: int, query: DTensorSpec, group: int) -> Dim | None:
    if letter == "g":
        return Dim(1, group) if size * group == query.shape[1] and group else None
    factor = _LETTERS.find(letter)
    return Dim(factor) if factor >= 0 and size == query.shape[factor] else None


def _named(call: OpCall) -> dict[str, Any]:
    """Return the arguments by name, in the order of the schema, defaults where not given."""
    return {name: call.arg(name) for name in (a.name for a in schema_of(call.op).arguments)}


@in_any_order
def _local(local: LocalCall) -> Callable[..., Any]:
    """Return the kernel with lengths that are those of the local query, and global in results."""
    call = local.call
    returns = [str(result.type) for result in schema_of(call.op).returns]
    if call.args[0] is None:  # kernels with elements return no gradients where none came
        return lambda *_, **__: (None,) * len(returns)
    named = _named(call)
    names = list(named)
    query, key = named["query"], named["key"]
    at = names.index("query")
    lengths = (query.shape[2], key.shape[2])
    run = zeros_of_nothing(local) or call.op

    def attend(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for name, index in (("max_q", at), ("max_k", at + 1)):
            if name in named:
                given[names.index(name)] = args[index].shape[2]
        results = run(*given, **kwargs)
        remaining = iter(lengths)
        return tuple(
            next(remaining) if kind in ("int", "SymInt") else result
            for kind, result in zip(returns, results, strict=True)
        )

    return attend


def _register() -> None:
    for name, own in BACKENDS.items():
        roles = {**ROLES, **own}
        ops = operators(aten, f"{name} {name}_backward")
        RULES.register(ops, lambda call, roles=roles: _attention(call, roles))


_register()

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
