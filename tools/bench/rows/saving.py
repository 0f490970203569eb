"""Synchronous saves of a sharded state."""

from __future__ import annotations

from functools import partial

from ..folders import fresh
from ..frame.contest import Contestant, compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.raw import RawDirect
from ..state import ShardedState, transformer
from ..systems import line_mesh, sharded_systems


def _run(team: Team, setting: Setting) -> Outcome:
    state = ShardedState(
        line_mesh(team.size), transformer(setting.size, setting.layers), 0, fill=True
    )
    systems, missing = sharded_systems()
    contestants = [
        Contestant(
            name=system.name,
            call=partial(system.save, state, team.folder / system.name),
            before=partial(fresh, team, team.folder / system.name),
        )
        for system in (*systems, RawDirect())
    ]
    outcome = compete(team, contestants, setting.rounds, skipped=missing)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    outcome.facts["tensors"] = len(state.tensors)
    return outcome


SAVE = Row(
    name="save",
    title="Synchronous save of a sharded state",
    what="Shard(0) torch DTensors over all ranks into a fresh directory, until every byte is "
    "synced to the disk. Ours hashes all bytes besides; raw O_DIRECT writes one aligned buffer "
    "again and again and copies nothing.",
    columns=(
        Column(metric="seconds", heading="time"),
        Column(metric="seconds", heading="range", kind="range"),
        Column(metric="bytes_per_second", heading="rate", kind="rate"),
        Column(metric="cpu_seconds", heading="CPU, all ranks"),
        Column(metric="extra_bytes", heading="extra memory", kind="bytes"),
        Column(metric="peak_bytes", heading="peak RSS", kind="bytes"),
    ),
    bars=(
        Bar(metric="seconds", against="raw", limit=1.0),
        Bar(metric="seconds", against="DCP", limit=0.45),
    ),
    systems=(OURS, "DCP", "torch_checkpointing", "safetensors", "raw", "raw O_DIRECT"),
    run=_run,
)
