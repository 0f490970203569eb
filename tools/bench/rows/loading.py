"""Loads into the layout of the save."""

from __future__ import annotations

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..systems import sharded_state, sharded_systems
from .contestants import COSTS, loads, save_all


def _run(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    systems, missing = sharded_systems()
    missing = missing | save_all(team, state, systems)
    outcome = compete(team, loads(team, state, systems), setting.rounds, skipped=missing)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


LOAD = Row(
    name="load",
    title="Load into the same layout",
    what="Into the tensors that are there, all files in the page cache (everything is read once "
    "before each call). Ours verifies every byte; the others have nothing to verify.",
    columns=COSTS,
    bars=(
        Bar(metric="seconds", against="raw", limit=1.3),
        Bar(metric="seconds", against="DCP", limit=0.27),
    ),
    systems=(OURS, "DCP", "torch_checkpointing", "safetensors", "raw"),
    run=_run,
)
