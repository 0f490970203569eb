"""Loads into the layout of the save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ..folders import fresh, warm
from ..frame.contest import compete
from ..frame.row import OURS, Bar, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..peers.dcp import Dcp
from ..peers.ours import Ours, OursCached, OursPast
from ..peers.raw import Raw, RawHashed
from ..state import ShardedState, alike
from ..systems import line_mesh, sharded_state, sharded_systems
from .contestants import COSTS, TIMES_AND_CPU, loads, save_all

_SMALL_BYTES = 2 << 20


def _many(team: Team, setting: Setting) -> Outcome:
    shapes = alike(setting.size, _SMALL_BYTES * team.size)
    state = ShardedState(line_mesh(team.size), shapes, 0, fill=True)
    systems: tuple[System, ...] = (Ours(), Dcp(), Raw(), RawHashed())
    failed = save_all(team, state, systems)
    outcome = compete(team, loads(team, state, systems), setting.rounds, skipped=failed)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _fresh(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    systems: tuple[System, ...] = (Ours(), Dcp(), Raw())
    failed = save_all(team, state, systems)

    def before(path: Path) -> None:
        state.renew()
        warm(team, path)

    contestants = [
        replace(one, before=partial(before, team.folder / one.name))
        for one in loads(team, state, systems)
    ]
    outcome = compete(team, contestants, setting.rounds, skipped=failed)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _first(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    systems: tuple[System, ...] = (OursCached(), OursPast(), Dcp())

    def before(system: System, path: Path) -> None:
        fresh(team, path)
        system.save(state, path)
        state.clear()

    contestants = [
        replace(one, before=partial(before, system, team.folder / system.name))
        for system, one in zip(systems, loads(team, state, systems), strict=True)
    ]
    outcome = compete(team, contestants, setting.rounds)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


def _run(team: Team, setting: Setting) -> Outcome:
    state = sharded_state(team, setting)
    systems, missing = sharded_systems()
    systems = (*systems, RawHashed())
    missing = missing | save_all(team, state, systems)
    outcome = compete(team, loads(team, state, systems), setting.rounds, skipped=missing)
    outcome.add_rate(state.global_bytes)
    outcome.facts["state_bytes"] = state.global_bytes
    return outcome


LOAD = Row(
    name="load",
    title="Load into the same layout",
    what="Into the tensors that are there, all files in the page cache (everything is read once "
    "before each call). Ours verifies every byte; the others have nothing to verify. Raw, hashed "
    "is reading by blocks of 1 MiB, and hashing each at once: no verified load is faster.",
    columns=COSTS,
    bars=(
        Bar(metric="seconds", against="raw", limit=1.15),
        Bar(metric="seconds", against="DCP", limit=0.27),
    ),
    systems=(OURS, "DCP", "torch_checkpointing", "safetensors", "raw", RawHashed.name),
    run=_run,
)

LOAD_MANY = Row(
    name="load-many",
    title="Load tensors of which each rank holds 2 MiB",
    what="As above.",
    columns=TIMES_AND_CPU,
    bars=(Bar(metric="seconds", against="raw", limit=1.3),),
    systems=(OURS, "DCP", "raw", RawHashed.name),
    run=_many,
)

LOAD_FRESH = Row(
    name="load-fresh",
    title="Load into tensors that nobody has written to",
    what="As above, into ``torch.empty``: the system gives memory as it is filled.",
    columns=TIMES_AND_CPU,
    bars=(Bar(metric="seconds", against="raw", limit=1.15),),
    systems=(OURS, "DCP", "raw"),
    run=_fresh,
)

FIRST_LOAD = Row(
    name="first-load",
    title="The first load after a save, on the same host",
    what="Nothing is read between the two. Ours saves with ``direct_io`` off (an option of the "
    "store), so that files stay in the page cache, and by its default, past it where that pays.",
    columns=TIMES_AND_CPU,
    bars=(Bar(metric="seconds", against="DCP", limit=1.5),),
    systems=(OURS, OursPast.name, "DCP"),
    run=_first,
)
