"""Attention of a block of scores, with what is needed to join it with others.

A block's result is normalised by its own scores only; with the logarithm of the sum of their
exponentials (*lse*) blocks of different keys are joined (``merging.py``). A backward pass takes the
result and the lse of all blocks, so that the gradients of blocks add up.

Fused kernels of torch run where there is one that tells the lse; everything else is computed in
tiles of queries, in fp32 or wider, which hold a bounded number of scores at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten

TILE_SCORES = 1 << 22
"""The most scores that a tile has, over batch and heads, unless one row has more."""

_ON_CPU = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_ON_CUDA = frozenset({torch.float16, torch.bfloat16})
_MAX_HEAD_DIM = 256
"""What the fused kernel of CUDA takes."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a forward pass of some scores gives."""

    out: Tensor
    """Weighted values, (batch, heads, queries, value dim)."""
    lse: Tensor
    """(batch, heads, queries), fp32 or wider; minus infinity for a query that sees nothing."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Queries with the keys that they see and their values, all with as many heads.

    There is at least one query and one key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    diagonal: int | None
    """As in ``Block``."""
    scale: float


def attend(inputs: Inputs) -> Result:
    """Return the attention of a block."""
    query, key, value, scale = inputs.query, inputs.key, inputs.value, inputs.scale
    kind = _fused(inputs)
    is_causal = inputs.diagonal is not None
    if kind == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return Result(out, lse)
    if kind == "cuda":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return Result(out, lse)
    return _attend_in_tiles(inputs)


def attend_backward(
    grad_out: Tensor, inputs: Inputs, result: Result
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a block adds to the gradients of its query, key and value.

    ``result`` is that of all blocks of these queries.
    """
    query, key, value, scale = inputs.query, inputs.key, inputs.value, inputs.scale
    kind = _fused(inputs)
    is_causal = inputs.diagonal is not None
    out, lse = result.out, result.lse
    if kind == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
        )
    if kind == "cuda":
        unused = torch.empty(0, dtype=torch.int64, device=query.device)
        sizes = query.shape[2], key.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *(grad_out, query, key, value, out, lse.contiguous()),
            *(None, None, *sizes, 0.0, is_causal, unused, unused),
            scale=scale,
        )
    return _backward_in_tiles(grad_out, inputs, result)


def _fused(inputs: Inputs) -> str:
    """Return which fused kernel takes a block: "cpu", "cuda" or none."""
    query, diagonal = inputs.query, inputs.diagonal
    if inputs.value.shape[3] != query.shape[3] or not query.numel():
        return ""  # torch's kernels divide by the number of elements, some of them
    if diagonal is not None and (diagonal or query.shape[2] != inputs.key.shape[2]):
        return ""  # kernels differ in what they take for the diagonal of such
    device, dtype = query.device.type, query.dtype
    if device == "cpu" and dtype in _ON_CPU:
        return "cpu"
    has_kernel = device == "cuda" and dtype in _ON_CUDA and torch.version.hip is None
    if has_kernel and query.shape[3] % 8 == 0 and query.shape[3] <= _MAX_HEAD_DIM:
        return "cuda" if torch.cuda.get_device_capability(query.device) >= (8, 0) else ""
    return ""


def _tiles(inputs: Inputs) -> Iterator[tuple[slice, Inputs]]:
    """Yield some queries at a time, with all keys and values, in fp32 or wider."""
    query, diagonal, dtype = inputs.query, inputs.diagonal, accumulating(inputs.query.dtype)
    key, value = inputs.key.to(dtype), inputs.value.to(dtype)
    size = max(TILE_SCORES // max(query.shape[0] * query.shape[1] * key.shape[2], 1), 1)
    for start in range(0, query.shape[2], size):
        rows = slice(start, start + size)
        own = None if diagonal is None else diagonal + start
        yield rows, Inputs(query[:, :, rows].to(dtype), key, value, own, inputs.scale)


def _scores(tile: Inputs) -> Tensor:
    """Return the scores of a tile, those that are masked minus infinity."""
    scores = torch.matmul(tile.query, tile.key.transpose(-1, -2)) * tile.scale
    if tile.diagonal is None:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return scores.masked_fill_(~seen.tril(tile.diagonal), -math.inf)


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which terms of a dtype are added up: at least fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def _attend_in_tiles(inputs: Inputs) -> Result:
    query = inputs.query
    out = query.new_empty(*query.shape[:3], inputs.value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=accumulating(query.dtype))
    for rows, tile in _tiles(inputs):
        scores = _scores(tile)
        sums = torch.logsumexp(scores, -1)
        lse[:, :, rows] = sums
        out[:, :, rows] = torch.matmul(_weights(scores, sums), tile.value)
    return Result(out, lse)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exponentials of scores by their sum; zeros where nothing is seen."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()


def _backward_in_tiles(
    grad_out: Tensor, inputs: Inputs, result: Result
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulating(inputs.query.dtype)
    grad_query = torch.empty_like(inputs.query, dtype=dtype)
    grad_key = torch.zeros_like(inputs.key, dtype=dtype)
    grad_value = torch.zeros_like(inputs.value, dtype=dtype)
    for rows, tile in _tiles(inputs):
        grads = grad_out[:, :, rows].to(dtype)
        weights = _weights(_scores(tile), result.lse[:, :, rows].to(dtype))
        grad_value += torch.matmul(weights.transpose(-1, -2), grads)
        mean = (grads * result.out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
        of_scores = (torch.matmul(grads, tile.value.transpose(-1, -2)) - mean) * weights
        of_scores *= tile.scale
        grad_query[:, :, rows] = torch.matmul(of_scores, tile.key)
        grad_key += torch.matmul(of_scores.transpose(-1, -2), tile.query)
    return grad_query, grad_key, grad_value
