"""Saves and loads of systems, each in a folder of its own, as contestants of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from ..folders import fresh, warm
from ..frame.contest import Contestant, prepare
from ..frame.row import Column
from ..frame.team import Team
from ..peers.base import Saver, System
from ..state import State

TIMES = (
    Column(metric="seconds", heading="time"),
    Column(metric="seconds", heading="range", kind="range"),
)
TIMES_AND_CPU = (*TIMES, Column(metric="cpu_seconds", heading="CPU, all ranks"))
COSTS = (
    *TIMES,
    Column(metric="bytes_per_second", heading="rate", kind="rate"),
    Column(metric="cpu_seconds", heading="CPU, all ranks"),
    Column(metric="extra_bytes", heading="extra memory", kind="bytes"),
    Column(metric="peak_bytes", heading="peak RSS", kind="bytes"),
)
"""What a row shows of the time that something takes, and of all that it takes."""


def saves(
    team: Team, state: State, systems: Iterable[Saver], rounds: Mapping[str, int] | None = None
) -> list[Contestant]:
    """Return saves into fresh folders; ``rounds`` are those of systems that are slow."""
    return [
        Contestant(
            name=system.name,
            before=partial(fresh, team, team.folder / system.name),
            call=partial(system.save, state, team.folder / system.name),
            max_rounds=(rounds or {}).get(system.name),
        )
        for system in systems
    ]


def loads(
    team: Team,
    state: State,
    systems: Iterable[System],
    rounds: Mapping[str, int] | None = None,
    *,
    is_warm: bool = True,
) -> list[Contestant]:
    """Return checked loads, of files in the page cache if ``is_warm``; ``rounds`` as of saves."""

    def before(path: Path) -> None:
        state.clear()
        if is_warm:
            warm(team, path)

    return [
        Contestant(
            name=system.name,
            before=partial(before, team.folder / system.name),
            call=partial(system.load, state, team.folder / system.name),
            after=state.check,
            max_rounds=(rounds or {}).get(system.name),
        )
        for system in systems
    ]


def save_all(team: Team, state: State | None, systems: Iterable[System]) -> dict[str, str]:
    """Save with all systems what will be loaded; return who failed, and how.

    Ranks that have no state take no part but in this.
    """

    def save(system: System) -> None:
        fresh(team, team.folder / system.name)
        if state is not None:
            system.save(state, team.folder / system.name)

    return prepare(team, {system.name: partial(save, system) for system in systems})
