"""Tensor subclasses that are made of other tensors, such as quantized optimizer state.

Such a subclass has a ``__torch_dispatch__`` of its own and no memory: what torch calls its storage
is undefined. It is saved as the tensors and the context that ``__tensor_flatten__`` gives, and made
again by ``__tensor_unflatten__`` of a class that the program has imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.errors import Unsavable
from dtckpt.interrupts import raised_by_signal_handler

from ...dtensor.comm.caches import remembered
from ..state.limits import shown
from ..state.subclass_node import SUBCLASS, SubclassNote, inner_nodes, note_of
from ..state.tree import plain_node, tag_of
from ..state.values import Node
from .announced import PLAIN_TENSORS, announces, hint_of_parts
from .dtensors import is_dtensor, is_dtensor_class

_FLATTEN = "__tensor_flatten__"


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that computes its elements from other tensors.

    Not for distributed tensors, nor for those that announce their boxes or wait for a collective.
    """
    cls = type(value)
    if cls in PLAIN_TENSORS or not _has_own_operators(cls):
        return False
    return not (announces(value) or hasattr(value, "trigger_wait"))


@remembered(256)  # asked of every tensor of a state, of which there are a few classes
def _has_own_operators(cls: type) -> bool:
    """Whether a class of tensors takes operators itself, and is none of distributed tensors."""
    if not issubclass(cls, torch.Tensor) or is_dtensor_class(cls):
        return False
    own = getattr(cls, "__torch_dispatch__", None)
    return own is not getattr(torch.Tensor, "__torch_dispatch__", None)


def has_subclass_shard(value: Any) -> bool:
    """Whether a value is a DTensor whose local tensor is such a subclass."""
    return is_dtensor(value) and is_subclass(getattr(value, "_local_tensor", None))


@dataclass(frozen=True, slots=True)
class SubclassParts:
    """A tensor subclass taken apart."""

    note: SubclassNote
    tensors: dict[str, torch.Tensor]
    """The inner tensors by attribute; they may be subclasses again."""


def take_apart(name: str, value: Any, *, allow_pickle: bool = False) -> SubclassParts:
    """Return what a tensor subclass consists of.

    Raises Unsavable, with its name, where the class does not tell, or tells of something that the
    format does not hold.
    """
    cls = type(value)
    if value.is_nested or not hasattr(value, _FLATTEN) or hint_of_parts(value):
        raise refusal(name, value)
    try:
        attributes, context = value.__tensor_flatten__()
        tensors = {attribute: getattr(value, attribute) for attribute in attributes}
        stride = value.stride()
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        raise Unsavable(
            f"{_told(name, value)}, whose {_FLATTEN} failed with {error!r}. {_remedy(value)}"
        ) from error
    others = [key for key, item in tensors.items() if not issubclass(type(item), torch.Tensor)]
    if others or not tensors:
        raise Unsavable(
            f"{_told(name, value)}, which consists of {others or 'nothing'} by its {_FLATTEN}, "
            f"and not of tensors. {_remedy(value)}"
        )
    try:
        node = plain_node(
            context, f"{name} (context of {class_text(cls)})", allow_pickle=allow_pickle
        )
        note = SubclassNote(
            cls=f"{cls.__module__}:{cls.__qualname__}",
            context=json.loads(json.dumps(node)),  # of what JSON has no form of, an error
            size=tuple(map(int, value.shape)),
            stride=tuple(map(int, stride)),
            dtype=str(value.dtype).removeprefix("torch."),
        )
    except Exception as error:  # of code of the context, too, where it is pickled
        if raised_by_signal_handler(error):
            raise
        raise Unsavable(
            f"{_told(name, value)}, whose {_FLATTEN} tells of something that a checkpoint does not "
            f"hold ({error}). {_remedy(value)}"
        ) from error
    return SubclassParts(note, tensors)


