"""In which dtypes a sharded module computes and communicates, and where its parameters lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes of one sharded module; its sharded parameters keep theirs.

    Optimizers and checkpoints see those, in full precision.
    """

    param_dtype: torch.dtype | None = None
    """Of the whole parameters, in which they are gathered and the module computes."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed over the ranks; None for that of the computation."""
    output_dtype: torch.dtype | None = None
    """To which floating-point outputs of the module are cast."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module are cast to ``param_dtype``."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            given: object = getattr(self, name)
            if given is not None and not isinstance(given, torch.dtype):
                raise ValueError(
                    f"MixedPrecisionPolicy: {name} must be a torch.dtype or None, got {given!r}"
                )


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
