"""Attention in blocks of keys on a GPU, as context parallelism computes it, beside the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor.attention.blocks import Sequences
from dtckpt.dtensor.attention.kernels import Inputs, attend, attend_backward
from dtckpt.dtensor.attention.merging import Merged

from .setting import Finding, Setting

_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_HALF = 96


def check_attention(setting: Setting) -> Finding:
    """The second half of a sequence attends to both halves, one after the other."""
    problems: list[str] = []
    for dtype, tolerance in _TOLERANCE.items():
        for is_causal in (True, False):
            generator = torch.Generator().manual_seed(3)
            shape = (2, 4, 2 * _HALF, 64)
            tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
            for name, found, expected in _compared(tensors, setting.device, is_causal=is_causal):
                worst = (found.cpu().float() - expected).abs().max().item()
                if not worst < tolerance * max(expected.abs().max().item(), 1):
                    problems.append(f"{name} in {dtype}, causal={is_causal}: off by {worst:.1e}")
    return Finding(
        name="attention in blocks of keys, forwards and backwards, beside the CPU",
        problems=tuple(problems),
    )


def _compared(
    tensors: list[Tensor], device: torch.device, *, is_causal: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield results and gradients with those of the CPU in fp32."""
    *inputs, grad = tensors
    rows = slice(_HALF, None)
    leaves = [tensor.float().requires_grad_() for tensor in inputs]
    query, key, value = leaves
    out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)[:, :, rows]
    of_query, of_key, of_value = torch.autograd.grad(out, leaves, grad[:, :, rows].float())

    ranges = (((0, _HALF),), ((_HALF, _HALF),))
    sequences = Sequences(ranges, ranges, is_causal)
    own, *pair = (tensor.to(device) for tensor in inputs)
    own, grads = own[:, :, rows], grad[:, :, rows].to(device)
    scale = own.shape[-1] ** -0.5
    halves = list(zip(*(tensor.split(_HALF, 2) for tensor in pair), strict=True))
    merged = Merged(own, own.shape[-1])
    seen = [
        (block.rows, Inputs(own, keys, values, block.diagonal, scale))
        for source, (keys, values) in enumerate(halves)
        for block in sequences.blocks(1, source)
    ]
    for block_rows, inputs in seen:
        merged.add(block_rows, attend(inputs))
    result = merged.result()
    yield "the result", result.out, out.detach()

    found = [attend_backward(grads, inputs, result) for _, inputs in seen]
    queries, keys, values = zip(*found, strict=True)
    yield "the gradient of the query", torch.stack(queries).float().sum(0), of_query[:, :, rows]
    yield "the gradient of the key", torch.cat(keys, 2), of_key
    yield "the gradient of the value", torch.cat(values, 2), of_value
