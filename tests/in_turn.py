"""Ranks played one after the other in this process, for code of torch that asks what its rank is.

There is a default process group, over which nothing is sent: what it would bring is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

T = TypeVar("T")

_dist: Any = dist


def in_turn(size: int, body: Callable[[int], T]) -> list[T]:
    """Run ``body(rank)`` for each rank of a job; results by rank."""
    results: list[T] = []
    for rank in range(size):
        _dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            results.append(body(rank))
        finally:
            dist.destroy_process_group()
    return results
