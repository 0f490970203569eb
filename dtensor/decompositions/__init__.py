"""Operators that are split into others which have rules, by family."""

from __future__ import annotations

from . import (
    attention,
    batch_norm,
    copies,
    counting,
    extremes,
    indexing,
    linalg,
    list_norms,
    losses,
    moments,
    normalisation,
    norms,
    optimizer_steps,
    random,
    rearranging,
    scans,
    softmax,
    sums,
    whole,
)
from .table import DECOMPOSITIONS, UNBOUND

FAMILIES = (
    attention,
    batch_norm,
    copies,
    counting,
    extremes,
    indexing,
    linalg,
    list_norms,
    losses,
    moments,
    normalisation,
    norms,
    optimizer_steps,
    random,
    rearranging,
    scans,
    softmax,
    sums,
    whole,
)
"""Modules that fill the table when they are imported."""

__all__ = ["DECOMPOSITIONS", "FAMILIES", "UNBOUND"]
