"""Many ranks in one process: threads, each with its own real Gloo process group.

A test of several ranks then costs milliseconds instead of the ten seconds of spawned processes.
The groups are passed to the code under test; there is no default group.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dtckpt.checkpoint.collector import paused_collector
from tools.bench.coverage.thread_ranks import TIMEOUT, gloo_group

__all__ = ["RanksFailed", "gloo_group", "run_ranks"]

T = TypeVar("T")

# torch's stubs leave out the stores.
_c10d: Any = dist


class RanksFailed(Exception):
    """Some ranks raised; ``errors`` maps each of them to its exception."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__("; ".join(f"rank {r}: {e!r}" for r, e in sorted(errors.items())))
        self.errors = errors


def run_ranks(
    size: int, body: Callable[[int, dist.ProcessGroup], T], *, timeout: timedelta = TIMEOUT
) -> list[T]:
    """Run ``body(rank, group)`` in one thread per rank and return the results by rank.

    Raises RanksFailed with every rank's exception, and TimeoutError where a rank hangs.
    """
    store = _c10d.HashStore()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    # As in a job, no rank's group ends while others still use theirs.
    groups: list[dist.ProcessGroup] = []

    def run(rank: int) -> None:
        try:
            group = gloo_group(store, rank, size, timeout)
            groups.append(group)
            results[rank] = body(rank, group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with paused_collector():  # for the reason told in `tools.bench.coverage.team`
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout=180)
            if thread.is_alive():
                raise TimeoutError(f"rank {rank} hangs; errors so far: {errors}")
    if errors:
        groups.clear()
        for error in errors.values():
            _let_go(error)
        raise RanksFailed(errors)
    return [results[rank] for rank in range(size)]


def _let_go(error: BaseException | None) -> None:
    """Clear what an error was raised in: one that is kept would keep all groups of its test."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if error.__cause__ is not error.__context__:
            _let_go(error.__cause__)
        error = error.__context__
