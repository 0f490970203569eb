"""Settings of a ``with`` block; each thread has its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh

_STRICT: ContextVar[bool] = ContextVar("dtckpt_strict", default=False)
_MESHES: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("dtckpt_meshes", default=())
_REPLICATE: ContextVar[bool] = ContextVar("dtckpt_replicate", default=False)


@contextmanager
def strict(enabled: bool = True) -> Generator[None]:
    """Within it, an operator that has neither a rule nor a decomposition here raises UnsupportedOp.

    Outside it such an operator is decomposed as torch does it, or else gathered and run whole on
    every rank. ``strict(False)`` undoes it within a block.
    """
    token = _STRICT.set(enabled)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Return whether operators without a rule are errors."""
    return _STRICT.get()


@contextmanager
def implicit_replication() -> Generator[None]:
    """Within it, plain tensors beside distributed ones are taken as equal on all ranks.

    For code that makes its constants itself; nothing checks that they are equal. Outside of it a
    plain tensor of more than one element is compared across the ranks at every call, which costs a
    small collective, and raises PlacementError on all of them where it differs.
    """
    token = _REPLICATE.set(True)
    try:
        yield
    finally:
        _REPLICATE.reset(token)


def replicates_plain_tensors() -> bool:
    """Return whether all plain tensors are taken as replicated."""
    return _REPLICATE.get()


def enter_mesh(mesh: DeviceMesh) -> None:
    """Make a mesh the active one until ``leave_mesh``."""
    _MESHES.set((*_MESHES.get(), mesh))


def leave_mesh() -> None:
    """Make the mesh before the active one active again."""
    _MESHES.set(_MESHES.get()[:-1])


def active_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost ``with mesh:`` of this thread, if any."""
    meshes = _MESHES.get()
    return meshes[-1] if meshes else None
