"""``parallelize_module`` under the name of torch's module."""

from __future__ import annotations

from .parallelize import parallelize_module

__all__ = ["parallelize_module"]
