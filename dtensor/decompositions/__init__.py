"""Operators that are split into others which have rules, by family."""

from __future__ import annotations

from importlib import import_module

from .table import DECOMPOSITIONS, UNBOUND

FAMILIES = (
    "attention",
    "batch_norm",
    "copies",
    "counting",
    "extremes",
    "indexing",
    "linalg",
    "list_norms",
    "losses",
    "moments",
    "normalisation",
    "norms",
    "optimizer_steps",
    "random",
    "rearranging",
    "sampling",
    "scans",
    "softmax",
    "sums",
    "whole",
)
"""Modules that fill the table when they are imported, which is here."""

for _family in FAMILIES:
    import_module(f".{_family}", __name__)

__all__ = ["DECOMPOSITIONS", "FAMILIES", "UNBOUND"]
