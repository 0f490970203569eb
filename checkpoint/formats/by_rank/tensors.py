"""Tensors of a manifest, made of what the files of ranks have of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dtckpt.errors import CheckpointError, Corrupt

from ....dtensor.geometry.box import Box
from ....dtensor.geometry.layout import Layout
from ....dtensor.geometry.mesh import Mesh
from ...files.manifest import Place
from ...files.stored_tensor import StoredTensor
from ...state.values import Node
from ...tensors.dtypes import DType
from ..archives.value_tensors import ValueTensors
from ..file_layouts import FileLayouts
from ..pickles.arrays import Array, UnfinishedArray
from ..pickles.unpickling import TensorNote
from .files import Opened
from .notes import Boxes, LaidOut, Note, parts_of


class _Part(NamedTuple):
    """A box of a tensor that a file has."""

    file: Opened
    box: Box
    local: TensorNote


class Tensors:
    """The tensors of an item, by name."""

    def __init__(self, layouts: FileLayouts, numbers: Mapping[int, int]) -> None:
        self._layouts = layouts
        self._numbers = numbers
        """Of files, by rank."""
        self._by_file: dict[Layout, Layout] = {}
        self._first: dict[tuple[tuple[int, Note], ...], str] = {}
        self.found: dict[str, StoredTensor] = {}

    def node(self, name: str, notes: Mapping[Opened, Note]) -> Node:
        """Add the tensor of which files have these notes; return its node.

        Notes that some tensor has had already are tied to it. Raises Corrupt where parts are
        missing, CheckpointError where files disagree about the tensor.
        """
        key = tuple((file.number, note) for file, note in notes.items())
        first = self._first.setdefault(key, name)
        if first != name:
            self.found[name] = self.found[first]._replace(name=name, same_as=first)
            return {"tensor": name}
        shape, layout = _agreed(name, notes)
        parts = list(_parts(name, notes))
        if layout is not None:
            stored = self._of_files(name, layout, notes)
        else:
            boxes = dict.fromkeys((part.file.number, part.box) for part in parts)
            stored = self._layouts.of_parts(name, shape, list(boxes))
        tensor = StoredTensor(name, _dtype(name, parts), shape, stored)
        for part in parts:
            part.file.place(tensor.key(part.box), part.local)
        self.found[name] = tensor
        return {"tensor": name}

    def alone(self, file: Opened, name: str, value: TensorNote | Array | UnfinishedArray) -> Node:
        """Add a tensor, or an array of numpy, that one file has; return its node."""
        if isinstance(value, TensorNote):
            return self.node(name, {file: value})
        kept = ValueTensors(self._layouts, file.number, Place("", 0, 0), file.where)
        node = kept.node(name, value)
        self.found |= kept.tensors
        file.places.extend(kept.places)
        return node

    def _of_files(self, name: str, layout: Layout, notes: Mapping[Opened, Note]) -> Layout:
        """Return a layout on ranks as one on their files; Corrupt where one has no part."""
        ranks = layout.mesh.all_ranks()
        having = {file.file.rank for file in notes}
        missing = next((rank for rank in ranks if rank not in having), None)
        if missing is not None:
            raise Corrupt(
                f"{next(iter(notes)).where}: tensor {name!r} lies on the ranks of {layout.mesh}, "
                f"but no file of rank {missing} has a part of it. Fetch the files of all ranks"
            )
        known = self._by_file.get(layout)
        if known is None:
            numbers = tuple(self._numbers[rank] for rank in ranks)
            mesh = Mesh(layout.mesh.shape, layout.mesh.axis_names, numbers)
            known = Layout(mesh, layout.placements, layout.shape)
            self._by_file[layout] = known
        return known


def _agreed(name: str, notes: Mapping[Opened, Note]) -> tuple[tuple[int, ...], Layout | None]:
    """Return the shape of a tensor, and its layout where it has one; CheckpointError if unclear."""
    told = {
        (note.layout.shape, note.layout) if isinstance(note, LaidOut) else (note.shape, None)
        for note in notes.values()
    }
    is_mixed = any(isinstance(note, TensorNote) for note in notes.values()) and len(notes) > 1
    if len(told) > 1 or is_mixed:
        each = "; ".join(f"{file.where}: {_said(note)}" for file, note in notes.items())
        raise CheckpointError(
            f"tensor {name!r} is not laid out alike on all ranks, so there is no telling which "
            f"parts are of one tensor: {each[:1000]}"
        )
    return told.pop()


def _said(note: Note) -> str:
    if isinstance(note, LaidOut):
        return str(note.layout)
    if isinstance(note, Boxes):
        return f"boxes of shape {note.shape}"
    return f"a plain tensor of shape {note.shape}"


def _parts(name: str, notes: Mapping[Opened, Note]) -> Iterator[_Part]:
    """Yield what files have of a tensor; Corrupt where it is not what its layout says."""
    for file, note in notes.items():
        try:
            held = parts_of(note, file.file.rank)
        except ValueError as error:
            raise Corrupt(f"{file.where}: tensor {name!r}: {error}") from error
        yield from (_Part(file, box, local) for box, local in held)


def _dtype(name: str, parts: list[_Part]) -> DType:
    found = {part.local.dtype_name for part in parts}
    if len(found) != 1:
        what = " and ".join(sorted(found)) or "no dtype"
        raise CheckpointError(f"tensor {name!r} is of {what} in the files of ranks")
    return parts[0].local.dtype(parts[0].file.where)
