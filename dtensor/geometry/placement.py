"""Placements: how a tensor lies along one axis of a mesh.

A tensor has one placement per mesh axis. ``Shard``, ``Ragged``, ``Packed`` and ``HeadTail`` split a
dim over the axis, ``Replicate`` repeats the tensor along it, ``Partial`` holds terms that are still
to be reduced over it. They are plain frozen values that know nothing of torch, with a short text
form that manifests and the command line share: ``S(0)``, ``S(0)@1``, ``R``, ``P(sum)``,
``Ragged(0:3,1,4)``, ``Packed(0:8,4,4)``, ``HeadTail(1)``.

``placements/`` has a file for each; a new one has a line here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtckpt.errors import PlacementError

from .placements.base import KINDS, Placement, SplitPlacement
from .placements.head_tail import HeadTail
from .placements.packed import Packed
from .placements.partial import REDUCE_OPS, Partial, reductions
from .placements.ragged import Ragged
from .placements.replicate import Replicate
from .placements.shard import Shard

__all__ = [
    "REDUCE_OPS",
    "HeadTail",
    "Packed",
    "Partial",
    "Placement",
    "Ragged",
    "Replicate",
    "Shard",
    "SplitPlacement",
    "format_placements",
    "parse_placement",
    "parse_placements",
    "reductions",
]

_FIRST = (Shard, Replicate, Partial, Ragged, Packed, HeadTail)
"""In the order in which errors name their forms; those of users follow."""

_TOO_LONG = re.compile(r"\d{19}")
"""More digits than any size has, and slow to read."""


def parse_placement(text: str) -> Placement:
    """Return the placement that ``str`` wrote.

    >>> parse_placement("Ragged(0:3,0,5)")
    Ragged(dim=0, sizes=(3, 0, 5))
    """
    name, bracket, _ = (given := text.strip()).partition("(")
    kind = KINDS.get(name)
    found = None
    if kind is not None and not _TOO_LONG.search(given):
        found = kind.parse(given)
    if found is None:
        *others, last = [kind.form for kind in dict.fromkeys((*_FIRST, *KINDS.values()))]
        unknown = kind is None and bracket and name.isidentifier()
        raise PlacementError(
            f"not a placement: {text!r}; expected {', '.join(others)} or {last}"
            + (f". If {name} is a class of yours, import its module first" if unknown else "")
        )
    return found


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Return placements from a comma-separated list, one per mesh axis.

    >>> parse_placements("S(0), R")
    (Shard(dim=0, order=None), Replicate())
    """
    return tuple(parse_placement(part) for part in re.split(r",(?![^()]*\))", text))


def format_placements(placements: Sequence[Placement]) -> str:
    """Return placements in their text form, as ``parse_placements`` reads them."""
    return ", ".join(str(placement) for placement in placements)
