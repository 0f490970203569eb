"""Copies that share no memory with what they were made of."""

from __future__ import annotations

import torch
from torch import Tensor


def own_copy(local: Tensor) -> Tensor:
    """Return a contiguous copy in memory of its own; what is written to either is not in the other.

    At once, and not by torch's copy-on-write: that would turn memory of the tensor into shared
    memory after somebody has taken a pointer to it, as ``numpy()`` does.
    """
    return local.clone(memory_format=torch.contiguous_format)
