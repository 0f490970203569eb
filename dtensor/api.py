"""DTensors and what makes them, under the name of torch's module."""

from __future__ import annotations

from .dtensor import DTensor, distribute_tensor
from .factories import empty, full, linspace, logspace, ones, rand, randn, zeros
from .modules import distribute_module

__all__ = [
    "DTensor",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
]
