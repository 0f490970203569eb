"""What every rank has saved of an item, as one tree with one tensor where ranks have parts of it.

Dicts are merged key by key. What is equal on all ranks that have it is said once; a value that is
not, and a plain tensor, is kept for each rank by itself, as ``PerRank`` is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dtckpt.errors import CheckpointError

from ...files.manifest import Place
from ...state.limits import MAX_NESTING
from ...state.names import index_component, join, key_component, rank_component
from ...state.tree import SEQUENCES, Node, container_node, dict_tag
from ..archives.value_tensors import ValueTensors
from ..file_layouts import FileLayouts
from ..pickles.unpickling import TensorNote
from ..trees import ValueNodes
from .files import Opened, are_equal
from .notes import NOTES, Note
from .tensors import Tensors

_MOST_NODES = 1_000_000
Path = tuple[str, ...]


class Merger:
    """Merges what the files of an item have; tensors are added to ``tensors``."""

    def __init__(self, files: Sequence[Opened], tensors: Tensors) -> None:
        self._tensors = tensors
        self._left = _MOST_NODES
        self._alone = {
            file: ValueNodes(file.where, ValueTensors.kinds, partial(tensors.alone, file))
            for file in files
        }
        self.has_parts = False
        """Whether there is a tensor of which ranks have parts."""
        self.differing = ""
        """Name of a plain tensor that is not the same on all ranks, if there is one."""

    def node(self, values: Mapping[Opened, Any], path: Path) -> Node:
        """Return the node of what some files have under a path.

        Raises Corrupt where parts of a tensor are missing, CheckpointError where ranks disagree
        about it.
        """
        self._left -= 1
        if self._left < 0 or len(path) > MAX_NESTING:
            where = next(iter(values)).where
            raise CheckpointError(f"{where}: {join(path)[:80]!r} is a value of too many parts")
        found = list(values.values())
        if all(isinstance(value, NOTES) for value in found):
            return self._tensor(values, path)
        tags = {dict_tag(value) for value in found}
        if len(tags) == 1 and tags != {None} and _have_plain_keys(found):
            return self._dict(values, path)
        if not any(_has_notes(value, set()) for value in found):
            return self._value(values, path)
        kinds = {type(value) for value in found}
        if len(kinds) == 1 and kinds <= SEQUENCES.keys() and len(set(map(len, found))) == 1:
            items = [
                (i, self.node({f: v[i] for f, v in values.items()}, (*path, index_component(i))))
                for i in range(len(found[0]))
            ]
            return container_node(SEQUENCES[kinds.pop()], items)
        names = ", ".join(file.where for file in values)
        raise CheckpointError(
            f"{join(path)!r} is not of one kind in {names[:1000]}, of which one has tensors there"
        )

    def _dict(self, values: Mapping[Opened, Any], path: Path) -> Node:
        keys = dict.fromkeys(key for value in values.values() for key in value)
        nodes: list[tuple[str | int, Node]] = []
        for key in keys:
            having = {file: value[key] for file, value in values.items() if key in value}
            nodes.append((key, self.node(having, (*path, key_component(key)))))
        tag = dict_tag(next(iter(values.values())))
        is_plain = tag == "items" and all(type(key) is str for key in keys)
        return container_node("dict" if is_plain else tag, nodes)

    def _value(self, values: Mapping[Opened, Any], path: Path) -> Node:
        """Return the node of a value without tensors, of which equal ones are said once."""
        files = list(values)
        if len({_said(file, value, path) for file, value in values.items()}) == 1:
            return self._alone[files[0]].node(values[files[0]], path)
        return self._per_rank(values, path)

    def _tensor(self, values: Mapping[Opened, Note], path: Path) -> Node:
        name = join(path)
        plain = {file: note for file, note in values.items() if isinstance(note, TensorNote)}
        if len(plain) < len(values):
            self.has_parts = True
            return self._tensors.node(name, values)
        if are_equal(plain):
            return self._tensors.node(name, dict([next(iter(plain.items()))]))
        self.differing = self.differing or name
        return self._per_rank(plain, path)

    def _per_rank(self, values: Mapping[Opened, Any], path: Path) -> Node:
        return {
            "per_rank": {
                str(file.file.rank): self._alone[file].node(
                    value, (*path, rank_component(file.file.rank))
                )
                for file, value in values.items()
            }
        }


def _said(file: Opened, value: Any, path: Path) -> tuple[str, tuple[Any, ...]]:
    """Return what a value without tensors is, to be compared; arrays by their elements."""
    arrays = ValueTensors(FileLayouts("", []), 0, Place("", 0, 0), file.where)
    node = ValueNodes(file.where, arrays.kinds, arrays.node).node(value, path)
    kinds = ((array.dtype, array.shape) for array in arrays.tensors.values())
    return json.dumps(node), (*kinds, *(place.record for place in arrays.places))


def _have_plain_keys(found: Sequence[Any]) -> bool:
    return all(type(key) in (str, int) for value in found for key in value)


def _has_notes(value: Any, seen: set[int]) -> bool:
    """Whether there are tensors in a value, which may name one list many times."""
    if isinstance(value, NOTES):
        return True
    if dict_tag(value) is not None:
        items: Any = value.values()
    elif isinstance(value, list | tuple):
        items = value
    else:
        return False
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_has_notes(item, seen) for item in items)
