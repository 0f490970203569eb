"""The program of the four ranks: cells by their form of parallelism and their optimizers."""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import dtckpt.checkpoint as ckpt

from ..processes import join_group, leave_group
from .cells import OTHER, SAME, Cell
from .every import KINDS, Kind
from .models import Place, like, plain_name, set_gradients

for _module in ("torch._dynamo", "pytorch_optimizer", "torchao.optim"):
    import_module(_module)  # once, before the ranks are forked, and not by each of them

STEPS = 3


class Stage(Exception):
    """An error of a part of a cell: of the optimizer's own steps, of a save or of a load."""

    def __init__(self, stage: str, text: str) -> None:
        super().__init__(stage, text)
        self.told = stage, text


@dataclass(slots=True)
class Training:
    """A model and its optimizer."""

    kind: Kind
    model: Any
    optimizer: Any

    @classmethod
    def of(cls, kind: Kind, place: Place, seed: int) -> Training:
        model = place.model(seed)
        return cls(kind, model, kind.of(model))

    def run(self, steps: range) -> None:
        """Take some steps, each with gradients of its own."""
        for number in steps:

            def closure(number: int = number) -> torch.Tensor:
                set_gradients(self.model, number, is_sparse=self.kind.is_sparse)
                return torch.tensor(1.0 + number)

            if self.kind.has_closure:
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def snapshot(self) -> Any:
        """Return all bits of this rank: parameters, and state with its structure."""
        params = {plain_name(n): bits(p) for n, p in self.model.named_parameters()}
        return {"model": params, "optimizer": bits(self.optimizer.state_dict())}


def bits(value: Any) -> Any:
    """Return what tells two values apart: classes, dtypes, shapes, layouts and bytes."""
    any_value = value
    if isinstance(value, torch.Tensor):
        value = any_value
        if hasattr(value, "placements"):
            told = [type(value).__name__, str(value.placements), list(value.shape)]
            return [*told, bits(value.to_local())]
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            return [
                type(value).__name__,
                repr(context),
                {n: bits(getattr(value, n)) for n in names},
            ]
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), data.hex()]
    if isinstance(value, Mapping):
        return {repr(key): bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, [bits(item) for item in value]]
    return f"{type(value).__name__} {value!r}"


def difference(one: Any, other: Any, at: str = "") -> str:
    """Return where two snapshots differ; "" where they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{at}: {sorted(one.keys() ^ other.keys())} on one side only"
        return next((d for k in one if (d := difference(one[k], other[k], f"{at}/{k}"))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{at}/{i}"))), "")
    return "" if one == other else f"{at}: {str(one)[:60]} and {str(other)[:60]}"


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of a training, gathered."""

    value: torch.Tensor
    placements: tuple[Any, ...] | None
    """How it lay; None for a plain one."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A tensor subclass, taken apart."""

    kind: Any
    inner: dict[str, torch.Tensor]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def gathered(training: Training) -> Any:
    """Return parameters and state of a training as whole tensors. Collective among its ranks."""
    names = {param: plain_name(name) for name, param in training.model.named_parameters()}
    params = {name: _gathered(param.detach()) for param, name in names.items()}
    optimizers = [
        (
            {names[param]: _gathered(entry) for param, entry in optimizer.state.items()},
            [
                _gathered({k: v for k, v in g.items() if k != "params"})
                for g in optimizer.param_groups
            ],
        )
        for optimizer in _optimizers(training)
    ]
    return params, optimizers


def distribute(whole: Any, target: Training) -> None:
    """Give a training the parameters and the state that another one had, as it lay there."""
    params, optimizers = whole
    named = {plain_name(name): param for name, param in target.model.named_parameters()}
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(like(params[name].value, param))
    for optimizer, (state, groups) in zip(_optimizers(target), optimizers, strict=True):
        optimizer.state = defaultdict(dict)
        for name, entry in state.items():
            optimizer.state[named[name]] = _distributed(entry, params[name], named[name])
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group |= _distributed(settings, None, None)


def _optimizers(training: Training) -> list[Any]:
    inner = getattr(training.optimizer, "optimizer", None)
    return [training.optimizer] if inner is None else [training.optimizer, inner]


