"""Very many small tensors: what one tensor costs the processor."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..folders import fresh, warm
from ..frame.contest import Contestant, compete, prepare
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..peers.base import Plain
from ..peers.dcp import Dcp
from ..peers.ours import Ours
from ..peers.safetensors_files import SafetensorsFiles

_ELEMENTS = 256
_DCP_ROUNDS = 2
_SYSTEMS = (OURS, "safetensors", "DCP")
_COLUMNS = (
    Column(metric="cpu_per_tensor", heading="CPU per tensor", kind="microseconds"),
    Column(metric="seconds", heading="time"),
    Column(metric="seconds", heading="range", kind="range"),
)
_BARS = (Bar(metric="cpu_per_tensor", against="safetensors", limit=2.0),)


def _run_save(team: Team, setting: Setting) -> Outcome:
    tensors = _make(setting.small_tensors)
    contestants = [
        Contestant(
            name=system.name,
            before=partial(fresh, team, team.folder / system.name),
            call=partial(system.save_plain, tensors, team.folder / system.name),
            max_rounds=_rounds(system, setting),
        )
        for system in _systems()
    ]
    return _per_tensor(compete(team, contestants, setting.rounds), setting)


def _run_load(team: Team, setting: Setting) -> Outcome:
    tensors = _make(setting.small_tensors)
    steps = {system.name: partial(_save, team, tensors, system) for system in _systems()}
    failed = prepare(team, steps)
    contestants = [
        Contestant(
            name=system.name,
            before=partial(_prepare, team, tensors, system.name),
            call=partial(system.load_plain, tensors, team.folder / system.name),
            after=partial(_check, tensors),
            max_rounds=_rounds(system, setting),
        )
        for system in _systems()
    ]
    return _per_tensor(compete(team, contestants, setting.rounds, skipped=failed), setting)


def _save(team: Team, tensors: dict[str, Tensor], system: Plain) -> None:
    fresh(team, team.folder / system.name)
    system.save_plain(tensors, team.folder / system.name)


def _systems() -> tuple[Plain, ...]:
    return Ours(), SafetensorsFiles(), Dcp()


def _rounds(system: Plain, setting: Setting) -> int:
    return min(_DCP_ROUNDS, setting.rounds) if isinstance(system, Dcp) else setting.rounds


def _make(number: int) -> dict[str, Tensor]:
    return {f"block.{i}": torch.full((_ELEMENTS,), float(i)) for i in range(number)}


def _prepare(team: Team, tensors: dict[str, Tensor], name: str) -> None:
    for tensor in tensors.values():
        tensor.zero_()
    warm(team, team.folder / name)


def _check(tensors: dict[str, Tensor]) -> None:
    for i, tensor in enumerate(tensors.values()):
        if tensor[0] != i or tensor[-1] != i:
            raise ValueError(f"tensor {i} was loaded with other values than those saved")


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
