"""Attention over a sequence that ranks share, as one node of autograd on what each rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mesh.modes import require_order_free
from .blocks import Block, Sequences
from .kernels import Inputs, Result, accumulating, attend, attend_backward
from .merging import Merged
from .rotation import Rotation


@dataclass(frozen=True, slots=True)
class Job:
    """What does not depend on values, the same on all ranks but for the rank."""

    sequences: Sequences
    rotation: Rotation | None
    """None for one rank, to which nobody sends."""
    scale: float

    @property
    def rank(self) -> int:
        """Position of this rank."""
        return 0 if self.rotation is None else self.rotation.rank


def ring_attention(query: Tensor, key: Tensor, value: Tensor, job: Job) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks; differentiable.

    All are (batch, heads, sequence, dim), with as many heads in the query as in the key, or a
    multiple. Only what this rank has is kept for the backward pass, which brings the keys and
    values again, and takes their gradients along. Every rank must call.
    """
    if job.rotation is not None:
        require_order_free(query.dtype, "sum")
    if query.stride(3) != 1:  # which fused kernels take for granted
        query = query.contiguous()
    return cast(Tensor, _RingAttention.apply(query, key, value, job))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, job: Job) -> Tensor:
        pair = _Pair.of(key, value)
        merged = Merged(query, value.shape[3])
        with torch.autocast(query.device.type, enabled=False):  # it has cast what it would
            for source, held in _visited(pair, job):
                keys, values = pair.views(held, job.sequences.num_keys(source))
                for block in job.sequences.blocks(job.rank, source):
                    inputs = _of_block(block, query, keys, values, job.scale)
                    merged.add(block.rows, attend(inputs))
            result = merged.result()
        # In another order than torch's kernels: a recomputation without context parallelism, which
        # keeps as many, then differs, and checkpointing raises.
        ctx.save_for_backward(result.lse, result.out, query, key, value)
        ctx.job = job
        return result.out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        lse, out, query, key, value = ctx.saved_tensors
        job: Job = ctx.job
        grad_out = grads[0].contiguous()
        pair = _Pair.of(key, value)
        dtype = accumulating(query.dtype)
        grad_query = torch.zeros_like(query, dtype=dtype)

        def contribute(source: int, held: Tensor) -> Tensor | None:
            blocks = job.sequences.blocks(job.rank, source)
            if not blocks:
                return None
            length = job.sequences.num_keys(source)
            keys, values = pair.views(held, length)
            made = torch.zeros_like(held, dtype=dtype)
            grad_keys, grad_values = pair.views(made, length)
            for block in blocks:
                start, end = block.rows
                found = attend_backward(
                    grad_out[:, :, start:end],
                    _of_block(block, query, keys, values, job.scale),
                    Result(out[:, :, start:end], lse[:, :, start:end]),
                )
                columns = slice(*block.columns)
                grad_query[:, :, start:end] += found[0]
                grad_keys[:, :, columns] += _summed(found[1], key.shape[1], dtype)
                grad_values[:, :, columns] += _summed(found[2], key.shape[1], dtype)
            return made

        own = pair.joined
        with torch.autocast(query.device.type, enabled=False):
            if job.rotation is None:
                made = contribute(0, own)
                collected = torch.zeros_like(own, dtype=dtype) if made is None else made
            else:
                like = query.new_empty(0, dtype=dtype)
                collected = job.rotation.collect(own, _numels(pair, job), contribute, like)
        grad_key, grad_value = pair.views(collected, key.shape[2])
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
        )


@dataclass(frozen=True, slots=True)
class _Pair:
    """Keys and values as one row of numbers, as they travel."""

    joined: Tensor
    sizes: tuple[int, int]
    """Batch and heads."""
    dims: tuple[int, int]
    """Of a key and of a value."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Pair:
        """Return the keys and values of this rank."""
        joined = torch.cat([key.detach().reshape(-1), value.detach().reshape(-1)])
        return cls(joined, (key.shape[0], key.shape[1]), (key.shape[3], value.shape[3]))

    @property
    def width(self) -> int:
        """How many numbers the key and the value of one position have."""
        return math.prod(self.sizes) * sum(self.dims)

    def views(self, joined: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a rank that has so many positions."""
        of_key, of_value = self.dims
        at = math.prod(self.sizes) * length * of_key
        return (
            joined[:at].view(*self.sizes, length, of_key),
            joined[at:].view(*self.sizes, length, of_value),
        )


def _numels(pair: _Pair, job: Job) -> list[int]:
    sequences = job.sequences
    return [pair.width * sequences.num_keys(rank) for rank in range(sequences.num_ranks)]


def _visited(pair: _Pair, job: Job) -> Iterable[tuple[int, Tensor]]:
    if job.rotation is None:
        return [(0, pair.joined)]
    return job.rotation.visit(pair.joined, _numels(pair, job))


def _of_block(block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Inputs:
    """Return the queries of a block, and its keys and values with as many heads."""
    rows = query[:, :, slice(*block.rows)]
    columns = slice(*block.columns)
    keys, values = key[:, :, columns], value[:, :, columns]
    group = query.shape[1] // max(key.shape[1], 1)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return Inputs(rows, keys, values, block.diagonal, scale)


def _summed(grad: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return the gradients of grouped heads as those of the heads that they share."""
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=dtype)
