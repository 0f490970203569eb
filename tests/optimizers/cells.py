"""The cells of the matrix, and what is left out of it, with the reason for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .models import PARALLELISMS

MOMENTS = ("fresh", "used", "rollback")
SAME, OTHER = "same", "other"
MESHES = (SAME, OTHER)


@dataclass(frozen=True, slots=True)
class Cell:
    """A resumption of an optimizer."""

    optimizer: str
    parallelism: str
    mesh: str
    moment: str

    def __str__(self) -> str:
        return f"{self.optimizer} {self.parallelism} {self.mesh} mesh {self.moment}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Cells that cannot be, and the error that is watched in place of a result."""

    optimizers: tuple[str, ...]
    parallelisms: tuple[str, ...]
    stage: str
    """What raises: "steps" (the optimizer by itself), "save" or "load"."""
    error: str
    """A pattern of the error, with the name of its class before."""
    reason: str
    meshes: tuple[str, ...] = MESHES
    moments: tuple[str, ...] = MOMENTS

    def takes(self, cell: Cell) -> bool:
        """Whether a cell is among them."""
        return (
            cell.optimizer in self.optimizers
            and cell.parallelism in self.parallelisms
            and cell.mesh in self.meshes
            and cell.moment in self.moments
        )

    def __str__(self) -> str:
        names, forms = ", ".join(self.optimizers), ", ".join(self.parallelisms)
        told = f"{names} with {forms} on {' and '.join(self.meshes)} mesh"
        if self.moments != MOMENTS:
            told += f", {' and '.join(self.moments)}"
        return f"{told}: {self.reason}"

    def is_right(self, stage: str, error: str) -> bool:
        """Whether this is what was raised, or a later torch has what that of our tests lacks."""
        if not stage and self.reason == _BY_ITSELF and _RELEASE > _OF_TESTS:
            return True
        return stage == self.stage and re.search(self.error, error, re.DOTALL) is not None


_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
_OF_TESTS = (2, 13)

_BY_ITSELF = "torch's DTensor has not all of its operators, without any checkpoint"
_TORCH = ("fsdp2", "tp")
_SPREAD = (*_TORCH, "own")

LEFT_OUT = (
    LeftOut(
        optimizers=("Lookahead",),
        parallelisms=("single", "ddp", "own"),
        stage="save",
        error=r"the dict key \(0, 0\) is of type tuple",
        reason="the keys of its state dict are tuples, which are refused at save",
    ),
    LeftOut(
        optimizers=("Adafactor", "Rprop", "Shampoo", "AdaFactor", "Prodigy", "SparseAdam"),
        parallelisms=_TORCH,
        stage="steps",
        error="Sharding propagation failed|DTensor|^AssertionError",
        reason=_BY_ITSELF,
    ),
    LeftOut(
        optimizers=("SOAP", "LARS", "Lookahead"),
        parallelisms=_TORCH,
        stage="steps",
        error="mixed torch.Tensor and DTensor|does not have a sharding strategy",
        reason=_BY_ITSELF,
    ),
    LeftOut(
        optimizers=("Adafactor", "Rprop", "AdaFactor", "Prodigy", "SparseAdam", "Shampoo", "LARS"),
        parallelisms=("single",),
        meshes=(OTHER,),
        stage="steps",
        error="Sharding propagation failed|DTensor|sharding strategy|^AssertionError",
        reason=_BY_ITSELF,
    ),
    LeftOut(
        optimizers=("SOAP",),
        parallelisms=("single",),
        meshes=(OTHER,),
        moments=("used",),
        stage="steps",
        error="mixed torch.Tensor and DTensor",
        reason=_BY_ITSELF,
    ),
    LeftOut(
        optimizers=("SparseAdam",),
        parallelisms=("own",),
        stage="steps",
        error="memory format",
        reason="sparse gradients have no place beside distributed parameters",
    ),
    LeftOut(
        optimizers=("Shampoo",),
        parallelisms=("own",),
        stage="save",
        error="ranks hold terms of a reduction",
        reason="it keeps terms of a reduction in its state, which are refused at save",
    ),
    LeftOut(
        optimizers=("GatheringMuon", "LocalBlocks"),
        parallelisms=("single",),
        meshes=(OTHER,),
        stage="steps",
        error="mixed torch.Tensor and DTensor|Attempting to broadcast",
        reason="state beside plain parameters does not tell that it is plain beside spread ones",
    ),
    LeftOut(
        optimizers=("AdamW8bit",),
        parallelisms=("single",),
        meshes=(OTHER,),
        stage="load",
        error="Nothing can cut it",
        reason="blocks of a whole parameter cannot be cut, and a load onto parts is refused",
    ),
    LeftOut(
        optimizers=("AdamW8bit",),
        parallelisms=_TORCH,
        meshes=(OTHER,),
        stage="load",
        error="goes back to these",
        reason="it keeps blocks of the parts of each rank, and a load onto other parts is refused",
    ),
    LeftOut(
        optimizers=("LocalBlocks",),
        parallelisms=_SPREAD,
        meshes=(OTHER,),
        stage="load",
        error="goes back to these",
        reason="it keeps blocks of the parts of each rank, and a load onto other parts is refused",
    ),
)


def left_out(cell: Cell) -> LeftOut | None:
    """Return why a cell is left out; None for the others."""
    return next((why for why in LEFT_OUT if why.takes(cell)), None)


def all_cells(optimizers: Sequence[str], parallelism: str) -> list[Cell]:
    """Return every cell of some optimizers in one form of parallelism."""
    return [
        Cell(optimizer, parallelism, mesh, moment)
        for optimizer in optimizers
        for mesh in MESHES
        for moment in MOMENTS
    ]


def pairwise_cells(optimizers: Sequence[str], parallelism: str) -> list[Cell]:
    """Return one cell of each optimizer, so that over all forms each two of anything meet."""
    start = PARALLELISMS.index(parallelism)
    return [
        Cell(optimizer, parallelism, MESHES[n % len(MESHES)], MOMENTS[n % len(MOMENTS)])
        for n, optimizer in enumerate(optimizers, start)
    ]
