"""Operators that are split into others which have rules, by family."""

from __future__ import annotations

from . import norms
from .table import DECOMPOSITIONS

FAMILIES = (norms,)
"""Modules that fill the table when they are imported."""

__all__ = ["DECOMPOSITIONS", "FAMILIES"]
