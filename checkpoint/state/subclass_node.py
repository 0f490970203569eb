"""The node of a tensor subclass that is made of other tensors.

``{"subclass": {"class": "module:qualname", "context": node, "size": [...], "stride": [...],
"dtype": "float32", "tensors": {attribute: node, ...}}}``. Size, stride and dtype are those that the
subclass shows. The context is what its ``__tensor_flatten__`` tells beside its tensors. These are
the children of the node, and the only data: the subclass has no memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dtckpt.errors import Corrupt

from .limits import MAX_DIMS, shown
from .values import Node

SUBCLASS = "subclass"
"""Tag of the node."""
_MOST_SHOWN = 300
_FIELDS = frozenset({"class", "context", "size", "stride", "dtype", "tensors"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassNote:
    """What a checkpoint knows of a tensor subclass beside its inner tensors."""

    cls: str
    """Module and qualified name of the class, with a colon between."""
    context: Node
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """Name of the torch dtype that the subclass shows."""

    @property
    def text(self) -> str:
        """The class as it is named in messages."""
        return self.cls.replace(":", ".")[:_MOST_SHOWN]

    def to_text(self) -> str:
        """Return all of it as JSON, which tells 1 from True; ``==`` does not."""
        return json.dumps(self.to_node({}))

    def to_node(self, tensors: Mapping[str, Node]) -> Node:
        """Return the node of the subclass with the nodes of its tensors by attribute."""
        return {
            SUBCLASS: {
                "class": self.cls,
                "context": self.context,
                "size": list(self.size),
                "stride": list(self.stride),
                "dtype": self.dtype,
                "tensors": dict(tensors),
            }
        }


def note_of(node: Node) -> SubclassNote:
    """Return what a subclass node says beside its tensors; Corrupt where it is malformed."""
    told = _fields(node)
    return SubclassNote(
        cls=told["class"],
        context=told["context"],
        size=tuple(told["size"]),
        stride=tuple(told["stride"]),
        dtype=told["dtype"],
    )


def inner_nodes(node: Node) -> dict[str, Node]:
    """Return the nodes of the inner tensors by attribute; Corrupt where the node is malformed."""
    return _fields(node)["tensors"]


def _fields(node: Node) -> dict[str, Any]:
    told = node[SUBCLASS]
    if type(told) is dict:
        fields = cast(dict[str, Any], told)
        if (
            fields.keys() == _FIELDS
            and type(fields["class"]) is str
            and type(fields["dtype"]) is str
            and _are_sizes(fields["size"])
            and _are_sizes(fields["stride"])
            and len(fields["size"]) == len(fields["stride"])
            and type(fields["tensors"]) is dict
            and fields["tensors"]
        ):
            return fields
    raise Corrupt(f"malformed {SUBCLASS} node: {shown(told)}")


def _are_sizes(value: Any) -> bool:
    if type(value) is not list:
        return False
    sizes = cast(list[Any], value)
    return len(sizes) <= MAX_DIMS and all(type(size) is int and size >= 0 for size in sizes)
