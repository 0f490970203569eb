"""How long saves took, by their traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ....checkpoint.timing.traced import TracedCall


def timing(calls: Sequence[TracedCall], url: str) -> dict[str, Any]:
    """Return the seconds of each phase and rank of the save of a checkpoint, as a heat map.

    Of a place that was moved since, the save into one of the same name counts.
    """
    saves = [call for call in calls if call.kind == "save"]
    name = url.rstrip("/").rpartition("/")[2]
    same = [call for call in saves if call.url == url]
    same = same or [call for call in saves if call.url.rstrip("/").rpartition("/")[2] == name]
    if not same:
        return {"timing": None}
    call = same[-1]
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
