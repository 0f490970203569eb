"""``CheckpointableTensor``, the protocol by which a tensor says which boxes it holds.

torch has it since 2.14; here it is for every torch, since only the attributes count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["CheckpointableTensor"]


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A local tensor that holds boxes of a global one.

    ``save`` and ``load`` take any ``torch.Tensor`` with these attributes. Entries of
    ``global_offsets``, ``local_offsets`` and ``local_sizes`` go together, one each for a box.

    >>> import torch
    >>> part: Any = torch.zeros(2, 8)  # rows 2 and 3 of 4
    >>> part.global_shape, part.global_offsets = (4, 8), ((2, 0),)
    >>> part.local_offsets, part.local_sizes = ((0, 0),), ((2, 8),)
    >>> isinstance(part, CheckpointableTensor)
    True
    """

    global_shape: Sequence[int]
    """The shape of the global tensor."""
    global_offsets: Sequence[Sequence[int]]
    """Where each box begins in the global tensor."""
    local_offsets: Sequence[Sequence[int]]
    """Where each box begins in this tensor."""
    local_sizes: Sequence[Sequence[int]]
    """The shape of each box."""
