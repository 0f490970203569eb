"""Synchronous saves of a sharded state."""

from __future__ import annotations

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.raw import RawDirect
from ..systems import sharded_state, sharded_systems
from .contestants import COSTS, saves


def _run(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    systems, missing = sharded_systems()
    contestants = saves(team, state, (*systems, RawDirect()))
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
    columns=COSTS,
    bars=(
        Bar(metric="seconds", against="raw", limit=1.0),
        Bar(metric="seconds", against="DCP", limit=0.45),
    ),
    systems=(OURS, "DCP", "torch_checkpointing", "safetensors", "raw", "raw O_DIRECT"),
    run=_run,
)
