"""The tensors of one pickle: their layouts, and where in its archive they lie."""

from __future__ import annotations

import base64
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt

from ...files.manifest import Place
from ...files.stored_tensor import StoredTensor
from ...state.limits import check_metadata_bytes, shown
from ...state.values import Node
from ...tensors.dtypes import BY_TORCH_NAME
from ..file_layouts import FileLayouts
from ..pickles.arrays import Array, NotHeld, UnfinishedArray
from ..pickles.unpickling import TensorNote
from .forms import INLINE
from .memories import Memory

_MOST_SHOWN = 80


class ValueTensors:
    """Tensors that are whole in one file; those that are one view of one memory are tied."""

    def __init__(
        self,
        layouts: FileLayouts,
        file: int,
        place: Place,
        where: str,
        memory: Memory | None = None,
    ) -> None:
        """``place`` is that of the archive in the file of this number.

        Without it ``memory`` says where tensors lie, and compares them with it.
        """
        self._layouts = layouts
        self._file = file
        self._place = place
        self._where = where
        self._memory = memory
        self._first: dict[TensorNote, str] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.places: list[Place] = []
        self._inline_bytes = 0

    kinds = (TensorNote, Array, UnfinishedArray)
    """What ``node`` is given."""

    def mark(self) -> Any:
        """Return what ``undo`` takes to forget all that is noted from now on."""
        return len(self.tensors), len(self.places), len(self._first)

    def undo(self, mark: Any) -> None:
        """Forget what was noted since a mark."""
        num_tensors, num_places, num_first = mark
        while len(self.tensors) > num_tensors:
            self.tensors.popitem()
        del self.places[num_places:]
        while len(self._first) > num_first:
            self._first.popitem()

    def node(self, name: str, value: TensorNote | Array | UnfinishedArray) -> Node:
        """Note where a tensor or an array lies; return its node."""
        if isinstance(value, TensorNote):
            self._add_tensor(name, value)
            return {"tensor": name}
        where = f"{self._where}, {name[:_MOST_SHOWN]!r}"
        try:
            self._add_array(name, value.made() if isinstance(value, UnfinishedArray) else value)
        except NotHeld as error:
            raise NotHeld(f"{name[:_MOST_SHOWN]!r}: {error}", error.kind) from error
        except (TypeError, ValueError) as error:
            raise Corrupt(f"{where}: {shown(error)}") from error
        return {"ndarray": name}

    def _add_tensor(self, name: str, note: TensorNote) -> None:
        where = f"{self._where}, {name!r}"
        try:
            dtype = note.dtype(where)
        except CheckpointError as error:
            raise NotHeld(str(error), f"a tensor of torch.{note.dtype_name}") from error
        first = self._first.setdefault(note, name)
        if first != name:
            self.tensors[name] = self.tensors[first]._replace(name=name, same_as=first)
            return
        record, skip = f"data/{note.storage.key}", note.start * dtype.itemsize
        strides = note.byte_strides(dtype.itemsize)
        place = self._place._replace(key=name, record=record, skip=skip, strides=strides)
        if self._memory is not None:
            place = self._memory.place(name, note, where)
        layout = self._layouts.whole(self._file, note.shape)
        self.tensors[name] = StoredTensor(name, dtype, note.shape, layout)
        self.places.append(place)

    def _add_array(self, name: str, array: Array) -> None:
        """Keep the elements of an array, which no reader could find in a pickle."""
        self._inline_bytes += len(array.data)
        check_metadata_bytes(4 * self._inline_bytes, f"the arrays of {self._where}")
        dtype = BY_TORCH_NAME.get(array.dtype_name)
        if dtype is None:
            raise NotHeld(
                f"an array of numpy's {array.dtype_name}, which dtckpt does not hold; convert it "
                "and save anew",
                f"an array of numpy's {array.dtype_name}",
            )
        layout = self._layouts.whole(self._file, array.shape)
        self.tensors[name] = StoredTensor(name, dtype, array.shape, layout)
        self.places.append(Place(name, 0, 0, base64.b64encode(array.data).decode(), form=INLINE))
