"""Rows are run in as few launches of processes as they can share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from .frame.row import Outcome, Row
from .frame.setting import Setting
from .frame.team import Team
from .launch import on_ranks
from .rows import ROWS


def run(rows: Iterable[Row], setting: Setting) -> Iterator[tuple[Row, Outcome]]:
    """Yield the outcomes of all rows, one launch of processes after the other."""
    for ranks, together in _launches(rows, setting):
        names = [row.name for row in together]
        job = {"setting": asdict(setting), "rows": names}
        outcomes = on_ranks(_measure, job, ranks, ", ".join(names), setting.directory)
        yield from ((row, Outcome(**outcomes[row.name])) for row in together)


def _launches(rows: Iterable[Row], setting: Setting) -> list[tuple[int, list[Row]]]:
    """Return rows that share processes: neighbours of one size that need no fresh ones."""
    launches: list[tuple[int, list[Row]]] = []
    for row in rows:
        ranks = row.ranks(setting)
        shared = [known for size, known in launches if size == ranks and not known[0].fresh]
        if shared and not row.fresh:
            shared[0].append(row)
        else:
            launches.append((ranks, [row]))
    return launches


def _measure(team: Team, job: dict[str, Any]) -> dict[str, Any]:
    """Return the outcomes of the rows of a job, on one of its ranks."""
    setting = Setting(**job["setting"])
    outcomes: dict[str, Any] = {}
    for row in ROWS:
        if row.name in job["rows"]:
            team.say(f"{row.name}: {row.title}")
            outcomes[row.name] = asdict(row.run(team, setting))
    return outcomes
