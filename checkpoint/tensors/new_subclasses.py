"""Tensor subclasses that a load makes, where the checkpoint tells what there is to be.

The class has to be imported already, since a checkpoint must not run code that the program does not
have. Its ``__tensor_unflatten__`` is called twice: with empty tensors before anything changes, to
see whether it takes what was saved, and once these are filled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from dtckpt.errors import CheckpointError, LayoutMismatch, Unsavable
from dtckpt.interrupts import raised_by_signal_handler

from ..state.limits import shown
from ..state.names import key_component
from ..state.subclass_node import SUBCLASS, inner_nodes, note_of
from ..state.tree import below, tag_of, unflatten
from ..state.values import Node
from .subclasses import class_text, described, is_subclass, take_apart

_UNFLATTEN = "__tensor_unflatten__"
_IMPORT = "import the module of the class before the load, or read the inner tensors by their names"


@dataclass(slots=True, eq=False)
class NewSubclass:
    """Stands in a state for a tensor subclass that is made once its inner tensors are filled.

    So the class may copy them, or compute something from them.
    """

    node: Node
    name: str
    tensors: dict[str, Any]
    """The inner tensors by attribute, of which some are new subclasses again."""
    allow_pickle: bool
    wrap: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns the distributed tensor of which the subclass is the local one."""

    @property
    def items(self) -> list[tuple[str, Any]]:
        """The inner tensors with the components of their names."""
        return [(key_component(key), tensor) for key, tensor in self.tensors.items()]

    def plain(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors to fill, by the names under which they are stored."""
        for key, child in inner_nodes(self.node).items():
            inner = self.tensors[key]
            if isinstance(inner, NewSubclass):
                yield from inner.plain()
            else:
                yield child["tensor"], inner

    def make(self) -> torch.Tensor:
        """Return the subclass."""
        tensors = {
            key: inner.make() if isinstance(inner, NewSubclass) else inner
            for key, inner in self.tensors.items()
        }
        made = made_of(self.node, tensors, self.name, allow_pickle=self.allow_pickle)
        return made if self.wrap is None else self.wrap(made)


def new_subclass(
    node: Node,
    name: str,
    empty: Callable[[str], torch.Tensor],
    *,
    allow_pickle: bool,
    wrap: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> NewSubclass:
    """Return a new subclass as it was saved; ``empty`` makes what is stored under a name.

    It is made once at the call, to see whether that can be done. Raises LayoutMismatch where the
    class is not there, or makes something else.
    """
    tensors: dict[str, Any] = {}
    for key, child in inner_nodes(node).items():
        if tag_of(child) == SUBCLASS:
            inner = below(name, key_component(key))
            tensors[key] = new_subclass(child, inner, empty, allow_pickle=allow_pickle)
        elif tag_of(child) == "tensor":
            tensors[key] = empty(child["tensor"])
        else:
            raise LayoutMismatch(f"{name}: {key} of it is {described(child)}, and not a tensor")
    made = NewSubclass(node, name, tensors, allow_pickle, wrap)
    made.make()
    return made


def made_of(node: Node, tensors: dict[str, Any], name: str, *, allow_pickle: bool) -> Any:
    """Return a tensor subclass, made of the inner tensors of its node.

    Raises LayoutMismatch, naming the class, where it is not imported or makes something else.
    """
    note = note_of(node)
    cls = class_named(note.cls, name)
    context = unflatten(note.context, _no_tensor, allow_pickle=allow_pickle)
    try:
        made = cls.__tensor_unflatten__(tensors, context, torch.Size(note.size), note.stride)
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        raise LayoutMismatch(
            f"{name}: {note.text}.{_UNFLATTEN} does not take what was saved: {error!r}"
        ) from error
    if type(made) is not cls or not is_subclass(made):
        raise LayoutMismatch(f"{name}: {note.text}.{_UNFLATTEN} gives a {class_text(type(made))}")
    try:
        told = take_apart(name, made, allow_pickle=True)
    except Unsavable as error:
        raise LayoutMismatch(str(error)) from error
    found = {key: _described_tensor(tensor) for key, tensor in told.tensors.items()}
    wanted = {key: _described_tensor(tensor) for key, tensor in tensors.items()}
    same = (told.note.size, told.note.dtype, json.dumps(told.note.context)) == (
        note.size,
        note.dtype,
        json.dumps(note.context),
    )
    if found != wanted or not same:
        raise LayoutMismatch(
            f"{name}: {note.text}.{_UNFLATTEN} makes another tensor of what was saved: of "
            f"{shown(found)} with {shown(told.note.context)}, {told.note.dtype}"
            f"{list(told.note.size)}; expected {shown(wanted)} with {shown(note.context)}, "
            f"{note.dtype}{list(note.size)}"
        )
    return made


def _described_tensor(tensor: Any) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _no_tensor(name: str, _tag: str) -> Any:
    raise CheckpointError(f"unexpected tensor {name!r} in the context of a tensor subclass")


def class_named(text: str, name: str) -> Any:
    """Return the class that a checkpoint names, if the program has imported it.

    Nothing is imported: a checkpoint must not run code. So attributes are looked up in the
    dictionaries of modules and classes, since some modules import others when they are asked.
    Raises LayoutMismatch where it is not there, or is none for this.
    """
    module_name, _, qualname = text.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = None if found is None else vars(found).get(part) if _has_vars(found) else None
    told = shown(text.replace(":", "."))
    if found is None:
        raise LayoutMismatch(
            f"{name}: it was a {told}, which is not imported here. A load does not import code: "
            f"{_IMPORT}"
        )
    is_class = isinstance(found, type) and issubclass(found, torch.Tensor)
    if not is_class or not hasattr(found, _UNFLATTEN):
        raise LayoutMismatch(
            f"{name}: it was a {told}, which is no subclass of torch.Tensor with {_UNFLATTEN} "
            "here; use the release of its package that it was saved with, or read the inner "
            "tensors by their names"
        )
    return cast(Any, found)


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__")
