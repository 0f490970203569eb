"""In which dtypes a sharded module computes and communicates, and where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of one sharded module; its sharded parameters keep theirs.

    Optimizers and checkpoints see those, in full precision.
    """

    param_dtype: torch.dtype | None = None
    """Dtype of the whole parameters, in which they are gathered and the module computes."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over the ranks, and on a rank while they wait.

    None for the ``grad_dtype`` of each parameter, which is its own dtype unless it is set, whatever
    ``param_dtype`` is (torch: since 2.15). A ``grad_dtype`` of None stands for the dtype in which
    gradients come, that of the computation."""
    output_dtype: torch.dtype | None = None
    """Dtype to which floating-point outputs of the module are cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module are cast to ``param_dtype``."""
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )
    """Function that is called once for each parameter, by ``fully_shard``.

    Where it returns the dtype of the parameter, that one is gathered and used in its own dtype;
    None and ``param_dtype`` stand for ``param_dtype``. It has to return the same on all ranks."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            given: object = getattr(self, name)
            if given is not None and not isinstance(given, torch.dtype):
                raise ValueError(
                    f"MixedPrecisionPolicy: {name} must be a torch.dtype or None, got {given!r}"
                )


def keeps_dtype(policy: MixedPrecisionPolicy, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is to be computed with in its own dtype.

    Raises ValueError where ``param_dtype_override_fn`` returns what it must not.
    """
    choose: Any = getattr(policy, "param_dtype_override_fn", None)  # torch's own: since 2.15
    if choose is None:
        return False
    chosen: object = choose(parameter)
    if chosen is not None and chosen not in (policy.param_dtype, parameter.dtype):
        raise ValueError(
            "MixedPrecisionPolicy: param_dtype_override_fn must return None, param_dtype "
            f"({policy.param_dtype}) or the dtype of the parameter ({parameter.dtype}), got "
            f"{chosen!r} for {name!r}"
        )
    return chosen == parameter.dtype


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Sharded parameters lie on the devices of the mesh."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters lie in the memory of the CPU, and so do gradients and optimizer state.

    They are copied to the device of the mesh to be gathered, and reduced gradients back; optimizers
    step on the CPU. What reduces over ranks what lies there, as clipping does, needs a backend for
    CPU tensors: a job of ``init_process_group("cpu:gloo,cuda:nccl")``.
    """

    pin_memory: bool = True
    """Whether that memory is pinned, from which copies are quicker; it cannot be swapped out."""
