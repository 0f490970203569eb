"""What fails because of values fails on every rank that takes part, not on one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.reductions import all_reduce
from ...comm.traffic import asking
from ...mesh.device_mesh import DeviceMesh
from .local_kernels import zeros_if_empty
from .table import LocalCall

_linalg: Any = torch.linalg
"""torch's stubs leave out its error class."""


def agreeing(local: LocalCall) -> Callable[..., Any]:
    """Return the operator with an exchange of failures between the ranks that split its inputs."""
    placements = [spec.placements for spec in local.inputs]
    mesh = local.call.specs[0].mesh
    several = [axis for axis, count in enumerate(mesh.shape) if count > 1]
    axes = [axis for axis in several if any(p[axis].is_shard() for p in placements)]
    run = zeros_if_empty(local) or local.call.op
    return agreed(run, str(local.call.op), mesh, axes) if axes else run


def agreed(
    run: Callable[..., Any], name: str, mesh: DeviceMesh, axes: Sequence[int]
) -> Callable[..., Any]:
    """Return ``run`` with an exchange after it: where it fails on one rank, it fails on all.

    The ranks are those that differ along ``axes``; each must call. The rank where it failed raises
    what it met, the others LinAlgError.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        error: RuntimeError | None = None
        result: Any = None
        try:
            result = run(*args, **kwargs)
        except RuntimeError as met:
            error = met
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).device
        if device.type == "meta" and error is None:
            return result
        failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
        with asking("agreement"):
            for axis in axes:
                failed = all_reduce(failed, "max", mesh.peers((axis,)))
        if error is not None:
            raise error
        if failed.item():
            raise _linalg.LinAlgError(
                f"{name} failed on another rank, for the part of the batch that it holds"
            )
        return result

    return call
