"""Notes that autograd keeps of whole parameters between the passes, in place of their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..dtensor import DTensor
from ..mesh.spec import DTensorSpec
from ..tensor.wrapper import Wrapper
from ..torch_private import are_of_checkpointing, saved_hooks, storage_id
from .held import Held
from .sharding import is_subclass
from .unit import Unit, Versions

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Noting:
    """A context within which autograd keeps notes of the whole parameters of a unit.

    All else is kept as those want that were there before: activation checkpointing, say. It is left
    once, however often that is asked for, and wherever Ctrl-C comes.
    """

    def __init__(self, unit: Unit) -> None:
        self.note = _Pack(unit, saved_hooks())
        self._hooks = saved_tensors_hooks(self.note, _recalled)
        self._is_entered: bool | None = False
        """None while that changes."""

    def enter(self) -> None:
        """Enter it."""
        self._is_entered = None
        self._hooks.__enter__()
        self._is_entered = True

    def leave(self) -> None:
        """Leave it, if it is entered."""
        is_entered, self._is_entered = self._is_entered, None
        if is_entered is None:  # something stopped the program just there
            top = saved_hooks()
            is_entered = top is not None and top[0] is self.note
        if is_entered:
            self._hooks.__exit__(None, None, None)
        self._is_entered = False


class _Pack:
    """Makes notes of whole parameters; asks the hooks that were there before to keep all else."""

    def __init__(self, unit: Unit, outer: Hooks | None) -> None:
        self._unit, self._outer = unit, outer
        # Checkpointing keeps nothing, but counts what it is asked to keep, in the forward pass and
        # as it runs again. In one of the two its hooks may be outside of these, and inside in the
        # other: it is asked for all, so that both counts are that of all saved tensors.
        self._notes_nothing = outer is not None and (
            outer[0]._notes_nothing if isinstance(outer[0], _Pack) else are_of_checkpointing(outer)
        )
        wholes = [(cast(Tensor, one.whole), one) for one in unit.held]
        self._mine = {storage_id(whole): one for whole, one in wholes if not is_subclass(whole)}

    def __call__(self, tensor: Tensor) -> Any:
        noted = None if self._notes_nothing else _noted(self._unit, self._mine, tensor)
        if noted is not None:
            return noted
        outer = self._outer
        return tensor if outer is None else _Outer(outer[0](tensor), outer[1])


@dataclass(frozen=True, slots=True)
class _Note:
    """What stands for a part of a whole parameter between the passes."""

    unit: Unit
    held: Held
    versions: Versions
    part: tuple[torch.Size, tuple[int, ...], int]
    spec: DTensorSpec | None


@dataclass(frozen=True, slots=True)
class _Outer:
    """What other hooks made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _noted(unit: Unit, mine: dict[int, Held], tensor: Tensor) -> _Note | None:
    local = tensor.local if isinstance(tensor, Wrapper) else tensor
    memory = storage_id(local) if local.layout == torch.strided else None
    one = mine.get(memory) if memory is not None else None
    if one is None or one.whole is None or local.dtype != one.whole.dtype:
        return None
    if storage_id(one.whole) != memory:  # that memory is another's by now
        return None
    spec = tensor.spec if isinstance(tensor, Wrapper) else None
    part = local.size(), local.stride(), int(local.storage_offset())
    return _Note(unit, one, cast(Versions, unit.versions), part, spec)


def _recalled(note: Any) -> Tensor:
    """Return the tensor that a note stands for; others are themselves."""
    if isinstance(note, _Outer):
        return note.unpack(note.packed)
    if not isinstance(note, _Note):
        return note
    unit = note.unit
    if unit.written() != note.versions:
        raise RuntimeError(
            f"{note.held.about.name!r}, or another parameter that is gathered with it, was written "
            "between the forward pass and the backward pass that needs it: step the optimizer "
            "after all backward passes"
        )
    unit.gather()
    local = torch.as_strided(cast(Tensor, note.held.whole), *note.part)
    return local if note.spec is None else DTensor(local, note.spec)
