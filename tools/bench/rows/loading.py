"""Loads into the layout of the save."""

from __future__ import annotations

from functools import partial

from ..folders import fresh, warm
from ..frame.contest import Contestant, compete, prepare
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..state import ShardedState, transformer
from ..systems import line_mesh, sharded_systems


def _run(team: Team, setting: Setting) -> Outcome:
    state = ShardedState(
        line_mesh(team.size), transformer(setting.size, setting.layers), 0, fill=True
    )
    systems, missing = sharded_systems()
    steps = {system.name: partial(_save, team, state, system) for system in systems}
    missing = missing | prepare(team, steps)
    contestants = [
        Contestant(
            name=system.name,
            before=partial(_prepare, team, state, system.name),
            call=partial(system.load, state, team.folder / system.name),
            after=state.check,
        )
        for system in systems
    ]
    outcome = compete(team, contestants, setting.rounds, skipped=missing)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _save(team: Team, state: ShardedState, system: System) -> None:
    fresh(team, team.folder / system.name)
    system.save(state, team.folder / system.name)


def _prepare(team: Team, state: ShardedState, name: str) -> None:
    state.clear()
    warm(team, team.folder / name)


LOAD = Row(
    name="load",
    title="Load into the same layout",
    what="Into the tensors that are there, all files in the page cache (everything is read once "
    "before each call). Ours verifies every byte; the others have nothing to verify.",
    columns=(
        Column(metric="seconds", heading="time"),
        Column(metric="seconds", heading="range", kind="range"),
        Column(metric="bytes_per_second", heading="rate", kind="rate"),
        Column(metric="cpu_seconds", heading="CPU, all ranks"),
        Column(metric="extra_bytes", heading="extra memory", kind="bytes"),
        Column(metric="peak_bytes", heading="peak RSS", kind="bytes"),
    ),
    bars=(
        Bar(metric="seconds", against="raw", limit=1.3),
        Bar(metric="seconds", against="DCP", limit=0.27),
    ),
    systems=(OURS, "DCP", "torch_checkpointing", "safetensors", "raw"),
    run=_run,
)
