"""Loads into another layout, on another number of ranks."""

from __future__ import annotations

from functools import partial

from ..folders import fresh, warm
from ..frame.contest import Contestant, compete, prepare
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..peers.dcp import Dcp
from ..peers.ours import Ours, OursOnce
from ..state import ShardedState, transformer
from ..systems import line_mesh

_REASON = "reads only the layout of the save here"


def _run(team: Team, setting: Setting) -> Outcome:
    systems: tuple[System, ...] = (Ours(), OursOnce(), Dcp())
    failed = _save(team, setting, systems)
    state = ShardedState(
        line_mesh(team.size), transformer(setting.size, setting.layers), 1, fill=False
    )
    contestants = [
        Contestant(
            name=system.name,
            before=partial(_prepare, team, state, system.name),
            call=partial(system.load, state, team.folder / system.name),
            after=state.check,
        )
        for system in systems
    ]
    outcome = compete(team, contestants, setting.rounds, skipped=failed)
    outcome.divide("read_bytes", state.global_bytes, "read_ratio")
    outcome.skipped["torch_checkpointing"] = _REASON
    outcome.facts["state_bytes"] = state.global_bytes
    outcome.facts["saved by"], outcome.facts["loaded by"] = setting.ranks, team.size
    return outcome


def _save(team: Team, setting: Setting, systems: tuple[System, ...]) -> dict[str, str]:
    """Save by rows with the first ranks; return who failed. What they held is gone afterwards."""
    mesh = line_mesh(setting.ranks)
    takes_part = team.rank < setting.ranks
    state = (
        ShardedState(mesh, transformer(setting.size, setting.layers), 0, fill=True)
        if takes_part
        else None
    )

    def save(system: System) -> None:
        fresh(team, team.folder / system.name)
        if state is not None:
            system.save(state, team.folder / system.name)

    return prepare(team, {system.name: partial(save, system) for system in systems})


def _prepare(team: Team, state: ShardedState, name: str) -> None:
    state.clear()
    warm(team, team.folder / name)


RESHARD = Row(
    name="reshard",
    title="Load Shard(0) into Shard(1) on twice as many ranks",
    what="Saved by rows, loaded by columns; all files in the page cache. Bytes read are what the "
    "processes asked the system for, over the bytes of the state. Read once (``read_once``) is "
    "chosen by itself for object stores and over several hosts; here every byte is in memory.",
    columns=(
        Column(metric="seconds", heading="time"),
        Column(metric="seconds", heading="range", kind="range"),
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
