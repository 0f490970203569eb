"""One rank looks and decides, and all get the same answer, or the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..ranks.together import closing, ranks_of, together
from ..steps import check_same_root

Tick = Callable[[], None]
"""Tells the ranks that wait that this one is getting on."""


def decided(
    group: Mapping[str, Any], phase: str, root: str, decide: Callable[[Tick], bytes]
) -> bytes:
    """Return on every rank what ``decide`` returns on the first one.

    ``decide`` may take long if it calls what it is given now and then. ``group`` are the arguments
    of ``ranks_of``. LayoutMismatch where ranks were given other roots.
    """

    def compare_and_decide(roots: Mapping[int, bytes]) -> bytes:
        check_same_root(roots)
        return decide(ranks.tell_alive)

    ranks = ranks_of(**group, purpose=phase, target=root)
    with closing(ranks):
        return together(ranks, phase, root.encode, compare_and_decide)
