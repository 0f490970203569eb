"""What one call cost one process: time, processor time, memory, bytes read."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a call; memory and reads are 0 where the system does not tell them."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""
    extra_bytes: int
    """Most resident memory during the call beyond what was resident before it."""
    peak_bytes: int
    """Most resident memory during the call."""
    read_bytes: int
    """Bytes that the process asked the system to read, from the page cache or not."""


def measure(call: Callable[[], object]) -> Cost:
    """Run a call and return what it cost."""
    before, read = _resident(), _read()
    _forget_peak()
    cpu, start = time.process_time(), time.perf_counter()
    call()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak = _status("VmHWM")
    return Cost(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        extra_bytes=max(peak - before, 0),
        peak_bytes=peak,
        read_bytes=_read() - read,
    )


def tidy() -> None:
    """Collect garbage and give free memory back, so that nobody lives on another's left-overs."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> None:
    """Let the peak of resident memory start anew from what is resident now."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return


def _resident() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    try:
        lines = (_SELF / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def _read() -> int:
    try:
        lines = (_SELF / "io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("rchar")), 0)
