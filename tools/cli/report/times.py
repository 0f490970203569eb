"""How long saves took, by their traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....checkpoint.timing.traced import save_of

if TYPE_CHECKING:
    from ....checkpoint.timing.traced import TracedCall


def timing(calls: Sequence[TracedCall], url: str) -> dict[str, Any]:
    """Return the seconds of each phase and rank of the save of a checkpoint, as a heat map."""
    call = save_of(calls, url)
    if call is None:
        return {"timing": None}
    return {
        "timing": {
            "phases": call.phases,
            "ranks": [rank.rank for rank in call.ranks],
            "seconds": [[rank.phases.get(phase) for rank in call.ranks] for phase in call.phases],
        }
    }


def stalls(calls: Sequence[TracedCall]) -> list[dict[str, Any]]:
    """Return how long each save of a run held the training up, and took in all."""
    return [
        {"step": call.step, "stall": call.stall_seconds, "seconds": call.seconds}
        for call in calls
        if call.kind == "save" and call.step is not None
    ]
