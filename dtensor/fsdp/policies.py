"""In which dtypes a sharded module computes and communicates."""

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
