"""Tensors whose elements are small codes times scales of blocks, read as what they stand for.

For every box that is wanted, the boxes of codes and scales that it needs are read, the scales
first; codes are converted a little at a time as they arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dtensor.comm.caches import remembered
from ...dtensor.geometry.box import Box
from ..files.stored_tensor import StoredTensor
from ..tensors.dtypes import DType
from ..tensors.sink import Array, EarlySink, Sink

if TYPE_CHECKING:
    import torch

_STEP_ELEMENTS = 1 << 18
"""How many are converted at once: some MiB of numbers of 32 bits."""
_EXPONENTS = ("uint8", "float8_e8m0fnu")
"""Types of scales that are powers of two: byte b is 2**(b - 127)."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of four bits without the sign, which is the highest one (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A tensor of factors, one for each block of elements."""

    tensor: StoredTensor
    block: tuple[int, ...]
    """Elements of a block in every dim of what is made."""

    def box_of(self, box: Box) -> Box:
        """Return the factors that a box of elements needs."""
        if not self.tensor.shape:
            return Box((), ())
        starts = [o // b for o, b in zip(box.offsets, self.block, strict=True)]
        ends = [-(-e // b) for e, b in zip(box.ends, self.block, strict=True)]
        shape = self.tensor.shape
        first = Box(tuple(starts), tuple(e - s for s, e in zip(starts, ends, strict=True)))
        return Box(first.offsets[: len(shape)], first.sizes[: len(shape)])


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The recipe of a tensor of codes and scales."""

    codes: StoredTensor
    scales: tuple[Scale, ...]
    shape: tuple[int, ...]
    dtype: DType
    """Of the elements that are made."""

    @property
    def per_code(self) -> int:
        """Elements in a byte of codes: two where they have four bits."""
        return 1 if self.codes.dtype.torch_name.startswith("float8") else 2

    @property
    def in_any_order(self) -> bool:
        """Return False: codes that come before their scales have to wait in memory."""
        return False

    def parts(
        self, box: Box, sink: Sink, *, exact: bool = False
    ) -> Iterator[tuple[StoredTensor, Box, Sink]]:
        """Yield the boxes of scales and codes, with sinks that convert what comes."""
        work = _Work(self, box, sink)
        for number, scale in enumerate(self.scales):
            yield scale.tensor, work.scale_boxes[number], _ScaleSink(work, number)
        yield self.codes, work.code_box, _CodeSink(work)

    def codes_of(self, box: Box) -> Box:
        """Return the codes that a box of elements needs."""
        groups = self.codes.shape[len(self.shape) :]  # bytes of a group, where groups are a dim
        step = self.per_code * (groups[0] if groups else 1)
        lead, start, end = len(self.shape) - 1, box.offsets[-1] // step, -(-box.ends[-1] // step)
        return Box(
            (*box.offsets[:lead], start, *(0 for _ in groups)),
            (*box.sizes[:lead], end - start, *groups),
        )


class _Work:
    """One box of elements that is being made."""

    def __init__(self, recipe: Dequantized, box: Box, sink: Sink) -> None:
        self.recipe = recipe
        self.box = box
        self.sink = sink
        self.code_box = recipe.codes_of(box)
        self.scale_boxes = [scale.box_of(box) for scale in recipe.scales]
        self._missing = sum(scale_box.numel for scale_box in self.scale_boxes)
        self._scales: dict[int, Array] = {}
        self._waiting: list[tuple[Box, Array]] = []
        self._lock = threading.Lock()

    def add_scales(self, number: int, part: Box, items: Array) -> None:
        """Take some scales; codes that came before the last of them are converted now."""
        with self._lock:
            if number not in self._scales:
                self._scales[number] = np.empty(self.scale_boxes[number].sizes, items.dtype)
            self._scales[number][part.slices] = items
            self._missing -= part.numel
            if self._missing:
                return
            waiting, self._waiting = self._waiting, []
        for codes_part, codes in waiting:
            self._convert(codes_part, codes)

    def add_codes(self, part: Box, items: Array) -> None:
        """Take some codes: scales are read before them, but the last may still be on their way."""
        with self._lock:
            if self._missing:
                self._waiting.append((part, items.copy()))
                return
        self._convert(part, items)

    def _convert(self, part: Box, items: Array) -> None:
        """Convert codes; ``part`` is relative to all that this box needs."""
        at = part.translate(self.code_box.offsets)
        if len(at.sizes) == len(self.box.sizes):
            self._convert_rows(at, items)
        elif at.sizes[-1] == self.recipe.codes.shape[-1]:
            bytes_each = at.sizes[-1]
            merged = Box(
                (*at.offsets[:-2], at.offsets[-2] * bytes_each),
                (*at.sizes[:-2], at.sizes[-2] * bytes_each),
            )
            self._convert_rows(merged, np.ascontiguousarray(items).reshape(merged.sizes))
        else:  # a stored chunk ends within groups
            for i in range(at.sizes[-2]):
                start = (at.offsets[-2] + i) * self.recipe.codes.shape[-1] + at.offsets[-1]
                merged = Box((*at.offsets[:-2], start), (*at.sizes[:-2], at.sizes[-1]))
                self._convert_rows(merged, items[..., i, :])

    def _convert_rows(self, at: Box, codes: Array) -> None:
        """Convert codes whose last dim is that of the elements, a step after the other."""
        per_code = self.recipe.per_code
        for step in Box.whole(at.sizes).parts(_STEP_ELEMENTS):
            placed = step.translate(at.offsets)
            made = Box(
                (*placed.offsets[:-1], placed.offsets[-1] * per_code),
                (*placed.sizes[:-1], placed.sizes[-1] * per_code),
            )
            wanted = made.intersect(self.box)
            if wanted is not None:
                values = self._decoded(codes[step.slices])[wanted.relative_to(made).slices]
                self._store(wanted, values)

    def _store(self, at: Box, values: torch.Tensor) -> None:
        import torch

        for number, scale in enumerate(self.recipe.scales):
            values = values * self._factors(number, scale, at)
        dtype = self.recipe.dtype
        made = values.to(getattr(torch, dtype.torch_name)).contiguous()
        bits = made.view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy()
        self.sink.put(at.relative_to(self.box), bits.view(dtype.items))

    def _factors(self, number: int, scale: Scale, at: Box) -> torch.Tensor:
        """Return the factor of every element of a box, in a shape that broadcasts."""
        import torch

        box, raw = self.scale_boxes[number], self._scales[number]
        name = scale.tensor.dtype.torch_name
        kind = "float8_e8m0fnu" if name in _EXPONENTS else name
        part = scale.box_of(at).relative_to(box)
        signed = np.ascontiguousarray(raw[part.slices]).view(f"i{raw.itemsize}")
        factors = torch.from_numpy(signed).view(getattr(torch, kind)).to(torch.float32)
        for dim in range(factors.ndim):
            block, start = scale.block[dim], at.offsets[dim]
            if block > 1 and factors.shape[dim] > 1:
                steps = torch.arange(start, start + at.sizes[dim]) // block - start // block
                factors = factors.index_select(dim, steps)
        return factors.reshape(*factors.shape, *(1,) * (len(at.sizes) - factors.ndim))

    def _decoded(self, codes: Array) -> torch.Tensor:
        """Return the values of codes without their scales."""
        import torch

        plain = torch.from_numpy(np.array(codes, order="C").view("i1"))  # torch's are writable
        if self.recipe.per_code == 1:
            kind = getattr(torch, self.recipe.codes.dtype.torch_name)
            return plain.view(kind).to(torch.float32)
        pairs = _pairs()[plain.view(torch.uint8).to(torch.int64)]
        return pairs.reshape(*plain.shape[:-1], -1)


@remembered(1)
def _pairs() -> torch.Tensor:
    """Return the two values of every byte: that of the low bits is the first."""
    import torch

    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.arange(256)
    return torch.stack([values[codes % 16], values[codes // 16]], dim=1)


class _ScaleSink(EarlySink):
    """Takes scales."""

    is_memory = False

    def __init__(self, work: _Work, number: int) -> None:
        self._work = work
        self._number = number

    def memory(self) -> None:
        """Return None."""

    def put(self, part: Box, items: Array) -> None:
        self._work.add_scales(self._number, part, items)


class _CodeSink:
    """Takes codes."""

    is_memory = False

    def __init__(self, work: _Work) -> None:
        self._work = work

    def memory(self) -> None:
        """Return None."""

    def put(self, part: Box, items: Array) -> None:
        self._work.add_codes(part, items)


def is_scale_dtype(dtype: DType) -> bool:
    """Whether scales may be of an element type."""
    names: tuple[Any, ...] = ("float32", "bfloat16", "float16", "float8_e4m3fn", *_EXPONENTS)
    return dtype.torch_name in names
