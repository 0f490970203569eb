"""What traces tell of the saves and restores of a run: seconds of each phase, rank by rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..state.limits import size_of, text_of
from .costs import PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """What one rank did in a save or restore."""

    rank: int
    started_at: float
    """Seconds since 1970, by the clock of its host."""
    seconds: float
    stall_seconds: float
    phases: Mapping[str, float]
    """Seconds of each phase, waiting for others included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A save or restore, as far as the ranks whose traces were found took part in it."""

    kind: str
    """"save", "load" or "restore"."""
    step: int | None
    """None of what was no manager's."""
    url: str
    ranks: tuple[TracedRank, ...]

    @property
    def seconds(self) -> float:
        """Of the rank that it took longest."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def stall_seconds(self) -> float:
        """How long the training of the rank stood that stood longest."""
        return max(rank.stall_seconds for rank in self.ranks)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that ranks had, in the order in which a rank comes to them."""
        found = {phase for rank in self.ranks for phase in rank.phases}
        known = PHASES["save" if self.kind == "save" else "load"]
        return (*(p for p in known if p in found), *sorted(found.difference(known)))


def read_traces(path: str | os.PathLike[str]) -> tuple[TracedCall, ...]:
    """Return the calls of a trace, or of those of a directory as ``Tracing`` keeps it, in order.

    Calls of several ranks are one where kind, step and URL are the same; a rank that made such a
    call again, after a restart, counts with its last one. Raises ValueError, naming the file, where
    one is no trace, and OSError where it cannot be read.
    """
    place = Path(path)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    calls: dict[tuple[str, int | None, str], dict[int, TracedRank]] = {}
    for file in files:
        try:
            for key, rank in _calls_of(json.loads(file.read_bytes())):
                calls.setdefault(key, {})[rank.rank] = rank
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file}: this file is no trace of dtckpt ({error!r})") from error
    found = [
        TracedCall(
            kind=kind,
            step=step,
            url=url,
            ranks=tuple(rank for _, rank in sorted(ranks.items())),
        )
        for (kind, step, url), ranks in calls.items()
    ]
    return tuple(sorted(found, key=lambda call: min(rank.started_at for rank in call.ranks)))


def save_of(calls: Iterable[TracedCall], url: str) -> TracedCall | None:
    """Return the last save of a checkpoint.

    Of a place that was moved since, the save into one of the same name counts.
    """
    saves = [call for call in calls if call.kind == "save"]
    name = url.rstrip("/").rpartition("/")[2]
    same = [call for call in saves if call.url == url]
    same = same or [call for call in saves if call.url.rstrip("/").rpartition("/")[2] == name]
    return same[-1] if same else None


def _calls_of(told: Any) -> Iterator[tuple[tuple[str, int | None, str], TracedRank]]:
    events = [event for event in told["traceEvents"] if event["ph"] == "X"]
    spans: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event["tid"]:
            spans.setdefault(_owner(event), []).append(event)
    for whole in events:
        if whole["tid"]:
            continue
        phases: dict[str, float] = {}
        for span in spans.get(_owner(whole), ()):
            if _is_within(span, whole):
                phase = text_of(span["name"], "name")
                phases[phase] = phases.get(phase, 0.0) + span["dur"] / 1e6
        args = whole["args"]
        step = args.get("step")
        rank = TracedRank(
            rank=size_of(whole["pid"], "pid"),
            started_at=whole["ts"] / 1e6,
            seconds=whole["dur"] / 1e6,
            stall_seconds=args["stall_seconds"] + 0.0,
            phases=phases,
        )
        key = (
            text_of(whole["cat"], "cat"),
            None if step is None else size_of(step, "step"),
            text_of(args["url"], "url"),
        )
        yield key, rank


def _owner(event: dict[str, Any]) -> tuple[int, str, int | None]:
    return event["pid"], event["cat"], event.get("args", {}).get("step")


def _is_within(span: dict[str, Any], whole: dict[str, Any]) -> bool:
    end = whole["ts"] + whole["dur"] + 1  # both were rounded
    return whole["ts"] <= span["ts"] and span["ts"] + span["dur"] <= end
