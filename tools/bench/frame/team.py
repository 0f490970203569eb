"""The processes of a benchmark: they start together and tell each other what they measured."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=2)
"""After which a system gives up whose ranks wait for one that failed."""
_PATIENCE = timedelta(minutes=10)
"""How long ranks wait for each other; longer, so that one that gave up is still heard."""


class Team:
    """All ranks of one launch, as one of them sees it."""

    def __init__(self, rank: int, size: int, rendezvous: Path, folder: Path) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        """Where this launch may write; removed at its end."""
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=_TIMEOUT
        )
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self._group)

    def gather(self, value: T) -> list[T]:
        """Give a value to every rank and return everyone's, by rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return cast(list[T], found)

    def say(self, text: str) -> None:
        """Tell the user how the benchmark gets on, once."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def leave(self, code: int) -> None:
        """End this process; torch's Gloo threads may abort an interpreter that winds down."""
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
