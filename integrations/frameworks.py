"""Importing a framework, or saying how to install it."""

from __future__ import annotations

import importlib
from typing import Any


def framework(extra: str, module: str) -> Any:
    """Return a module of a framework, which is far too large to be type-checked.

    ImportError with the line that installs it where it is missing, or lacks a module of its own.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"dtckpt.integrations.{extra} needs {module}, which cannot be imported: {error}. "
            f'Install it with: pip install "dtckpt[{extra}]"'
        ) from error