def refusal(name: str, value: Any, *, is_shard: bool = False) -> Unsavable:
    """Return the error for a tensor subclass that cannot be saved as what it consists of."""
    if getattr(value, "is_nested", False):
        return Unsavable(
            f"tensor {name!r} is a nested tensor, whose parts have lengths of their own. Save its "
            "values() and offsets() (layout=torch.jagged), or its unbind() as a list, and make it "
            "again after the load"
        )
    if is_shard:
        return Unsavable(
            f"{_told(name, value, 'has as its shard')}, which computes its elements from other "
            "tensors. A distributed tensor of such shards is saved only as the state of an "
            "optimizer whose parameter has a name: save the optimizer itself beside its module. "
            f"Or save the tensors that the shard consists of{_attributes(value)}"
        )
    why = f"neither is a DTensor nor tells by {_FLATTEN} which these are"
    if hasattr(value, _FLATTEN):
        hint = hint_of_parts(value)
        why = (
            f"has {hint} and so may be a part of a tensor, and there is no telling which"
            if hint
            else "is taken apart by dtckpt's own save and async_save only, without a planner"
        )
    return Unsavable(
        f"{_told(name, value)}, which computes its elements from other tensors, and {why}. "
        f"{_remedy(value)}"
    )


def _told(name: str, value: Any, what: str = "is") -> str:
    return f"tensor {name!r} {what} a {class_text(type(value))}"


def _remedy(value: Any) -> str:
    return f"Save the tensors that it consists of{_attributes(value)}"


def _attributes(value: Any) -> str:
    names = [key for key, item in vars(value).items() if issubclass(type(item), torch.Tensor)]
    return f": {', '.join(names)}" if names else ""


def class_text(cls: type) -> str:
    """Return a class as it is named in messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of which a tensor consists: itself, if it is no subclass."""
    if not is_subclass(value) or not hasattr(value, _FLATTEN):
        yield value
        return
    for attribute in value.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(value, attribute))


def difference(node: Node, value: Any, name: str) -> str:
    """Return why what was saved cannot be filled into a tensor subclass in place; "" if it can.

    Shapes and dtypes of the inner tensors are left to who fills them.
    """
    wanted = class_text(type(value))
    if tag_of(node) != SUBCLASS:
        return f"a {wanted} is wanted, {described(node)} was saved"
    saved = note_of(node)
    if value.is_meta:
        return f"a {wanted} on the meta device cannot be filled; make it on its device"
    try:
        parts = take_apart(name, value, allow_pickle=True)
    except Unsavable as error:
        return f"it cannot be loaded into: {error}"
    note = parts.note
    if note.cls != saved.cls:
        return f"a {note.text} is wanted, a {saved.text} was saved"
    if list(parts.tensors) != list(inner_nodes(node)):
        return (
            f"the {note.text} consists of {', '.join(parts.tensors)} here, and of "
            f"{', '.join(inner_nodes(node))} at the save"
        )
    for what, ours, theirs in (
        ("shape", list(note.size), list(saved.size)),
        ("dtype", note.dtype, saved.dtype),
        ("context", note.context, saved.context),
    ):
        if json.dumps(ours) != json.dumps(theirs):
            return (
                f"the {note.text} has the {what} {shown(ours)} here, and had {shown(theirs)} at "
                "the save"
            )
    # What the class computes from its tensors, such as a transpose, would keep its values.
    others = [
        key
        for key, item in vars(value).items()
        if key not in parts.tensors and issubclass(type(item), torch.Tensor) and "grad" not in key
    ]
    if others:
        return (
            f"the {note.text} has {', '.join(others)} beside the tensors that it consists of, "
            "which would keep what was computed before; set it to None before the load"
        )
    return ""


def described(node: Node) -> str:
    """Return what was saved at a node, for messages."""
    tag = tag_of(node)
    if tag == SUBCLASS:
        return f"a {note_of(node).text}"
    return f"a {tag}" if tag else "a value"


def fits(node: Node, value: Any, is_alike: Callable[[str, torch.Tensor], bool]) -> bool:
    """Whether a tensor is the subclass that was saved.

    ``is_alike`` tells of an inner tensor whether it is as what is stored under a name.
    """
    if not is_subclass(value) or difference(node, value, ""):
        return False
    parts = take_apart("", value, allow_pickle=True)
    return all(
        fits(child, parts.tensors[key], is_alike)
        if tag_of(child) == SUBCLASS
        else not is_subclass(parts.tensors[key]) and is_alike(child["tensor"], parts.tensors[key])
        for key, child in inner_nodes(node).items()
    )
