"""Eight ranks save every cell of the matrix and load it into the others. Run by test_matrix."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtckpt.checkpoint as ckpt
from tests.processes import join_group, leave_group

from .matrix_layouts import CELLS, WHOLE, Cell, make_mesh
from .matrix_training import Training

BEFORE, AFTER = 3, 2
LARGEST_FIRST = sorted(CELLS, key=lambda cell: -cell.world)
"""So that no rank waits in a collective for others that are at cells without it."""
TOLERANCE = 1e-9
"""Of losses in float64; ``check_losses`` shows that whatever is lost moves them by more."""


def sources_of(target: Cell) -> list[Cell]:
    """Return the cells that are loaded into one: all if asked for, else every kind once a kind."""
    if WHOLE:
        return CELLS
    kinds: dict[str, list[Cell]] = {}
    for cell in CELLS:
        kinds.setdefault(cell.kind, []).append(cell)
    alike, turn = kinds[target.kind], list(kinds).index(target.kind)
    return [
        cells[(number + turn) % len(cells)]
        for number, cells in enumerate(kinds.values())
        if number % len(alike) == alike.index(target)
    ]


def wait_for_all(name: str, rank: int, size: int) -> None:
    """Wait until all ranks have come here, for longer than a group would."""
    store: Any = getattr(dist.distributed_c10d, "_get_default_store")()  # noqa: B009
    store.set(f"{name}{rank}", "here")
    store.wait([f"{name}{other}" for other in range(size)], timedelta(minutes=10))


def main(folder: Path) -> None:
    rank = join_group()
    torch.set_num_threads(1)
    size = dist.get_world_size()
    meshes = {cell: make_mesh(cell) for cell in CELLS}
    groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in (1, 2, 3, 4, 8)}
    missed: list[str] = []

    def training(cell: Cell, seed: int) -> Training:
        return Training(cell, meshes[cell], groups[cell.world], seed)

    for cell in LARGEST_FIRST:
        if rank < cell.world:
            source = training(cell, 1)
            source.train(BEFORE)
            ckpt.save(source.state, folder / str(cell), process_group=source.group)
    wait_for_all("saved", rank, size)
    alone = Training(CELLS[0], meshes[CELLS[0]], groups[1], 1) if rank == 0 else None
    expected = alone.train(BEFORE + AFTER)[BEFORE:] if alone else []
    for cell in LARGEST_FIRST:
        for source in sources_of(cell) if rank < cell.world else ():
            target = training(cell, 2)
            report = ckpt.load(target.state, folder / str(source), process_group=target.group)
            found = target.train(AFTER)
            if report.by_position or report.missing or report.unexpected:
                missed.append(f"{source} to {cell}: {report}")
            if rank == 0 and not are_close(found, expected):
                missed.append(f"{source} to {cell}: {found}, expected {expected}")
    assert not missed, "\n".join(missed)
    if rank == 0:
        check_losses(lambda: training(CELLS[0], 2), folder, expected)
    wait_for_all("loaded", rank, size)
    leave_group()


def are_close(found: list[float], expected: list[float]) -> bool:
    """Whether two trainings tell the same."""
    pairs = zip(found, expected, strict=True)
    return all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs)


def check_losses(make: Callable[[], Training], folder: Path, expected: list[float]) -> None:
    """Raise AssertionError if anything could be lost, or be a little wrong, without being seen."""

    def moments(name: str, key: str, factor: float) -> Callable[[Training], object]:
        def spoil(training: Training) -> None:
            for entry in training.state[name].state.values():
                entry[key] *= factor

        return spoil

    def rate(name: str) -> Callable[[Training], object]:
        def spoil(training: Training) -> None:
            for group in training.state[name].param_groups:
                group["lr"] *= 1.001

        return spoil

    spoilers: dict[str, Callable[[Training], object]] = {
        "first moments": moments("adam", "exp_avg", 0.999),
        "second moments": moments("adam", "exp_avg_sq", 0.999),
        "steps of the optimizer": moments("adam", "step", 0.9),
        "momentum": moments("sgd", "momentum_buffer", 0.999),
        "rate": rate("adam"),
        "other rate": rate("sgd"),
        "schedule": lambda t: setattr(t.state["cosine"], "last_epoch", 1),
        "other schedule": lambda t: setattr(t.state["steps"], "last_epoch", 0),
        "noise": lambda t: t.noise.manual_seed(2),
        "noise, drawn once more": lambda t: torch.rand(1, generator=t.noise),
        "position in the data": lambda t: setattr(t.loader, "taken", 0),
        "averages": lambda t: t.averages["head.bias"].mul_(0.999),
        "scale": lambda t: t.scaler.load_state_dict(t.scaler.state_dict() | {"scale": 1.0}),
        "frozen weight": lambda t: t.model.stem.weight.data.mul_(1.0001),
        "shared weight": lambda t: t.model.block.again.weight.data.mul_(1.0001),
        "nothing": lambda _: None,
    }
    for what, spoil in spoilers.items():
        training = make()
        ckpt.load(training.state, folder / str(CELLS[0]), process_group=training.group)
        spoil(training)
        found = training.train(AFTER)
        assert are_close(found, expected) == (what == "nothing"), what


if __name__ == "__main__":
    main(Path(sys.argv[1]))
