"""Memory that a save or a load takes beside the state."""

from __future__ import annotations

from functools import partial

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..systems import sharded_state, sharded_systems
from .contestants import loads, saves

_BUDGET = 256 << 20


def memory_row(name: str, factor: float) -> Row:
    """Return the row for a state of ``factor`` times the size of the run's."""
    return Row(
        name=name,
        title=f"Extra memory of a save and a load, {factor:.0%} of the state",
        what="Per rank, the worst: most resident memory during the first save and the first load "
        "of a fresh process beyond what was resident before it. Pages of files that are mapped, "
        "as safetensors does, count.",
        columns=(
            Column(metric="save_bytes", heading="save", kind="bytes"),
            Column(metric="load_bytes", heading="load", kind="bytes"),
        ),
        bars=(Bar(metric="save_bytes", limit=_BUDGET), Bar(metric="load_bytes", limit=_BUDGET)),
        systems=(OURS, "DCP", "torch_checkpointing", "safetensors", "raw"),
        run=partial(_run, factor),
        fresh=True,
    )


def _run(factor: float, team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting, factor=factor)
    systems, missing = sharded_systems()
    saving, loading = saves(team, state, systems), loads(team, state, systems, is_warm=False)
    saved = compete(team, saving, 1, warm_up=False, skipped=missing)
    loaded = compete(team, loading, 1, warm_up=False, skipped=saved.skipped)
    outcome = Outcome(skipped=loaded.skipped)
    for name in loaded.values:
        outcome.values[name] = {
            "save_bytes": saved.values[name]["extra_bytes"],
            "load_bytes": loaded.values[name]["extra_bytes"],
        }
    outcome.facts["state_bytes"] = state.global_bytes
    outcome.facts["local_bytes"] = state.local_bytes
    return outcome
