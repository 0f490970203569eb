"""Seeing what happens: collectives counted and checked, layouts drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from .caches import cache_sizes, clear_caches
    from .checking import checking_collectives
    from .comm_counts import CommCounts
    from .comm_mode import CommDebugMode
    from .coverage import op_coverage
    from .pictures.sharding import visualize_sharding

__all__ = [
    "CommCounts",
    "CommDebugMode",
    "cache_sizes",
    "checking_collectives",
    "clear_caches",
    "op_coverage",
    "visualize_sharding",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            ".caches": "cache_sizes clear_caches",
            ".checking": "checking_collectives",
            ".comm_counts": "CommCounts",
            ".comm_mode": "CommDebugMode",
            ".coverage": "op_coverage",
            ".pictures.sharding": "visualize_sharding",
        },
    )


def __dir__() -> list[str]:
    return __all__
