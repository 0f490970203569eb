"""Copies in memory of their own, which take it when one of the two is first written.

Where nothing has to move, as on a mesh of one rank, a tensor that is to be independent of another
one costs nothing until then. Only memory of CPUs is shared so: on accelerators torch would copy on
whichever stream writes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_private import lazy_clone


def own_copy(local: Tensor) -> Tensor:
    """Return a contiguous copy; what is written to either is never seen in the other.

    Memory is taken at once where the tensor does not fill its own, or torch cannot share it.
    """
    if lazy_clone is not None and local.device.type == "cpu" and _fills_memory(local):
        try:
            return lazy_clone(local)
        except RuntimeError:  # memory of others, as that of numpy, or shared between processes
            pass
    return local.clone(memory_format=torch.contiguous_format)


def _fills_memory(local: Tensor) -> bool:
    # The whole of it would be kept alive, and copied.
    whole = local.untyped_storage().nbytes() == local.nbytes
    return whole and local.is_contiguous() and not (local.is_conj() or local.is_neg())
