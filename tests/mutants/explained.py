"""Why nobody could notice some of the changes that `sweep.py` makes."""

from __future__ import annotations

EXPLAINED = {
    ("checkpoint/reading/execution.py", "len(reads) <= 1"): "one read needs no other thread",
    (
        "checkpoint/reading/execution.py",
        "stop.set()",
    ): "both places stop readers; either is enough",
    ("checkpoint/reading/execution.py", "self._cache is None"): "the size of a buffer",
    (
        "checkpoint/ranks/rendezvous.py",
        "now > limit - seconds + _WARN_SECONDS",
    ): "warns one look sooner",
}
"""Reasons by file and by the code that is changed."""
