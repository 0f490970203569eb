"""What the page of a run shows, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..common.console import iec, printable

if TYPE_CHECKING:
    from ....checkpoint.runs.overview import StepOverview


def run_document(url: str, steps: Sequence[StepOverview]) -> dict[str, Any]:
    """Return what manifests and listings of a run tell; drift and stalls are added to it."""
    states = Counter(step.state for step in steps)
    own = sum(step.own_bytes for step in steps)
    told = ", ".join(f"{number:,} {state}" for state, number in states.items())
    whole = [step for step in steps if step.state == "committed"]
    facts = [("Checkpoints", f"{told}; {iec(own)} of files")]
    if whole:
        facts.append(("Newest", f"{printable(whole[-1].name)}, {_time(whole[-1])}"))
    return {"kind": "run", "url": url, "facts": facts, "steps": [_told(step) for step in steps]}


def _told(step: StepOverview) -> dict[str, Any]:
    marks = [("pinned", step.is_pinned), ("abandoned", step.is_abandoned)]
    return {
        "number": step.number,
        "name": printable(step.name),
        "saved": _time(step),
        "state": step.state,
        "problem": printable(step.problem),
        "marks": [mark for mark, is_set in marks if is_set],
        "num_tensors": step.num_tensors,
        "tensor_bytes": step.tensor_bytes,
        "own_bytes": step.own_bytes,
        "bases": [printable(name) for name in step.bases],
    }


def _time(step: StepOverview) -> str:
    if step.saved_at is None:
        return ""
    return datetime.fromtimestamp(step.saved_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
