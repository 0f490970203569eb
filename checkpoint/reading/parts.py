"""Parts of tensors as users write them, ``model/weight[0:2,:3]``, read a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..state.selecting import near_names
from ..tensors.sink import Array
from .execution import execute
from .indices import resolve
from .read_plan import plan_reads
from .wants import ArraySink, Want

_SPAN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Every so many-th element of a box of a tensor."""

    tensor: StoredTensor
    box: Box
    steps: tuple[int, ...]
    kept: tuple[int, ...]
    """The dims that are not indexed away by an int."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many indices of every dim of the tensor are wanted."""
        return tuple(-(-n // s) for n, s in zip(self.box.sizes, self.steps, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims that are kept."""
        return tuple(self.sizes[dim] for dim in self.kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of the wanted elements."""
        return Box.whole(self.sizes).numel * self.tensor.dtype.itemsize

    def span(self, of: Box) -> Box:
        """Return the box of the tensor in which some of the wanted elements lie."""
        offsets = zip(self.box.offsets, of.offsets, self.steps, strict=True)
        sizes = zip(of.sizes, self.steps, strict=True)
        return Box(
            tuple(start + offset * step for start, offset, step in offsets),
            tuple((size - 1) * step + 1 if size else 0 for size, step in sizes),
        )

    def read(self, data: StoredData, of: Box | None = None) -> Array:
        """Return the items of the part, or of a box of what is wanted of it.

        Items are as wide as an element (``DType.items``). No dim is left out of a box. Of what lies
        between them no more is in memory at once than a few MiB.
        """
        wanted = Box.whole(self.sizes) if of is None else of
        if self.span(wanted).numel <= 2 * wanted.numel:
            items = self._read(data, wanted)
        else:
            items = np.empty(wanted.sizes, dtype=self.tensor.dtype.items)
            for box in self._boxes(wanted, _SPAN_BYTES // self.tensor.dtype.itemsize):
                items[box.relative_to(wanted).slices] = self._read(data, box)
        return items.reshape(self.shape) if of is None else items

    def pieces(self, data: StoredData, max_bytes: int) -> Iterator[Array]:
        """Yield the items in row-major order, reading at most about so many bytes for a piece."""
        whole = Box.whole(self.sizes)
        if not whole.is_empty:
            for box in self._boxes(whole, max_bytes // self.tensor.dtype.itemsize):
                yield np.ascontiguousarray(self._read(data, box))

    def _boxes(self, wanted: Box, max_numel: int) -> Iterator[Box]:
        """Yield boxes of which the spans are no larger, in row-major order."""
        if wanted.numel == 1 or self.span(wanted).numel <= max_numel:
            yield wanted
            return
        for half in wanted.halves():
            yield from self._boxes(half, max_numel)

    def _read(self, data: StoredData, wanted: Box) -> Array:
        span = self.span(wanted)
        items = np.empty(span.sizes, dtype=self.tensor.dtype.items)
        want = Want(tensor=self.tensor, box=span, sink=ArraySink(items))
        execute(plan_reads(data, [want]), check_files=False)
        return items[tuple(slice(None, None, step) for step in self.steps)]


def parse_part(text: str, manifest: Manifest, where: str) -> TensorPart:
    """Return the part that a text such as ``model/weight[0:2,:3]`` names; without [] all of it.

    LayoutMismatch where there is no such tensor or index: ints, slices with positive steps and one
    ``...`` are possible.
    """
    name, bracket, inner = text.partition("[")
    tensor = manifest.tensors.get(name)
    if tensor is None:
        near = near_names(name, list(manifest.tensors), with_parts=False)
        raise LayoutMismatch(f"{where}: there is no tensor {name!r}{near}")
    if bracket and not inner.endswith("]"):
        raise LayoutMismatch(f"{text!r}: the ] is missing")
    index = tuple(_index(part.strip(), text) for part in inner[:-1].split(",")) if bracket else ()
    try:
        found = resolve(index, tensor.shape, name)
    except IndexError as error:
        raise LayoutMismatch(str(error)) from error
    return TensorPart(
        tensor,
        found.boxes[0],
        tuple(part.step or 1 if isinstance(part, slice) else 1 for part in found.rest),
        tuple(dim for dim, part in enumerate(found.rest) if isinstance(part, slice)),
    )


def _index(part: str, text: str) -> Any:
    if part == "...":
        return Ellipsis
    try:
        bounds = [int(bound) if bound.strip() else None for bound in part.split(":")]
        if len(bounds) == 1 and bounds[0] is not None:
            return bounds[0]
        if 2 <= len(bounds) <= 3 and bounds[2:] != [0]:
            return slice(*bounds)
    except ValueError:
        pass
    raise LayoutMismatch(
        f"{text!r}: {part!r} is no index; ints, slices as 0:8 or ::2, and ... are possible"
    )
