"""What fails because of values fails on every rank that takes part, not on one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.reductions import all_reduce
from ...comm.traffic import asking
from ...mesh.spec import DTensorSpec
from ...torch_private import is_traced
from .local_kernels import zeros_if_empty
from .table import LocalCall

_linalg: Any = torch.linalg
"""torch's stubs leave out its error class."""


def agreeing(local: LocalCall) -> Callable[..., Any]:
    """Return the operator with an exchange of failures between the ranks that split its inputs."""
    run = zeros_if_empty(local) or local.call.op
    return agreed(run, str(local.call.op), local.inputs, _linalg.LinAlgError)


def agreed(
    run: Callable[..., Any], name: str, inputs: Sequence[DTensorSpec], raises: type[RuntimeError]
) -> Callable[..., Any]:
    """Return ``run`` with an exchange after it: where it fails on one rank, it fails on all.

    The ranks are those that split the inputs; each must call. The rank where it failed raises what
    it met, the others ``raises``.
    """
    mesh = inputs[0].mesh
    axes = [
        axis
        for axis, count in enumerate(mesh.shape)
        if count > 1 and any(spec.placements[axis].is_shard() for spec in inputs)
    ]
    if not axes:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        if is_traced(first):  # a graph has no values to fail by while it is recorded
            return run(*args, **kwargs)
        device = first.device
        error: RuntimeError | None = None
        result: Any = None
        try:
            result = run(*args, **kwargs)
        except RuntimeError as met:
            error = met
        if device.type == "meta" and error is None:
            return result
        failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
        with asking("agreement"):
            for axis in axes:
                failed = all_reduce(failed, "max", mesh.peers((axis,)))
        if error is not None:
            raise error
        if failed.item():
            raise raises(f"{name} failed on another rank, for the part that it holds")
        return result

    return call
