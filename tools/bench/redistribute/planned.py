"""Bytes, memory and plans of redistribute for every pair of layouts, without moving anything."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import torch

from dtckpt.dtensor import Explanation, Layout, Mesh, explain

from ..frame.timing import OURS
from .layouts import (
    Held,
    Transition,
    boxes_of,
    lacking,
    numels,
    ordered_transitions,
    transitions,
)
from .torch_planner import Counts, TorchPlanner

_DTYPE = torch.float32
_SAMPLE_SEED = 5
_SAMPLE_MESHES = ((8,), (3,), (2, 4), (3, 2), (4, 4), (2, 2, 2), (2, 3, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Transitions of tensors that are looked at together."""

    name: str
    cases: tuple[tuple[Transition, tuple[int, ...]], ...]
    """Each with the shape of its tensor."""
    with_torch: bool = True


def settings(every: int, samples: int) -> list[Setting]:
    """Return all settings; ``every`` n-th pair of each, and so many random ones."""
    found: list[Setting] = []
    for mesh, shape in (
        ((8,), (8192, 8192)),
        ((2, 4), (8192, 8192)),
        ((4, 4), (8192, 8192)),
        ((2, 2, 2), (512, 512, 512)),
    ):
        text = "x".join(map(str, shape))
        plain = transitions(mesh, len(shape))[::every]
        found.append(Setting(name=f"{mesh}, {text}", cases=tuple((c, shape) for c in plain)))
        if len(mesh) == 2:
            ordered = tuple((c, shape) for c in ordered_transitions(mesh, len(shape))[::every])
            name = f"{mesh}, {text}, other orders"
            found.append(Setting(name=name, cases=ordered, with_torch=False))
    cube = (512, 512, 512)
    orders = tuple((c, cube) for c in ordered_transitions((2, 2, 2), 3)[:: 16 * every])
    found.append(
        Setting(
            name="(2, 2, 2), 512x512x512, other orders, 1 of 16", cases=orders, with_torch=False
        )
    )
    found.append(Setting(name="random, uneven and empty", cases=tuple(_random_cases(samples))))
    return found


def _random_cases(number: int) -> Iterable[tuple[Transition, tuple[int, ...]]]:
    chosen = random.Random(_SAMPLE_SEED)
    while number:
        mesh = chosen.choice(_SAMPLE_MESHES)
        ndim = chosen.randint(1, 3)
        axes = [tuple(chosen.choice([None, *range(ndim)]) for _ in mesh) for _ in range(2)]
        if axes[0] == axes[1]:
            continue
        shape = tuple(chosen.choice([1, 2, 3, 5, 7, 8, 16, 33, 100]) for _ in range(ndim))
        yield (
            Transition(mesh=mesh, source=Held(axes=axes[0]), target=Held(axes=axes[1])),
            shape,
        )
        number -= 1


@dataclass(slots=True, kw_only=True)
class Side:
    """What the plans of one system come to, over all pairs for which something has to move."""

    ratios: list[float] = field(default_factory=list[float])
    """What the busiest rank receives over what the one that lacks most has to."""
    above: int = 0
    """Pairs in which some rank receives more than it lacks."""
    extra: int = 0
    """The most memory that a rank takes beyond its source and its target."""
    collectives: list[int] = field(default_factory=list[int])

    def add(self, bound: Counts, received: Counts, extra: Counts, collectives: int) -> None:
        """Count a pair; bytes by rank."""
        self.ratios.append(float(received.max() / bound.max()))
        self.above += bool((received > bound).any())
        self.extra = max(self.extra, int(extra.max()))
        self.collectives.append(collectives)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of the tables."""
        if not self.ratios:
            return {}
        return {
            "above": self.above,
            "mean": mean(self.ratios),
            "max": max(self.ratios),
            "extra_bytes": self.extra,
            "mean_collectives": mean(self.collectives),
            "max_collectives": max(self.collectives),
        }


@dataclass(slots=True, kw_only=True)
class Simulated:
    """What a setting came to."""

    name: str
    pairs: int = 0
    moving: int = 0
    """Pairs in which some rank lacks something."""
    needless: int = 0
    """Pairs in which nobody lacks anything, and yet something is sent."""
    below: int = 0
    """Pairs in which we say that a rank receives less than it lacks: a wrong count."""
    over_memory: int = 0
    """Pairs in which a rank takes more than source, target and the buffer."""
    buffer_bytes: int = 0
    """The largest buffer."""
    whys: dict[str, str] = field(default_factory=dict[str, str])
    """What the cost model says of pairs above the bound."""
    sides: dict[str, Side] = field(default_factory=dict[str, Side])

    def to_json(self) -> dict[str, Any]:
        """Return everything but single pairs."""
        return asdict(self) | {"sides": {name: side.to_json() for name, side in self.sides.items()}}


GREEDY, CHEAPEST, ON_GLOO = "torch", "torch, its search", "torch, on Gloo"


def simulate(setting: Setting) -> Simulated:
    """Plan every pair of a setting, ours and torch's."""
    found = Simulated(name=setting.name)
    planners: dict[tuple[int, ...], TorchPlanner] = {}
    for change, shape in setting.cases:
        mesh = change.mesh
        bound = lacking(change.source, change.target, mesh, shape)
        _add_ours(found, change, shape, bound)
        if not setting.with_torch or not bound.any():
            continue
        if mesh not in planners:
            planners[mesh] = TorchPlanner(mesh)
        held = numels(boxes_of(change.source, mesh, shape))
        held += numels(boxes_of(change.target, mesh, shape))
        greedy = planners[mesh].plan(change, shape, cheapest=False)
        cheapest = planners[mesh].plan(change, shape, cheapest=True)
        for name, plan, received, peak in (
            (GREEDY, greedy, greedy.received, greedy.peak),
            (ON_GLOO, greedy, greedy.received_on_gloo, greedy.peak_on_gloo),
            (CHEAPEST, cheapest, cheapest.received, cheapest.peak),
        ):
            size, side = _DTYPE.itemsize, found.sides.setdefault(name, Side())
            side.add(size * bound, size * received, size * (peak - held), plan.collectives)
    return found


def explained(change: Transition, shape: Sequence[int]) -> Explanation:
    """Return what the library says about a transition of a float32 tensor."""
    mesh = Mesh(change.mesh)
    source, target = (
        Layout(mesh, held.placements(), tuple(shape)) for held in (change.source, change.target)
    )
    return explain(source, target, _DTYPE)


def num_collectives(told: Explanation) -> int:
    """Return how many steps of a plan communicate."""
    return sum(not step.startswith(("local", "one term")) for step in told.steps)


def _add_ours(found: Simulated, change: Transition, shape: tuple[int, ...], bound: Counts) -> None:
    told = explained(change, shape)
    size = _DTYPE.itemsize
    received, peak = (
        np.array([by_rank[rank] for rank in told.ranks], dtype=np.int64)
        for by_rank in (told.received_bytes, told.peak_bytes)
    )
    old, new = (
        size * numels(boxes_of(held, change.mesh, shape)) for held in (change.source, change.target)
    )
    found.pairs += 1
    found.buffer_bytes = max(found.buffer_bytes, told.buffer_bytes)
    found.over_memory += bool((peak > old + new + told.buffer_bytes).any())
    found.below += bool((received < size * bound).any())
    if not bound.any():
        found.needless += bool(received.any())
        return
    found.moving += 1
    side = found.sides.setdefault(OURS, Side())
    above = side.above
    side.add(size * bound, received, peak - old - new, num_collectives(told))
    if side.above > above:
        found.whys[f"{change} of {shape}"] = told.why or "no other way"
