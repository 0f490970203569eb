"""A team of thread ranks that runs cases one after the other and notices ranks that part ways."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtckpt.checkpoint.state.collector import paused_collector
from dtckpt.dtensor import DeviceMesh, Mesh
from dtckpt.errors import DtckptError
from tests.ranks import axis_groups, gloo_group

from .outcome import ERROR, HANG, REFUSED, WRONG, Failure, agree, joined

# torch's stubs leave out the stores.
_c10d: Any = dist

Step = Callable[[DeviceMesh], list[str]]
"""One case on one rank: returns what is wrong with the result, or raises."""

MAX_BROKEN = 2
"""After so many cases that parted the ranks, the rest of an operator's are left out."""


class Team:
    """Ranks of one mesh shape, with groups that live until a case parts the ranks."""

    def __init__(self, shape: tuple[int, ...], seconds: float = 15.0) -> None:
        self.mesh = Mesh(shape)
        self._seconds = seconds
        self._ends: list[tuple[list[Any], Any]] | None = None

    def run(self, steps: Sequence[Step]) -> list[Failure | None]:
        """Return what every step came to; fewer where too many of them parted the ranks."""
        found: list[Failure | None] = []
        broken = 0
        while len(found) < len(steps) and broken < MAX_BROKEN:
            found.extend(self._run_together(steps[len(found) :]))
            if self._ends is None:
                broken += 1
        return found

    def _run_together(self, steps: Sequence[Step]) -> list[Failure | None]:
        """Run steps until the ranks part, and return what they came to, that one included."""
        if self._ends is None:
            self._ends = self._connected()
        attempt = _Attempt(self.mesh, self._ends, steps, self._seconds)
        rows = attempt.run()
        if not rows or not agree(rows[-1]) or len(rows) < len(steps):
            self._ends = None
        return [joined(row) for row in rows]

    def _connected(self) -> list[tuple[list[Any], Any]]:
        store = _c10d.HashStore()
        timeout = timedelta(seconds=self._seconds)
        size = self.mesh.size
        ends: list[Any] = [None] * size

        def connect(rank: int) -> None:
            world = gloo_group(_c10d.PrefixStore("world", store), rank, size, timeout)
            ends[rank] = (axis_groups(store, self.mesh, rank, timeout), world)

        _in_threads(size, connect, 60)
        if None in ends:
            raise RuntimeError(f"the ranks of mesh {self.mesh} could not connect to each other")
        return ends


class _Attempt:
    """One run of steps on fresh meshes, whose caches therefore know nothing yet."""

    def __init__(
        self, mesh: Mesh, ends: list[tuple[list[Any], Any]], steps: Sequence[Step], seconds: float
    ) -> None:
        self._mesh, self._ends, self._steps, self._seconds = mesh, ends, steps, seconds
        self._rows: list[list[Any]] = [[_MISSING] * mesh.size for _ in steps]
        self._barrier = threading.Barrier(mesh.size)
        self._reached = 0

    def run(self) -> list[list[Failure | None]]:
        limit = max(60.0, 4 * self._seconds * len(self._steps))
        # While torch reads the state of its generator it holds a lock, and makes Python objects. If
        # the collector ran there, and in it Python code, another rank could go on and wait for that
        # lock with the interpreter's: nothing in the process would move any more.
        with paused_collector():
            _in_threads(self._mesh.size, self._run_rank, limit)
        rows = self._rows[: self._reached + 1]
        stuck = Failure(HANG, "did not come back")
        return [[stuck if failure is _MISSING else failure for failure in row] for row in rows]

    def _run_rank(self, rank: int) -> None:
        groups, world = self._ends[rank]
        device_mesh = DeviceMesh("cpu", self._mesh, groups=groups, world_group=world)
        for index, step in enumerate(self._steps):
            self._reached = max(self._reached, index)
            row = self._rows[index]
            row[rank] = _tried(step, device_mesh)
            try:  # longer than a collective waits, so that its error arrives
                self._barrier.wait(2 * self._seconds + 2)
            except threading.BrokenBarrierError:
                return
            if not agree(row):
                return


_MISSING: Any = object()


def _tried(step: Step, mesh: DeviceMesh) -> Failure | None:
    try:
        problems = step(mesh)
    except Exception as error:  # whatever it is, it is what came of the case
        text = f"{type(error).__name__}: {error}"
        alone = any(sign in text.lower() for sign in _ALONE)
        kind = HANG if alone else REFUSED if isinstance(error, DtckptError) else ERROR
        return Failure(kind, text.strip()[:600], _last_line(error))
    return Failure(WRONG, "; ".join(problems)[:600]) if problems else None


def _last_line(error: Exception) -> str:
    """Return the last line of the library that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f"{_PACKAGE}dtensor" in f.filename]
    if not ours:
        return ""
    last = ours[-1]
    return f"{Path(last.filename).name}:{last.lineno} {last.name}: {last.line}"


_PACKAGE = "dtckpt/"

_ALONE = ("timed out", "timeout", "connection closed by peer", "connection reset")
"""What Gloo says to a rank that waited for others, or whose partner gave up waiting."""


def _in_threads(size: int, body: Callable[[int], None], seconds: float) -> None:
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
