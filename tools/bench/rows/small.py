"""Very many small tensors: what one tensor costs the processor."""

from __future__ import annotations

from ..frame.contest import compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import System
from ..peers.dcp import Dcp
from ..peers.ours import Ours
from ..peers.safetensors_files import SafetensorsFiles
from ..state import SmallState
from .contestants import TIMES, loads, save_all, saves

_ELEMENTS = 256
_FEW_ROUNDS = {"DCP": 2}
_SYSTEMS = (OURS, "safetensors", "DCP")
_COLUMNS = (
    Column(metric="cpu_per_tensor", heading="CPU per tensor", kind="microseconds"),
    *TIMES,
)
_BARS = (Bar(metric="cpu_per_tensor", against="safetensors", limit=2.0),)


def _systems() -> tuple[System, ...]:
    return Ours(), SafetensorsFiles(), Dcp()


def _run_save(team: Team, setting: Setting) -> Outcome:
    state = SmallState(setting.small_tensors, _ELEMENTS)
    contestants = saves(team, state, _systems(), _FEW_ROUNDS)
    return _per_tensor(compete(team, contestants, setting.rounds), setting)


def _run_load(team: Team, setting: Setting) -> Outcome:
    state, systems = SmallState(setting.small_tensors, _ELEMENTS), _systems()
    failed = save_all(team, state, systems)
    contestants = loads(team, state, systems, _FEW_ROUNDS)
    return _per_tensor(compete(team, contestants, setting.rounds, skipped=failed), setting)


def _per_tensor(outcome: Outcome, setting: Setting) -> Outcome:
    outcome.divide("cpu_seconds", setting.small_tensors, "cpu_per_tensor")
    outcome.facts["tensors"] = setting.small_tensors
    return outcome


SMALL_SAVE = Row(
    name="small-save",
    title="Save of many small tensors",
    what=f"One process, tensors of {_ELEMENTS} floats, synced to the disk.",
    columns=_COLUMNS,
    bars=_BARS,
    systems=_SYSTEMS,
    run=_run_save,
    ranks=lambda _: 1,
)

SMALL_LOAD = Row(
    name="small-load",
    title="Load of many small tensors",
    what=f"One process, tensors of {_ELEMENTS} floats, into the tensors that are there; all files "
    "in the page cache.",
    columns=_COLUMNS,
    bars=_BARS,
    systems=_SYSTEMS,
    run=_run_load,
    ranks=lambda _: 1,
)
