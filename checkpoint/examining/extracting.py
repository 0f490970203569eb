"""Extracting: some tensors, or parts of them, as one .npy or .safetensors file or stream."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import numpy as np

from dtckpt.errors import LayoutMismatch

from ...storage.base import Store
from ...storage.open import open_store
from ..exporting.safetensors_files import check_safetensors, file_head
from ..files.stored_data import StoredData
from ..formats.names import SAFETENSORS
from ..formats.opening import open_place, read_manifest, stored_data
from ..mapping.table import TensorMapping, mapped_manifest
from ..reading.batches import counted
from ..reading.parts import TensorPart, parse_part
from ..tensors.dtypes import BY_TORCH_NAME, DType
from ..tensors.sink import Array
from .numbers import numbers, numpy_name

_NPY = ".npy"
_PIECE_BYTES = 16 << 20


class Output(Protocol):
    """What bytes are written to, one after the other."""

    def write(self, data: memoryview, /) -> object:
        """Write all of some bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractReport:
    """What an extraction has written."""

    tensors: Mapping[str, tuple[int, ...]]
    """Shapes by name."""
    dtypes: Mapping[str, str]
    """Names of element types by name, as they are in the file."""
    num_bytes: int
    """Length of the file."""


def extract(
    checkpoint_id: str | os.PathLike[str] | Store,
    parts: str | Sequence[str],
    target: str | os.PathLike[str] | Output,
    *,
    dtype: str | None = None,
    bits: bool = False,
    mapping: TensorMapping | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExtractReport:
    """Write tensors, or parts such as ``"model/weight[0:2,:3]"``, to one file.

    ``target`` is a path or URL that ends in ``.npy``, for one part, or ``.safetensors``, for any
    number; or something with ``write``, such as ``sys.stdout.buffer``, which gets what a .npy file
    has. A file appears when it is whole, or not at all, and none is replaced. Memory is bounded,
    whatever the size; every byte is verified as it is read. A mapping is as in ``open``.

    With ``dtype``, the name of an element type that numpy has, elements are converted if it holds
    all values of theirs. Numpy has no bfloat16 and no types of 8 and 4 bits: such tensors go into a
    .npy file by ``dtype="float32"``, or with ``bits=True`` as unsigned ints of the same bits.

    Raises LayoutMismatch where a part cannot be had or written so, ObjectExists where the target is
    there already, Corrupt where a block is damaged, and what ``open`` raises.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    manifest = mapped_manifest(read_manifest(store), mapping, store.url)
    if dtype is not None and bits:
        raise LayoutMismatch("elements are converted to a dtype or taken as bits, not both")
    texts = [parts] if isinstance(parts, str) else list(parts)
    found = [_Written(parse_part(t, manifest, store.url), dtype, bits=bits) for t in texts]
    found.sort(key=lambda part: -part.dtype.itemsize)  # so that each is aligned to its items
    names = [part.name for part in found]
    if len(set(names)) < len(names) or not names:
        raise LayoutMismatch(f"parts of different tensors are expected, got {texts}")
    path = os.fspath(target) if isinstance(target, str | os.PathLike) else _NPY
    head = _head(found, path)
    size = len(head) + sum(part.num_bytes for part in found)
    data = stored_data(store, manifest)
    pieces = _pieces(found, data, counted(on_progress, sum(p.part.num_bytes for p in found)))
    if isinstance(target, str | os.PathLike):
        folder, file = place_of_file(path)
        with open_store(folder, **(target_options or {})).create(file, size) as stream:
            stream.write(head)
            for piece in pieces:
                stream.write(piece)
            data.check_unchanged()  # before the file appears
    else:
        target.write(memoryview(head))
        for piece in pieces:
            target.write(piece)
        data.check_unchanged()
    return ExtractReport(
        tensors={part.name: part.shape for part in found},
        dtypes={part.name: part.dtype.torch_name for part in found},
        num_bytes=size,
    )


def place_of_file(path: str) -> tuple[str, str]:
    """Return where a file is, as a store is opened, and its name there.

    >>> place_of_file("s3://bucket/a.npy"), place_of_file("a.npy"), place_of_file("/a.npy")
    (('s3://bucket', 'a.npy'), ('.', 'a.npy'), ('/', 'a.npy'))
    """
    folder, slash, name = path.rpartition("/")
    if folder.endswith(":/"):
        raise LayoutMismatch(f"{path}: expected a file in a bucket or directory")
    return folder or slash or ".", name


def _pieces(
    parts: Sequence[_Written], data: StoredData, on_read: Callable[[int], None]
) -> Iterator[memoryview]:
    for part in parts:
        for items in part.part.pieces(data, _PIECE_BYTES):
            yield part.converted(items).reshape(-1).view(np.uint8).data
            on_read(items.nbytes)


def _head(parts: Sequence[_Written], path: str) -> bytes:
    """Return what a file begins with; LayoutMismatch where it cannot hold the parts."""
    if path.endswith(SAFETENSORS):
        for part in parts:
            check_safetensors(part.dtype, part.name, "write a .npy file, which holds one")
        entries = ((p.name, p.dtype.code, p.dtype.file_shape(p.shape), p.num_bytes) for p in parts)
        return file_head(entries, {"format": "pt"})
    if not path.endswith(_NPY):
        raise LayoutMismatch(f"{path}: expected the name of a {_NPY} or {SAFETENSORS} file")
    if len(parts) != 1:
        raise LayoutMismatch(
            f"a {_NPY} file or stream holds one tensor, got {len(parts)}; a {SAFETENSORS} file "
            "holds any number"
        )
    [part] = parts
    name = numpy_name(part.dtype)
    if name is None:
        raise LayoutMismatch(
            f"tensor {part.name!r}: numpy, and so a {_NPY} file, has no {part.dtype.torch_name}. "
            "Ask for the dtype float32, which holds all of its values, or for its bits as unsigned "
            f"ints, or write a {SAFETENSORS} file"
        )
    told = {"descr": np.dtype(name).str, "fortran_order": False, "shape": part.shape}
    text = BytesIO()
    np.lib.format.write_array_header_1_0(text, told)
    return text.getvalue()


class _Written:
    """A part and the element type that it is written in."""

    def __init__(self, part: TensorPart, dtype: str | None, *, bits: bool) -> None:
        stored = part.tensor.dtype
        self.part = part
        self.name = part.tensor.name
        self._is_converted = dtype is not None
        if dtype is None:
            self.dtype = _bits(self.name, stored) if bits else stored
        else:
            self.dtype = _converted(self.name, stored, dtype)
        if stored.packed > 1 and part.tensor.shape and len(part.tensor.shape) - 1 not in part.kept:
            raise LayoutMismatch(
                f"tensor {self.name!r}: the last dim of {stored.torch_name} takes slices only"
            )
        self.shape = part.shape
        if stored.packed > 1 and self.dtype.packed == 1 and not bits:
            self.shape = stored.file_shape(part.shape)  # each value is an element then
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize

    def converted(self, items: Array) -> Array:
        if not self._is_converted:
            return items
        with np.errstate(invalid="ignore"):  # of signalling NaN
            return numbers(self.part.tensor.dtype, items).astype(numpy_name(self.dtype))


def _bits(name: str, stored: DType) -> DType:
    """Return the unsigned ints that are as wide; LayoutMismatch where there are none."""
    ints = BY_TORCH_NAME.get(f"uint{8 * stored.itemsize}")
    if ints is None:
        raise LayoutMismatch(f"tensor {name!r}: no int is as wide as {stored.torch_name}")
    return ints


def _converted(name: str, stored: DType, dtype: str) -> DType:
    """Return an element type by name; LayoutMismatch unless it holds all values of the stored."""
    wanted = BY_TORCH_NAME.get(dtype)
    known = None if wanted is None else numpy_name(wanted)
    if wanted is None or known is None:
        names = ", ".join(of.torch_name for of in BY_TORCH_NAME.values() if numpy_name(of))
        raise LayoutMismatch(f"dtype={dtype!r}: expected one of {names}")
    is_long = stored.code in ("I64", "U64")  # which have more bits than numpy minds for floats
    if not np.can_cast(numpy_name(stored) or "float32", known, "safe") or (
        is_long and np.dtype(known).kind not in "iu"
    ):
        raise LayoutMismatch(
            f"tensor {name!r}: not every value of {stored.torch_name} is one of {dtype}; choose a "
            "wider type"
        )
    return wanted
