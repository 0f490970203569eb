"""Settings of a ``with`` block: of a thread or task, and of autograd's threads that work for it.

On accelerators a backward pass runs in threads of autograd. What holds where it was started holds
there, too: the settings are handed on beside the context variable that other code reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dtckpt.errors import PlacementError

from ..torch_private import hand_to_autograd, handed_to_autograd

if TYPE_CHECKING:
    from .torch_mesh import TorchMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    is_strict: bool = False
    replicates: bool = False
    leaves_partial: bool = False
    is_mesh_independent: bool = False
    runs_part: bool = False
    meshes: tuple[TorchMesh, ...] = ()
    attention: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class _Handed:
    """What a thread hands to those in which autograd works for it."""

    thread: int
    settings: _Settings


_KEY = "dtckpt_settings"
_DEFAULT = _Settings()
_SETTINGS: ContextVar[_Settings | None] = ContextVar("dtckpt_settings", default=None)

_Before = tuple[Token[_Settings | None], _Handed | None]
_ENTERED: ContextVar[tuple[_Before, ...]] = ContextVar("dtckpt_entered", default=())
"""What there was before each mesh that is active."""


def _now() -> _Settings:
    found = _SETTINGS.get()
    if found is None:
        handed = _handed_here()
        return _DEFAULT if handed is None else handed.settings
    return found


def _handed_here() -> _Handed | None:
    """Return what another thread has handed to this one: None but in threads of autograd.

    What this thread has handed on itself may be of another of its asyncio tasks.
    """
    handed = handed_to_autograd(_KEY)
    is_others = isinstance(handed, _Handed) and handed.thread != threading.get_ident()
    return handed if is_others else None


def _set(settings: _Settings) -> _Before:
    before = _SETTINGS.set(settings), _handed_here()
    hand_to_autograd(_KEY, _Handed(threading.get_ident(), settings))
    return before


def _restore(before: _Before) -> None:
    token, handed = before
    _SETTINGS.reset(token)
    now = _SETTINGS.get()  # not what was handed on before: blocks of tasks end in any order
    own = None if now is None else _Handed(threading.get_ident(), now)
    hand_to_autograd(_KEY, own or handed)


@contextmanager
def _within(**settings: Any) -> Generator[None]:
    """Let settings be others within a block."""
    before = _set(replace(_now(), **settings))
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def strict(enabled: bool = True) -> Generator[None]:
    """Within it, an operator that has neither a rule nor a decomposition here raises UnsupportedOp.

    Outside it such an operator is decomposed as torch does it, or else gathered and run whole on
    every rank. ``strict(False)`` undoes it within a block.
    """
    with _within(is_strict=enabled):
        yield


def is_strict() -> bool:
    """Return whether operators without a rule are errors."""
    return _now().is_strict


@contextmanager
def implicit_replication() -> Generator[None]:
    """Within it, plain tensors beside distributed ones are taken as equal on all ranks.

    For code that makes its constants itself; nothing checks that they are equal. Outside of it a
    plain tensor of more than one element is compared across the ranks at every call, which costs a
    small collective, and raises PlacementError on all of them where it differs.
    """
    with _within(replicates=True):
        yield


def replicates_plain_tensors() -> bool:
    """Return whether all plain tensors are taken as replicated."""
    return _now().replicates


@contextmanager
def partial_gradients() -> Generator[None]:
    """Within it, the gradients of leaves stay as operators leave them, often Partial.

    Backward passes then add terms up and send nothing for leaves; `reduce_gradients` reduces what
    has come together. The block counts while ``backward`` runs, not while the loss is computed.
    """
    with _within(leaves_partial=True):
        yield


def leaves_partial_gradients() -> bool:
    """Return whether gradients of leaves stay as they come."""
    return _now().leaves_partial


@contextmanager
def mesh_independent() -> Generator[None]:
    """Within it, sums over ranks that are rounded in an order which depends on the mesh are errors.

    ``dtckpt.dtensor.elastic`` has the sums that are not.
    """
    with _within(is_mesh_independent=True):
        yield


@contextmanager
def running_part() -> Generator[None]:
    """Within it, this rank runs a part of a batch that is its own."""
    with _within(runs_part=True):
        yield


def require_no_part() -> None:
    """Raise PlacementError within ``running_part``: ranks are to draw random numbers alike."""
    if _now().runs_part:
        raise PlacementError(
            "random numbers of a DTensor on several ranks were to be drawn within a part of a step "
            "of ElasticSteps, where each rank runs elements of its own: draw them for plain "
            "tensors, whose numbers are a function of seed, step and group, or outside of the loop"
        )


def require_order_free(dtype: torch.dtype, reduce_op: str) -> None:
    """Raise PlacementError within ``mesh_independent`` where the bits depend on who has the terms.

    Those of integers, and of maxima and minima, do not.
    """
    if reduce_op in ("max", "min") or not (dtype.is_floating_point or dtype.is_complex):
        return
    if _now().is_mesh_independent:
        raise PlacementError(
            f"within a step of ElasticSteps, {str(dtype).removeprefix('torch.')} terms of several "
            f"ranks were to be reduced ({reduce_op}), whose rounding depends on the mesh: use the "
            "backward, mean_loss and clip_grad_norm_ of ElasticSteps, or do it outside of the step"
        )


@contextmanager
def attending_by(attention: Callable[..., Any]) -> Generator[None]:
    """Within it, ``attention`` is what ``shared_attention`` returns: it stands for torch's."""
    with _within(attention=attention):
        yield


def shared_attention() -> Callable[..., Any] | None:
    """Return what stands for torch's attention where ranks share a sequence, if they do."""
    return _now().attention


def is_autocasting(device_type: str) -> bool:
    """Return whether ``torch.autocast`` counts for operators on such devices."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def enter_mesh(mesh: TorchMesh) -> None:
    """Make a mesh the active one until ``leave_mesh``."""
    now = _now()
    before = _set(replace(now, meshes=(*now.meshes, mesh)))
    _ENTERED.set((*_ENTERED.get(), before))


def leave_mesh() -> None:
    """Make the mesh before the active one active again."""
    *rest, before = _ENTERED.get()
    _ENTERED.set(tuple(rest))
    _restore(before)


def active_mesh() -> TorchMesh | None:
    """Return the mesh of the innermost ``with mesh:`` of this thread and task, if any."""
    meshes = _now().meshes
    return meshes[-1] if meshes else None
