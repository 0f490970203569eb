"""The kinds of lines that programs are made of, a family of operators a file.

The modules register their lines when they are imported. The order is part of what a seed stands
for: a new module comes last.
"""

from . import (  # noqa: I001
    pointwise,
    views,
    writes,
    plain,
    reductions,
    products,
    losses,
    norms,
    indexing,
    modules,
)
from .producers import PRODUCERS

__all__ = [
    "PRODUCERS",
    "indexing",
    "losses",
    "modules",
    "norms",
    "plain",
    "pointwise",
    "products",
    "reductions",
    "views",
    "writes",
]
