"""How long plans take: ours and torch's, made and looked up."""

from __future__ import annotations

import math
from functools import partial
from statistics import median

import torch

from dtckpt.dtensor import DeviceMesh
from dtckpt.dtensor.mesh.spec import spec_of
from dtckpt.dtensor.redistribute import plan_redistribute

from ..frame.timing import seconds_of, undisturbed
from .layouts import transitions
from .torch_planner import TorchPlanner

_MESH = (2, 2, 2)
_TRIES = 3
_LOOK_UPS = 200

PlanTimes = dict[str, list[float]]
"""Processor seconds, one a pair, of the target's ``spec`` for a shape that was not seen before (all
is done for rank 0), of the plan, ``cold`` and ``cached``, and of torch's."""


def time_plans(every: int) -> PlanTimes:
    """Time the plans of every n-th pair of tensors of three dims, each as the median of three."""
    planner = TorchPlanner(_MESH)
    mesh = DeviceMesh.from_torch(planner.device_mesh)
    times: PlanTimes = {}
    rows = 0
    with undisturbed():
        for change in transitions(_MESH, 3)[::every]:
            tries: PlanTimes = {}
            for _ in range(_TRIES):
                rows += math.prod(_MESH)
                shape = (rows, 512, 512)
                source = spec_of(mesh, change.source.placements(), shape, None, torch.float32)
                make_spec = partial(source.with_placements, change.target.placements())
                spec_seconds = seconds_of(make_spec)
                plan = partial(plan_redistribute, source, make_spec())
                for name, seconds in {
                    "spec": spec_seconds,
                    "cold": seconds_of(plan),
                    "cached": seconds_of(plan, _LOOK_UPS),
                    "torch_cold": planner.cold_seconds(change, shape),
                    "torch_cached": planner.cached_seconds(change, shape, _LOOK_UPS),
                }.items():
                    tries.setdefault(name, []).append(seconds)
            for name, found in tries.items():
                times.setdefault(name, []).append(median(found))
    return times


def summary(times: PlanTimes) -> dict[str, float]:
    """Return medians and maxima."""
    return {
        f"{name}_{what}": of(found)
        for name, found in times.items()
        for what, of in (("median", median), ("max", max))
    }
