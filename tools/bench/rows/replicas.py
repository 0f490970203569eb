"""Loads of what all ranks of a host have alike, as with DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..peers.ours import Ours, OursAlone
from ..peers.raw import Raw
from ..state import SmallState
from ..systems import line_mesh
from .contestants import TIMES_AND_CPU, loads, save_all

_ONE_RANK = f"{OURS}, one rank alone"
_MOST_BYTES = 16 << 20


class _OneRank(Ours):
    name = _ONE_RANK


def _run(team: Team, setting: Setting) -> Outcome:
    elements = max(min(_MOST_BYTES, setting.size // 16) // 4, 1)
    number = setting.size // (4 * elements)
    state = SmallState(number, elements, line_mesh(team.size).get_group(), team.rank)
    alone = SmallState(0, elements)
    alone.tensors = state.tensors
    systems: tuple[System, ...] = (Ours(), OursAlone(), Raw())
    failed = save_all(team, state, systems)
    failed |= save_all(team, alone if team.rank == 0 else None, (_OneRank(),))
    (one_rank,) = loads(team, alone, (_OneRank(),))
    if team.rank > 0:
        one_rank = replace(one_rank, call=_nothing, after=_nothing)
    contestants = [*loads(team, state, systems), one_rank]
    outcome = compete(team, contestants, setting.rounds, skipped=failed)
    outcome.facts["state_bytes"] = sum(tensor.nbytes for tensor in state.tensors.values())
    return outcome


def _nothing() -> None:
    pass


LOAD_REPLICAS = Row(
    name="load-replicas",
    title="Load what all ranks have alike, on twice as many ranks",
    what="Plain tensors, the same on all ranks of the host; all files in the page cache. Beside it "
    "one rank loads the same while the others wait. Raw: every rank reads as many bytes.",
    columns=TIMES_AND_CPU,
    bars=(Bar(metric="seconds", against=_ONE_RANK, limit=1.3),),
    systems=(OURS, OursAlone.name, "raw", _ONE_RANK),
    run=_run,
    ranks=lambda setting: 2 * setting.ranks,
)