def _gathered(value: Any) -> Any:
    any_value = value
    if isinstance(value, torch.Tensor):
        value = any_value
        if not hasattr(value, "placements") and hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            inner = {name: getattr(value, name).detach().clone() for name in names}
            return Apart(type(value), inner, context, value.shape, value.stride())
        if not hasattr(value, "placements"):
            return Whole(value.detach().clone(), None)
        return Whole(value.full_tensor().detach().clone(), tuple(value.placements))
    if isinstance(value, dict):
        return {key: _gathered(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_gathered(item) for item in value)
    return copy.deepcopy(value)


def _distributed(value: Any, was: Whole | None, param: Any) -> Any:
    if isinstance(value, Whole):
        if value.placements is not None:
            return like(value.value, param, value.placements)
        if was is None or was.placements is not None or not hasattr(param, "placements"):
            return value.value.clone()
        # A plain parameter has become a distributed one, and so does its state, but for counters.
        if value.value.shape == was.value.shape and was.value.ndim:
            return like(value.value, param)
        return like(value.value, param, [Replicate()]) if value.value.ndim else value.value.clone()
    if isinstance(value, Apart):
        make = value.kind.__tensor_unflatten__
        return make(dict(value.inner), value.context, value.size, value.stride)
    if isinstance(value, dict):
        return {key: _distributed(item, was, param) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_distributed(item, was, param) for item in value)
    return copy.deepcopy(value)


def staged(stage: str, action: Callable[[], Any]) -> Any:
    """Do a part of a cell; its error says which part it is."""
    try:
        return action()
    except Exception as error:
        if os.environ.get("DTCKPT_TRACE"):
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        raise Stage(stage, text) from error


def compared(training: Training, at_save: Any, later: Any) -> str:
    """Compare the state after a load, and after three steps more; "" where all is right."""
    found = difference(at_save, training.snapshot())
    if found:
        return f"after the load{found}"
    training.run(range(STEPS, 2 * STEPS))
    found = difference(later, training.snapshot())
    return f"after {STEPS} steps{found}" if found else ""


class Runs:
    """The cells of one optimizer in one form of parallelism.

    All ranks make it, and call ``run``; ``here`` and ``other`` are None where a rank is not there.
    """

    def __init__(self, kind: Kind, here: Place | None, other: Place | None, path: Path) -> None:
        self.kind, self.here, self.other, self.path = kind, here, other, path
        self.training: Training | None = None

    def run(self, cells: Sequence[Cell]) -> dict[Cell, tuple[str, str]]:
        """Return of each cell the stage that failed ("" for none), and what is wrong there."""
        problem: tuple[str, str] = ("", "")
        same = whole = None
        try:
            same, whole = self.save(gathers=any(cell.mesh == OTHER for cell in cells))
        except Stage as error:
            problem = error.told
        told: list[Any] = [problem, whole]
        dist.broadcast_object_list(told, src=0)
        if told[0][0]:
            failed: tuple[str, str] = tuple(told[0])
            return {cell: failed for cell in cells}  # noqa: C420 - which pyright would widen
        expected = {SAME: same, OTHER: self.expected(told[1])}
        found: dict[Cell, tuple[str, str]] = {}
        for cell in cells:
            try:
                wrong = self.cell(cell, expected[cell.mesh])
                found[cell] = ("wrong" if wrong else "", wrong)
            except Stage as error:
                found[cell] = error.told
            dist.barrier()
        return found

    def save(self, *, gathers: bool) -> tuple[Any, Any]:
        """Train and save; return an uninterrupted run then and later, and all of it gathered."""
        if self.here is None:
            return None, None
        self.training = training = Training.of(self.kind, self.here, 0)
        staged("steps", lambda: training.run(range(STEPS)))
        at_save = training.snapshot()
        group = self.here.group
        staged("save", lambda: ckpt.save(training.state, self.path, process_group=group))
        whole = None
        if gathers:
            with suppress(Exception):  # of what cannot be gathered
                whole = gathered(training)
        staged("steps", lambda: training.run(range(STEPS, 2 * STEPS)))
        return (at_save, training.snapshot()), whole

    def expected(self, whole: Any) -> Any:
        """Return a run on the other mesh to which all was moved in memory, then and later."""
        if self.other is None or whole is None:
            return None
        training = Training.of(self.kind, self.other, 2)
        distribute(whole, training)
        at_save = training.snapshot()
        try:
            staged("steps", lambda: training.run(range(STEPS, 2 * STEPS)))
        except Stage as error:
            return error
        return at_save, training.snapshot()

    def cell(self, cell: Cell, expected: Any) -> str:
        """Resume; return what is wrong, or "". Raises Stage for what fails."""
        place = self.here if cell.mesh == SAME else self.other
        if place is None:
            return ""
        training = Training.of(self.kind, place, 1)
        if cell.moment == "rollback" and cell.mesh == SAME and self.training is not None:
            training = self.training
        if cell.moment == "used":
            staged("steps", lambda: training.run(range(100, 105)))

        def load() -> None:
            ckpt.load(training.state, self.path, process_group=place.group)

        staged("load", load)
        if isinstance(expected, Stage):
            raise expected
        if cell.moment == "rollback" and cell.mesh == OTHER:
            staged("steps", lambda: training.run(range(STEPS, 2 * STEPS)))
            staged("load", load)
        if expected is None:
            return "there is nothing to compare it with: it cannot be gathered"
        return str(staged("steps", lambda: compared(training, *expected)))


def main(folder: str, listed: str) -> None:
    """Run cells; rank 0 prints them with what came of them."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps
    rank = join_group()
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}

    def place(parallelism: str, size: int) -> Place | None:
        return Place.of(parallelism, size, groups[size]) if rank < size else None

    found: dict[Cell, tuple[str, str]] = {}
    asked = [Cell(*told) for told in json.loads(listed)]
    for parallelism in dict.fromkeys(cell.parallelism for cell in asked):
        here = place(parallelism, 1 if parallelism == "single" else 4)
        other = place("fsdp2" if parallelism == "single" else parallelism, 2)
        for kind in KINDS:
            wanted = kind.name, parallelism
            cells = [cell for cell in asked if (cell.optimizer, cell.parallelism) == wanted]
            if cells:
                place_of_files = Path(folder) / parallelism / kind.name
                found |= Runs(kind, here, other, place_of_files).run(cells)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if rank == 0:
        told = [
            [*astuple(cell), *max((own[cell] for own in everyone), key=lambda told: bool(told[0]))]
            for cell in found
        ]
        print(json.dumps(told))
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
