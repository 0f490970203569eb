"""Results that nothing is known of but that they are the same on all ranks and for all layouts."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from dtckpt.dtensor import DTensor

from .values import cut, equal_values, flattened, same_seen


class Agreement:
    """The results that came first, which all others must be equal to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._firsts: dict[object, list[Tensor]] = {}

    def problems(self, case: object, result: Any, tolerance: tuple[float, float]) -> list[str]:
        """Return how a result differs from those of other ranks and cases.

        All ranks of a case call it together.
        """
        tensors = [leaf for leaf in flattened(result) if isinstance(leaf, DTensor)]
        wholes = [tensor.full_tensor().detach() for tensor in tensors]
        with self._lock:
            of_case = self._firsts.setdefault(case, wholes)
            of_all = self._firsts.setdefault(None, wholes)
        if not same_seen(of_case, wholes) or not all(map(_is_consistent, tensors, wholes)):
            return ["replicas differ"]
        different = [equal_values(a, b, tolerance) for a, b in zip(wholes, of_all, strict=False)]
        return [f"depends on placements: {problem}" for problem in different if problem]


def _is_consistent(tensor: DTensor, whole: Tensor) -> bool:
    """Whether the part that a rank holds is that of what is gathered."""
    if any(placement.is_partial() for placement in tensor.placements):
        return True
    part = cut(whole, tensor.global_layout, tensor.device_mesh)
    return same_seen(part, tensor.to_local().detach())
