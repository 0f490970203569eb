"""Memory for large steps: all ranks have it before any of them sends, or all fail alike.

A rank that ran out of memory on its own would leave the others waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import all_gather_ints
from .steps import Needs, Step


def agree_on_memory(steps: Sequence[Step], locals_: Sequence[Tensor]) -> None:
    """Raise torch.OutOfMemoryError on all ranks if one of them has no memory for steps of one key.

    Asked only where that takes no time beside the move (``Transport.agree_bytes``).
    """
    needs = [step.needs(local) for step, local in zip(steps, locals_, strict=True)]
    found = [need for need in needs if need is not None]
    if found:
        require_memory(found, locals_[0].device)


def require_memory(needs: Sequence[Needs], device: torch.device) -> None:
    """Raise torch.OutOfMemoryError on all ranks if one of them has no memory for a move."""
    peers = needs[0].peers
    if sum(need.most_bytes for need in needs) < peers.transport.agree_bytes:
        return
    lacking = _lacking([size for need in needs for size in need.own_bytes], device)
    rows = all_gather_ints([lacking], peers, device)
    names = peers.ranks or peers.group_ranks
    short = {rank: row[0] for rank, row in zip(names, rows, strict=True) if row[0]}
    if short:
        listed = ", ".join(f"rank {rank} {count:,} bytes" for rank, count in short.items())
        raise torch.OutOfMemoryError(
            f"a redistribute on {device.type} needs memory that is not there: {listed}. Nothing "
            "has been sent; free memory there, or redistribute in parts"
        )


def _lacking(sizes: Sequence[int], device: torch.device) -> int:
    """Return the bytes of all tensors together if there is no memory for them, else 0.

    Each is asked for by itself, as the step does: free memory may lie in many pieces.
    """
    try:
        # Given back at once. What the step takes comes out of it: nobody else is in between.
        _ = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except (MemoryError, RuntimeError):
        return sum(sizes)
    return 0
