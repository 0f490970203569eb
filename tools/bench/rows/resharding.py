"""Loads into another layout, on another number of ranks."""

from __future__ import annotations

from functools import partial

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..peers.dcp import Dcp
from ..peers.ours import Ours, OursOnce
from ..state import ShardedState, transformer
from ..systems import line_mesh
from .contestants import TIMES, loads, save_all

_REASON = "reads only the layout of the save here"


def _run(team: Team, setting: Setting) -> Outcome:
    systems: tuple[System, ...] = (Ours(), OursOnce(), Dcp())
    shapes = partial(transformer, setting.size, setting.layers)
    few = line_mesh(setting.ranks)
    is_saving = team.rank < setting.ranks
    saved = ShardedState(few, shapes(), 0, fill=True) if is_saving else None
    failed = save_all(team, saved, systems)
    del saved
    state = ShardedState(line_mesh(team.size), shapes(), 1, fill=False)
    outcome = compete(team, loads(team, state, systems), setting.rounds, skipped=failed)
    outcome.divide("read_bytes", state.global_bytes, "read_ratio")
    outcome.skipped["torch_checkpointing"] = _REASON
    outcome.facts["state_bytes"] = state.global_bytes
    outcome.facts["saved by"], outcome.facts["loaded by"] = setting.ranks, team.size
    return outcome


RESHARD = Row(
    name="reshard",
    title="Load Shard(0) into Shard(1) on twice as many ranks",
    what="Saved by rows, loaded by columns; all files in the page cache. Bytes read are what the "
    "processes asked the system for, over the bytes of the state. Read once (``read_once``) is "
    "chosen by itself for object stores and over several hosts; here every byte is in memory.",
    columns=(
        *TIMES,
        Column(metric="read_ratio", heading="read / needed", kind="ratio"),
        Column(metric="cpu_seconds", heading="CPU, all ranks"),
        Column(metric="extra_bytes", heading="extra memory", kind="bytes"),
    ),
    bars=(
        Bar(metric="seconds", against="DCP", limit=0.3),
        Bar(metric="read_ratio", limit=1.1),
    ),
    systems=(OURS, OursOnce.name, "DCP", "torch_checkpointing"),
    run=_run,
    ranks=lambda setting: 2 * setting.ranks,
)
