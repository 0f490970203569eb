"""Context parallelism under the name of torch's module."""

from __future__ import annotations

from ..attention.context import context_parallel
from ..attention.function import context_parallel_attention
from ..attention.rotation import set_rotate_method
from ..attention.unsharding import context_parallel_unshard

__all__ = [
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_unshard",
    "set_rotate_method",
]
