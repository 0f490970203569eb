# pyright: reportUnnecessaryTypeIgnoreComment=true
"""A misspelt name is an error for the type checker, too: if it were none, the comment would be."""

from __future__ import annotations

import importlib

import pytest

import dtckpt
import dtckpt.checkpoint as ckpt
from dtckpt import dtensor, errors, storage
from dtckpt.dtensor import debug


def test_misspelt_names() -> None:
    with pytest.raises(AttributeError):
        ckpt.svae({}, "x")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        dtensor.Shrad(0)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        debug.CommMode()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        storage.Localstore("x")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError):
        print(dtckpt.version)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError):
        from dtckpt.checkpoint import saev  # pyright: ignore  # noqa: F401


def test_errors_are_where_they_are_looked_for() -> None:
    """Each is in errors, and beside the functions that raise it."""
    assert ckpt.Corrupt is errors.Corrupt
    for name in errors.__all__:
        homes = [m for m in ("checkpoint", "dtensor", "storage") if hasattr(_package(m), name)]
        assert homes, name
        assert {getattr(_package(m), name) for m in homes} == {getattr(errors, name)}


def _package(name: str) -> object:
    return importlib.import_module(f"dtckpt.{name}")
