"""Groups of threads with a store and no collectives: all that ranks need to agree."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtckpt.checkpoint.ranks.together import ranks_of, together

_c10d: Any = dist


class Group:
    """A process group as far as saving needs one: ranks and a store, and no collectives."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> Any:
        return self._store


def run(size: int, body: Callable[[int, Any], Any], store: Any = None) -> dict[int, Any]:
    """Run ``body(rank, group)`` in a thread for each rank; return results or errors by rank."""
    shared = _c10d.HashStore() if store is None else store
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            found[rank] = body(rank, Group(shared, rank, size))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def agree(group: Any, timeout: timedelta = timedelta(seconds=30)) -> bytes:
    """Make one small call over a group."""
    ranks = ranks_of(group, timeout=timeout, purpose="save")
    try:
        return together(ranks, "save: plan", lambda: b"x", lambda found: b"".join(found.values()))
    finally:
        ranks.close()
