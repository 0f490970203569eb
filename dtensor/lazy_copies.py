"""Copies in memory of their own, which take it when one of the two is first written.

Where nothing has to move, as on a mesh of one rank, a tensor that is to be independent of another
one costs nothing until then. Only memory of CPUs is shared so: on accelerators torch would copy on
whichever stream writes first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_lazy_clone: Callable[[Tensor], Tensor] | None = getattr(torch, "_lazy_clone", None)
"""Private: what torch has for this. Where it is missing, copies are made at once."""


def own_copy(local: Tensor) -> Tensor:
    """Return a contiguous copy; what is written to either is never seen in the other.

    Memory is taken at once where the tensor does not fill its own, or torch cannot share it.
    """
    if _lazy_clone is not None and local.device.type == "cpu" and _fills_memory(local):
        try:
            return _lazy_clone(local)
        except RuntimeError:  # memory of others, as that of numpy, or shared between processes
            pass
    return local.clone(memory_format=torch.contiguous_format)


def _fills_memory(local: Tensor) -> bool:
    # The whole of it would be kept alive, and copied.
    whole = local.untyped_storage().nbytes() == local.nbytes
    return whole and local.is_contiguous() and not (local.is_conj() or local.is_neg())
