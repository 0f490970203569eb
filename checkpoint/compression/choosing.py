"""Whether a file is compressed: as the caller says, or where it is measured to be done sooner."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .codec import borrowed_codec

Compress = Literal["zstd", "auto"] | None

_MARGIN = 0.9
"""What is not done this much sooner is left as it is, for others to read."""
_LEAST_BYTES = 8 << 20
"""Files of fewer bytes tell nothing of how fast a store is."""
_MOST_KNOWN = 1000

_lock = threading.Lock()
_speeds: dict[str, float] = {}
"""Bytes a second that the last file took which was not compressed, by directory of checkpoints."""


def check_compress(compress: object) -> None:
    """Raise ValueError for what is no choice."""
    if compress not in (None, "zstd", "auto"):
        raise ValueError(f"compress is None, 'zstd' or 'auto', got {compress!r}")


def note_speed(url: str, num_bytes: int, seconds: float) -> None:
    """Remember how long a file took that was not compressed, in a checkpoint at ``url``."""
    if num_bytes >= _LEAST_BYTES and seconds > 0:
        with _lock:
            if len(_speeds) >= _MOST_KNOWN:
                _speeds.clear()
            _speeds[_around(url)] = num_bytes / seconds


def speed_of(url: str) -> float | None:
    """Return how many bytes a second are known to be written beside ``url``."""
    with _lock:
        return _speeds.get(_around(url))


def _around(url: str) -> str:
    return url.rpartition("/")[0]


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True)
class Sample:
    """What encoding some blocks has given."""

    num_bytes: int
    stored_bytes: int
    seconds: float
    """Processor time of one thread."""

    @classmethod
    def of(cls, blocks: Iterable[tuple[memoryview, int]]) -> Sample:
        """Encode some blocks, each with the bytes of its elements."""
        num_bytes, stored_bytes, seconds = 0, 0, 0.0
        with borrowed_codec() as codec:
            for block, width in blocks:
                began = time.thread_time()
                stored_bytes += len(codec.encode(block, width))
                seconds += time.thread_time() - began
                num_bytes += len(block)
        return cls(num_bytes, stored_bytes, seconds)

    def pays(self, bytes_per_second: float, num_threads: int) -> bool:
        """Whether a file of such blocks is written sooner if it is compressed.

        Threads encode while others write, so the slower of the two counts.

        >>> Sample(300, 200, 0.3).pays(500.0, num_threads=1)  # 1,000 bytes a second
        True
        >>> Sample(300, 200, 0.3).pays(950.0, num_threads=1)
        False
        >>> Sample(300, 200, 0.3).pays(950.0, num_threads=2)
        True
        >>> Sample(300, 290, 0.3).pays(1.0, num_threads=8)
        False
        """
        if not self.num_bytes:
            return False
        encoding = self.seconds / num_threads
        writing = self.stored_bytes / bytes_per_second
        return max(encoding, writing) < _MARGIN * self.num_bytes / bytes_per_second
