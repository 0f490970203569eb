"""Online softmax: results of blocks of keys become the result of all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernels import Result, accumulating


class Merged:
    """The attention of some queries to the keys so far, in fp32 or wider.

    With the log-sum-exp of each, two results of other keys are a mean with the weights that the
    exponentials of these have [1]_.

    .. [1] Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Liu et al., Ring
       Attention with Blockwise Transformers, 2023.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._like = query
        self._value_dim = value_dim
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: tuple[int, int], result: Result) -> None:
        """Take what some of the queries give with further keys."""
        dtype = accumulating(self._like.dtype)
        new_out, new_lse = result.out.to(dtype), result.lse.to(dtype)
        start, end = rows
        if self._out is None and (start, end) == (0, self._like.shape[2]):
            self._out, self._lse = new_out, new_lse
            return
        out, lse = self._whole()
        out, lse = out[:, :, start:end], lse[:, :, start:end]
        both = torch.logaddexp(lse, new_lse)
        base = both.masked_fill(both == -math.inf, 0.0)  # minus infinity less itself is no number
        out.mul_((lse - base).exp_()[..., None])
        out.addcmul_(new_out, (new_lse - base).exp_()[..., None])
        lse.copy_(both)

    def result(self) -> Result:
        """Return the attention to all keys, in the dtype of the queries; zeros where none is."""
        out, lse = self._whole()
        return Result(out.to(self._like.dtype), lse)

    def _whole(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            sizes = self._like.shape[:3]
            dtype = accumulating(self._like.dtype)
            self._out = self._like.new_zeros((*sizes, self._value_dim), dtype=dtype)
            self._lse = self._like.new_full(sizes, -math.inf, dtype=dtype)
        return self._out, self._lse
