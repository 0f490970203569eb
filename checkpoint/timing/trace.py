"""Saves and loads on a time line: the trace event format, which Perfetto and chrome://tracing open.

A file is one JSON object whose ``traceEvents`` are complete events (``ph`` "X": a name, when it
began and how long it took, in microseconds) and metadata ("M": names). A rank is a process there,
and each phase a lane of it, so the ranks of a job lie below each other.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .costs import PHASES, Costs
from .observers import Occasion

_HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_TAIL = b"\n]}\n"
_LANES = tuple(dict.fromkeys((*PHASES["save"], *PHASES["load"])))


def write_trace(path: str | os.PathLike[str], costs: Iterable[Costs]) -> None:
    """Write what saves and loads cost, of one rank or several, as one trace.

    Replaces the file that may be there, once the new one is whole.
    """
    events: list[bytes] = []
    ranks: set[int] = set()
    for one in costs:
        if one.rank not in ranks:
            ranks.add(one.rank)
            events += _names(one)
        events += _events(one, None)
    made = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    try:
        made.write_bytes(_HEAD + b",\n".join(events) + _TAIL)
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


class Tracing:
    """Writes every save and restore of a manager to a trace: ``on_cost=Tracing("traces")``.

    Each rank has a file of its own in the directory, ``rank-00003.json``, which a job that starts
    again goes on with. It is whole JSON after every event: open it while the job runs.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._known: set[Path] = set()
        self._lock = threading.Lock()

    def __call__(self, costs: Costs, occasion: Occasion) -> None:
        """Add what a save or restore cost."""
        path = self._directory / f"rank-{costs.rank:05}.json"
        with self._lock:
            if path not in self._known:
                self._directory.mkdir(parents=True, exist_ok=True)
                names = [] if _is_trace(path) else _names(costs)
                self._known.add(path)
            else:
                names = []
            _append(path, [*names, *_events(costs, occasion)])


def _is_trace(path: Path) -> bool:
    """Whether a file of ours is there; ValueError if it is something else, which must stay."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        head = file.read(len(_HEAD))
        file.seek(max(path.stat().st_size - len(_TAIL), 0))
        if head != _HEAD or file.read() != _TAIL:
            raise ValueError(f"{path}: this file is no trace that can be gone on with; move it")
    return True


def _append(path: Path, events: list[bytes]) -> None:
    """Put events in front of the end of a file, in one write."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        start, front = (size - len(_TAIL), b",\n") if size else (0, _HEAD)
        data = front + b",\n".join(events) + _TAIL
        if os.pwrite(descriptor, data, start) != len(data):
            os.ftruncate(descriptor, start)
            os.pwrite(descriptor, _TAIL, start)
            raise OSError(f"{path}: there is no room for another event")
    finally:
        os.close(descriptor)


def _names(costs: Costs) -> Iterator[bytes]:
    rank = costs.rank
    yield _event("process_name", "M", rank, 0, args={"name": f"rank {rank} ({costs.host})"})
    yield _event("process_sort_index", "M", rank, 0, args={"sort_index": rank})
    for lane, name in enumerate(("whole", *_LANES)):
        yield _event("thread_name", "M", rank, lane, args={"name": name})
        yield _event("thread_sort_index", "M", rank, lane, args={"sort_index": lane})


def _events(costs: Costs, occasion: Occasion | None) -> Iterator[bytes]:
    rank, kind = costs.rank, costs.kind if occasion is None else occasion.kind
    step = None if occasion is None else occasion.step
    slow = costs.slowest
    whole: dict[str, Any] = {"url": costs.url, "stall_seconds": costs.stall_seconds}
    if step is not None:
        whole["step"] = step
    if slow is not None:
        whole["slowest"] = f"{slow.phase} on rank {slow.slowest_rank} ({slow.slowest_host})"
    name = kind if step is None else f"{kind} {step}"
    when = _when(costs.started_at, costs.seconds)
    yield _event(name, "X", rank, 0, cat=kind, **when, args=whole)
    for span in costs.spans:
        lane = 1 + _LANES.index(span.phase) if span.phase in _LANES else 0
        args = {} if step is None else {"step": step}
        if span.num_bytes:
            args["bytes"] = span.num_bytes
        times = _when(span.started_at, span.seconds)
        yield _event(span.phase, "X", rank, lane, cat=kind, **times, args=args)


def _when(started_at: float, seconds: float) -> dict[str, int]:
    start = round(started_at * 1e6)
    return {"ts": start, "dur": max(round((started_at + seconds) * 1e6) - start, 0)}


def _event(name: str, phase: str, rank: int, lane: int, **rest: Any) -> bytes:
    event = {"name": name, "ph": phase, "pid": rank, "tid": lane, **rest}
    return json.dumps(event, separators=(",", ":")).encode()
