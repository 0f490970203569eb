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
