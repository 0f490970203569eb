"""What torch's planner would do, by its own functions, without any communication.

They are private, so a torch of another version may lack them; ``TorchPlanner`` then raises
ImportError or AttributeError, and its columns stay empty.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from ..distributed import Axis, both
from ..frame.timing import seconds_of
from .layouts import Held, Transition, boxes_of, lacking, numels

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan:
    """What one plan moves, in elements by rank."""

    received: Counts
    """If a shard moves from dim to dim by an all-to-all, as it does on GPUs."""
    received_on_gloo: Counts
    """If it does by an all-gather, as it does on CPUs."""
    peak: Counts
    """The most that source, input and output of a step take together, without padding."""
    peak_on_gloo: Counts
    """The same with what is gathered to be cut again."""
    collectives: int


class TorchPlanner:
    """The plans of torch's DTensor on one mesh of the fake job."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self._planning: Any = importlib.import_module("torch.distributed.tensor._redistribute")
        self._specs: Any = importlib.import_module("torch.distributed.tensor._dtensor_spec")
        self._plan: Callable[..., Sequence[Any]] = self._planning._gen_transform_infos_non_cached
        self._remembered: Callable[..., Sequence[Any]] = self._planning._gen_transform_infos
        self.mesh = mesh
        self.device_mesh = init_device_mesh("cpu", mesh)
        self._library, _ = both(self.device_mesh)

    def plan(self, change: Transition, shape: tuple[int, ...], *, cheapest: bool) -> TorchPlan:
        """Return its plan: the greedy one, which is the default, or the ``cheapest`` it finds."""
        source, target = self._spec(change.source, shape), self._spec(change.target, shape)
        held = change.source
        given = numels(boxes_of(held, self.mesh, shape))
        received, on_gloo = np.zeros_like(given), np.zeros_like(given)
        peak = np.maximum(given, numels(boxes_of(change.target, self.mesh, shape)))
        peak_on_gloo = peak
        collectives = 0
        for number, info in enumerate(self._plan(source, target, cheapest)):
            then = self._after(held, info)
            old, new = (numels(boxes_of(h, self.mesh, shape)) for h in (held, then))
            held_now = given + (old if number else 0) + new
            peak = np.maximum(peak, held_now)
            before, after = held.axes[info.mesh_dim], then.axes[info.mesh_dim]
            if isinstance(before, int):
                gathered = self._widest(old, info.mesh_dim) * (self.mesh[info.mesh_dim] - 1)
                moved = lacking(held, then, self.mesh, shape)
                received += gathered if after is None else moved
                whole = 0 if after is None else gathered + old
                peak_on_gloo = np.maximum(peak_on_gloo, held_now + whole)
                on_gloo += gathered
                collectives += 1
            held = then
        return TorchPlan(
            received=received,
            received_on_gloo=on_gloo,
            peak=peak,
            peak_on_gloo=np.maximum(peak, peak_on_gloo),
            collectives=collectives,
        )

    def cold_seconds(self, change: Transition, shape: tuple[int, ...]) -> float:
        """Return the processor seconds of a greedy plan for specs that it has not seen."""
        self._planning.clear_redistribute_planner_cache()
        source = self._spec(change.source, shape)
        return seconds_of(lambda: self._plan(source, self._spec(change.target, shape), False))

    def cached_seconds(self, change: Transition, shape: tuple[int, ...], calls: int) -> float:
        """Return the same for one that it remembers."""
        source, target = self._spec(change.source, shape), self._spec(change.target, shape)
        self._remembered(source, target)
        return seconds_of(lambda: self._remembered(source, target), calls)

    def _spec(self, held: Held, shape: tuple[int, ...]) -> Any:
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        meta = self._specs.TensorMeta(torch.Size(shape), stride, torch.float32)
        return self._specs.DTensorSpec(
            self.device_mesh, tuple(self._library.placements(held.axes)), tensor_meta=meta
        )

    def _after(self, held: Held, info: Any) -> Held:
        target: Any = info.src_dst_placements[1]
        axes: list[Axis] = list(held.axes)
        axes[info.mesh_dim] = target.dim if target.is_shard() else None
        return Held(axes=tuple(axes))

    def _widest(self, held: Counts, axis: int) -> Counts:
        """Return the largest part among the ranks along an axis: all are padded to it."""
        grid = held.reshape(self.mesh)
        return np.broadcast_to(grid.max(axis=axis, keepdims=True), self.mesh).reshape(-1)
