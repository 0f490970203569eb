"""Many ranks in one process: threads, each with its own real Gloo process group.

A test of several ranks then costs milliseconds instead of the ten seconds of spawned processes.
The groups are passed to the code under test; there is no default group.
"""

from __future__ import annotations

import atexit
import os
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

from dtckpt.checkpoint.state.collector import paused_collector
from dtckpt.dtensor import Mesh

T = TypeVar("T")

# torch's stubs leave out the stores and the options of Gloo groups.
_c10d: Any = dist

TIMEOUT = timedelta(seconds=30)


def gloo_group(
    store: object, rank: int, size: int, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroup:
    """Return rank ``rank``'s end of a Gloo group that is registered nowhere."""
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_device(os.getpid())]
    options._threads = 1
    group = _c10d.ProcessGroupGloo(store, rank, size, options)
    getattr(_of_this_rank, "groups", []).append(group)
    return group


@cache
def _device(_process: int) -> object:
    """Return the sockets and the thread that serves them, of all ranks of a process."""
    return _c10d.ProcessGroupGloo.create_device(interface="lo")


_of_this_rank = threading.local()
"""Its ``groups`` are those that the thread of a rank of ``run_ranks`` has made."""


class _Ending:
    """Groups whose ranks have ended: each connection waits up to 10 ms for the thread of Gloo."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        atexit.register(self.wait)

    def end(self, groups: list[dist.ProcessGroup]) -> None:
        """End groups, each in a thread of its own; nobody else may hold them."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while groups:
            thread = threading.Thread(target=_drop, args=([groups.pop()],), daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all have ended."""
        for thread in self._threads:
            thread.join(60)


def _drop(groups: list[dist.ProcessGroup]) -> None:
    groups.clear()


_ending = _Ending()


def axis_groups(
    store: object, mesh: Mesh, rank: int, timeout: timedelta = TIMEOUT
) -> list[dist.ProcessGroup]:
    """Return one rank's ends of the groups along every axis; all ranks call it together."""
    coordinate = mesh.coordinate(rank) or ()
    groups: list[dist.ProcessGroup] = []
    for axis, size in enumerate(mesh.shape):
        row = tuple(i for a, i in enumerate(coordinate) if a != axis)
        prefix = _c10d.PrefixStore(f"axis{axis}/{row}", store)
        groups.append(gloo_group(prefix, coordinate[axis], size, timeout))
    return groups


class RanksFailed(Exception):
    """Some ranks raised; ``errors`` maps each of them to its exception."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__("; ".join(f"rank {r}: {e!r}" for r, e in sorted(errors.items())))
        self.errors = errors


def run_ranks(
    size: int,
    body: Callable[[int, dist.ProcessGroup], T],
    *,
    timeout: timedelta = TIMEOUT,
    seconds: float = 180,
) -> list[T]:
    """Run ``body(rank, group)`` in one thread per rank and return the results by rank.

    Raises RanksFailed with every rank's exception, and TimeoutError where a rank hangs, which is
    to be done within ``seconds``.
    """
    store = _c10d.HashStore()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    # As in a job, no rank's group ends while others still use theirs.
    groups: list[dist.ProcessGroup] = []

    def run(rank: int) -> None:
        _of_this_rank.groups = groups
        try:
            results[rank] = body(rank, gloo_group(store, rank, size, timeout))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with paused_collector():  # for the reason told in `tests.operators.team`
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout=seconds)
            if thread.is_alive():
                raise TimeoutError(f"rank {rank} hangs; errors so far: {errors}")
    for error in errors.values():
        _let_go(error)
    _ending.end(groups)
    if errors:
        raise RanksFailed(errors)
    return [results[rank] for rank in range(size)]


def _let_go(error: BaseException | None) -> None:
    """Clear what an error was raised in: one that is kept would keep all groups of its test."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        if error.__cause__ is not error.__context__:
            _let_go(error.__cause__)
        error = error.__context__
