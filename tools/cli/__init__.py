"""The ``dtckpt`` command; one file for each of its subcommands, and what they share."""

from __future__ import annotations

from .command import main

__all__ = ["main"]
