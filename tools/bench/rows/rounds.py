"""What a load costs before its bytes count: rounds between ranks, requests, the planning."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from dtckpt import checkpoint
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.storage import FaultyStore, LocalStore, Store

from ..folders import fresh, warm
from ..frame.contest import Contestant, compete
from ..frame.row import Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from ..systems import line_mesh

_SIDE = 64
_NUMBERS = (150, 3000)
_LOADED: dict[str, tuple[Placement, bool | None]] = {
    "as saved": (Shard(0), None),
    "rows as columns": (Shard(1), None),
    "the same, read once": (Shard(1), True),
}
"""Where to, and what ``read_once`` is."""
_SYSTEMS = tuple(f"{number:,}, {how}" for number in _NUMBERS for how in _LOADED)


def _run(team: Team, setting: Setting) -> Outcome:
    contestants: list[Contestant] = []
    counts: dict[str, dict[str, int]] = {}
    for number in _NUMBERS:
        path = team.folder / f"{number}"
        fresh(team, path)
        checkpoint.save(_state(team, number, Shard(0), 1.0), path)
        warm(team, path)
        for how, (placement, read_once) in _LOADED.items():
            state = _state(team, number, placement, 0.0)
            load = partial(checkpoint.load, state, read_once=read_once)
            name = f"{number:,}, {how}"
            counts[name] = _counts(team, load, path)
            contestants.append(
                Contestant(
                    name=name,
                    before=partial(_clear, state),
                    call=partial(load, path),
                    after=partial(_check, state),
                )
            )
    outcome = compete(team, contestants, setting.rounds)
    for name, found in counts.items():
        for metric, count in found.items():
            outcome.values[name][metric] = [float(count)]
    return outcome


def _state(team: Team, number: int, placement: Placement, value: float) -> dict[str, DTensor]:
    mesh = line_mesh(team.size)
    sizes = [_SIDE, _SIDE]
    sizes[placement.dim if isinstance(placement, Shard) else 0] //= team.size
    return {
        f"block.{i}": DTensor.from_local(torch.full(sizes, value), mesh, [placement])
        for i in range(number)
    }


def _clear(state: dict[str, DTensor]) -> None:
    for tensor in state.values():
        tensor.to_local().zero_()


def _check(state: dict[str, DTensor]) -> None:
    for name, tensor in state.items():
        if not bool((tensor.to_local() == 1).all()):
            raise ValueError(f"{name} was loaded with other values than those saved")


def _counts(team: Team, load: Callable[[Store], object], path: Path) -> dict[str, int]:
    """Return how often ranks meet in a load, and what all of them ask of the store for it."""
    store = FaultyStore(LocalStore(path))
    with _counted_rounds() as rounds:
        load(store)
    names = [call.name for call in store.calls]
    own = {
        "rounds": len(rounds),
        "requests": len(names),
        "files": len({name for name in names if name.startswith("data/")}),
    }
    told = team.gather(own)
    return {key: own[key] if key == "rounds" else sum(one[key] for one in told) for key in own}


@contextmanager
def _counted_rounds() -> Generator[list[None]]:
    rounds: list[None] = []
    consult: Any = GroupRanks.consult

    def counted(*args: Any, **options: Any) -> bytes:
        rounds.append(None)
        return consult(*args, **options)

    with mock.patch.object(GroupRanks, "consult", counted):
        yield rounds


LOAD_ROUNDS = Row(
    name="load-rounds",
    title="What a load costs beside its bytes",
    what=f"Tensors of {_SIDE} x {_SIDE} floats, torch DTensors Shard(0) over all ranks, into the "
    "layout of the save or into Shard(1); all files in the page cache. Rounds are those between "
    "ranks; requests to the store, and data files opened, are the sums over ranks.",
    columns=(
        Column(metric="rounds", heading="rounds", kind="count"),
        Column(metric="files", heading="files opened", kind="count"),
        Column(metric="requests", heading="requests", kind="count"),
        Column(metric="seconds", heading="time", kind="milliseconds"),
        Column(metric="cpu_seconds", heading="CPU, all ranks", kind="milliseconds"),
    ),
    bars=(),
    systems=_SYSTEMS,
    run=_run,
)
