"""Files of a checkpoint written by several processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, cast

from dtckpt.errors import CheckpointError

from ...storage.base import Store
from ...storage.open import split_target
from ..files.manifest import FileRecord
from .work import Order

_PROCESS_BYTES = 200 << 20
"""Memory of one process that writes: interpreter, libraries, and buffers of reads and writes."""
_TORCH_BYTES = 200 << 20
"""What torch takes beside, where elements are converted."""
_PARENT_BYTES = 64 << 20
"""Memory of a process that has others write."""
_LEAST_BYTES = 256 << 20
"""Less is written sooner than processes start."""
_SECONDS = 5.0
"""How long a process has to give up the file that it is writing."""


def num_processes(
    order: Order, asked: int | None, memory_bytes: int, ranks: Sequence[int], num_bytes: int
) -> int:
    """Return how many processes beside this one write: none where this one does all by itself.

    By default as many as there are processors, files and room in memory for. Stores that were
    given as objects, and those in the memory of this process, are of this process alone.
    ValueError where memory is too small for what is asked.
    """
    each = _PROCESS_BYTES + (_TORCH_BYTES if order.changes.dtypes else 0)
    room = max((memory_bytes - _PARENT_BYTES) // each, 1)
    least = each if (asked or 1) == 1 else _PARENT_BYTES + (asked or 1) * each
    if least > memory_bytes or (asked or 1) < 1:
        raise ValueError(
            f"processes={asked} in {memory_bytes >> 20} MiB of memory: expected one or more, and "
            f"{least >> 20} MiB or more for so many"
        )
    is_shared = all(_is_shared(place) for place in (order.source, order.target))
    if not is_shared and (asked or 1) > 1:
        raise ValueError("several processes need the places of both stores, not their objects")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = asked or (1 if num_bytes < _LEAST_BYTES else cores or 1)
    count = min(wanted, room, len(ranks)) if is_shared else 1
    return count if count > 1 else 0


def _is_shared(place: object) -> bool:
    text = "" if isinstance(place, Store) else split_target(cast(str, place))[0]
    return bool(text) and not text.startswith(("memory://", "in-process://"))


def write_with(
    count: int, order: Order, ranks: Sequence[int], on_read: Callable[[int], None]
) -> list[FileRecord]:
    """Write the files of some ranks with so many processes, each the next one when it is free.

    Raises what a process raises; the others have given up their files then.
    """
    files: list[FileRecord] = []
    order = replace(order, num_local=count)
    waiting = list(reversed(ranks))
    with ExitStack() as stack:
        pipes = [stack.enter_context(_process(order)) for _ in range(count)]
        while pipes:
            for pipe in cast("list[Connection[Any, Any]]", wait(pipes)):
                with _talking():
                    kind, told = pipe.recv()
                if kind == "failed":
                    raise told
                if kind == "read":
                    on_read(told)
                    continue
                if kind == "written" and told is not None:
                    files.append(told)
                if kind == "done":
                    pipes.remove(pipe)
                    continue
                with _talking():
                    pipe.send(waiting.pop() if waiting else None)
    return files


@contextmanager
def _talking() -> Generator[None]:
    """Raise CheckpointError where the process at the other end of a pipe is not there any more."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise CheckpointError(
            "a process that wrote for this one has ended: it was killed, or had not enough "
            "memory. What it has finished is found by the next call"
        ) from error


@contextmanager
def _without_interrupts() -> Generator[None]:
    """Start processes in which SIGINT is blocked from their first moment on.

    A terminal sends it to all of them, and this one, which gets it as well, ends the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _process(order: Order) -> Generator[Connection[Any, Any]]:
    """Start a process and yield the pipe to it; it is ended with the block."""
    ours, theirs = Pipe()
    with ours, theirs:
        with _without_interrupts():
            process = subprocess.Popen(
                [sys.executable, "-m", "dtckpt.checkpoint.resharding.worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        theirs.close()
        try:
            with _talking():
                ours.send(order)
            yield ours
        except BaseException:
            process.terminate()
            raise
        finally:
            ours.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS)
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
