"""Loads into another layout, on another number of ranks."""

from __future__ import annotations

from functools import partial

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..peers.dcp import Dcp
from ..peers.ours import Ours, OursAlone
from ..peers.raw import Raw
from ..state import ShardedState, transformer
from ..systems import line_mesh
from .contestants import TIMES, loads, save_all

_REASON = "reads only the layout of the save here"


def _run(team: Team, setting: Setting) -> Outcome:
    systems: tuple[System, ...] = (Ours(), OursAlone(), Dcp())
    shapes = partial(transformer, setting.size, setting.layers)
    few = line_mesh(setting.ranks)
    is_saving = team.rank < setting.ranks
    saved = ShardedState(few, shapes(), 0, fill=True) if is_saving else None
    failed = save_all(team, saved, systems)
    del saved
    state = ShardedState(line_mesh(team.size), shapes(), 1, fill=True)
    systems = (*systems, Raw())
    failed |= save_all(team, state, systems[-1:])
    outcome = compete(team, loads(team, state, systems), setting.rounds, skipped=failed)
    outcome.divide("read_bytes", state.global_bytes, "read_ratio")
    outcome.skipped["torch_checkpointing"] = _REASON
    outcome.facts["state_bytes"] = state.global_bytes
    outcome.facts["saved by"], outcome.facts["loaded by"] = setting.ranks, team.size
    return outcome


def _row(name: str, title: str, factor: int, limit: float) -> Row:
    return Row(
        name=name,
        title=title,
        what="Saved by rows, loaded by columns; all files in the page cache. Bytes read are what "
        "the processes asked the system for, over the bytes of the state. By default ranks of a "
        "host read each block once, into memory that they share; alone (``read_once=False``) each "
        "reads all that it needs. Raw is plain reading of as many bytes by each rank, as they lie "
        "in a file of its own.",
        columns=(
            *TIMES,
            Column(metric="read_ratio", heading="read / needed", kind="ratio"),
            Column(metric="cpu_seconds", heading="CPU, all ranks"),
            Column(metric="extra_bytes", heading="extra memory", kind="bytes"),
        ),
        bars=(
            Bar(metric="seconds", against="raw", limit=limit),
            Bar(metric="seconds", against="DCP", limit=0.4),
            Bar(metric="read_ratio", limit=1.1),
        ),
        systems=(OURS, OursAlone.name, "DCP", "torch_checkpointing", "raw"),
        run=_run,
        ranks=lambda setting: factor * setting.ranks,
    )


RESHARD_FEW = _row("reshard-few", "Load Shard(0) into Shard(1) on as many ranks", 1, 1.6)
RESHARD = _row("reshard", "Load Shard(0) into Shard(1) on twice as many ranks", 2, 2.2)
RESHARD_MANY = _row("reshard-many", "Load Shard(0) into Shard(1) on four times as many", 4, 2.2)
