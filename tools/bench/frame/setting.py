"""What one benchmark run is about: how much, how many ranks, how often, where."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The numbers that every row is measured with."""

    size: int
    """Bytes of the sharded state over all ranks."""
    ranks: int
    rounds: int
    """Timed rounds of every system, after one that warms it up."""
    layers: int
    """Layers of the transformer whose state it is; fewer make larger tensors of the same bytes."""
    small_tensors: int
    """How many tensors the row of small ones has."""
    directory: str
    """Where checkpoints are written, and removed again."""


def parse_size(text: str) -> int:
    """Return the bytes of a size; ValueError where the text is none.

    >>> parse_size("1GiB"), parse_size("64 MiB"), parse_size("4096")
    (1073741824, 67108864, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a size; expected a number with a unit, such as 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])
