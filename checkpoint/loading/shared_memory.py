"""Destinations that share memory: what was saved for each must agree, told before any is filled.

What was saved is read into memory of its own, and compared there: pieces of it where destinations
are the very same elements, all of it where they overlap in part, such as a slice beside its whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..reading.execution import execute
from ..reading.read_plan import plan_reads
from ..reading.wants import Want
from ..tensors.dtypes import DType
from ..tensors.overlaps import Sharing
from ..tensors.transfer import TensorComparison, TensorSink
from .casting import ConvertingSink

_STEP_BYTES = 64 << 20
"""Bytes of tensors that are compared at once, where they are the same elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a destination on this rank, and what was saved for it."""

    name: str
    stored: StoredTensor
    box: Box
    tensor: torch.Tensor
    dtype: DType
    """Of the destination."""

    def is_of_the_same(self, other: Part) -> bool:
        """Whether the same elements were saved for another part that is the same memory."""
        one, two = self.tensor, other.tensor
        return (
            self.stored.stored_name == other.stored.stored_name
            and self.box == other.box
            and (one.dtype, one.is_conj(), one.is_neg()) == (two.dtype, two.is_conj(), two.is_neg())
        )

    def want(self, part: Box, sink: TensorSink | TensorComparison) -> Want:
        """Return the reading of some of the elements, given in the coordinates of the box."""
        saved = self.stored.dtype
        return Want(
            tensor=self.stored,
            box=part.translate(self.box.offsets),
            sink=sink if saved is self.dtype else ConvertingSink(sink, saved, self.dtype),
        )


class SharedMemory:
    """The destinations of one rank that share memory and may be saved with other values."""

    def __init__(self, parts: Sequence[Part], sharing: Sharing) -> None:
        """``sharing`` tells which of the parts share memory, by their positions."""
        self._same = [
            (parts[first], parts[index])
            for index, first in sharing.tied.items()
            if not parts[first].is_of_the_same(parts[index])
        ]
        self._overlapping = [[parts[i] for i in g] for g in _groups(sharing.overlapping)]

    def __bool__(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self._same or self._overlapping)

    def check(
        self, data: StoredData, on_progress: Callable[[int], None], num_local: int | None
    ) -> int:
        """Raise LayoutMismatch where two have other values; return the bytes read.

        No destination changes. What overlaps in part is held in memory once more meanwhile.
        """
        run = partial(execute, on_progress=on_progress, num_local=num_local)
        num_bytes = 0
        for step in self._steps():
            for wants in step:  # all are filled before any is compared
                num_bytes += run(plan_reads(data, wants))
        return num_bytes

    def _steps(self) -> Iterator[tuple[list[Want], list[Want]]]:
        """Yield what is read into memory of its own, and what is compared with it."""
        filled: list[Want] = []
        compared: list[Want] = []
        num_bytes = 0
        for one, other in self._same:
            sizes, itemsize = one.box.sizes, one.dtype.itemsize
            for piece in Box.whole(sizes).parts(_STEP_BYTES // itemsize):
                made = torch.empty(piece.sizes, dtype=one.tensor.dtype, device="cpu")
                again = _as_seen(made.view(other.tensor.dtype), other)
                filled.append(one.want(piece, TensorSink(_as_seen(made, one))))
                compared.append(other.want(piece, TensorComparison(other.name, again)))
                num_bytes += made.nbytes
                if num_bytes >= _STEP_BYTES:
                    yield filled, compared
                    filled, compared, num_bytes = [], [], 0
        if filled:
            yield filled, compared
        for group in self._overlapping:
            scratch = list(_copied(group))
            wholes = [Box.whole(part.box.sizes) for part in group]
            each = list(zip(group, wholes, scratch, strict=True))
            yield (
                [part.want(whole, TensorSink(tensor)) for part, whole, tensor in each],
                [p.want(whole, TensorComparison(p.name, tensor)) for p, whole, tensor in each],
            )


def _groups(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the positions that pairs connect with each other."""
    beside: defaultdict[int, list[int]] = defaultdict(list)
    for one, other in pairs:
        beside[one].append(other)
        beside[other].append(one)
    groups: list[list[int]] = []
    seen: set[int] = set()
    for start in beside:
        group: list[int] = []
        found = [start]
        while found:
            index = found.pop()
            if index not in seen:
                seen.add(index)
                group.append(index)
                found += beside[index]
        if group:
            groups.append(group)
    return groups


def _copied(group: Sequence[Part]) -> Iterator[torch.Tensor]:
    """Yield tensors in new memory that overlap as the parts do."""
    spans = [_span(part.tensor) for part in group]
    widest = max(group, key=lambda part: part.tensor.element_size()).tensor
    size = widest.element_size()
    start = min(first for first, _ in spans)
    start -= (start - widest.data_ptr()) % size  # so that each begins at a multiple of its items
    memory = torch.empty(max(end for _, end in spans) - start, dtype=torch.uint8, device="cpu")
    for part, (first, _) in zip(group, spans, strict=True):
        offset, rest = divmod(first - start, part.tensor.element_size())
        if rest:
            raise LayoutMismatch(
                f"tensor {part.name!r} shares some of its memory with another one, at no multiple "
                "of its element size; clone it"
            )
        made = torch.empty(0, dtype=part.tensor.dtype, device="cpu")
        shape, strides = part.tensor.shape, part.tensor.stride()
        yield _as_seen(made.set_(memory.untyped_storage(), offset, shape, strides), part)


def _as_seen(made: torch.Tensor, part: Part) -> torch.Tensor:
    """Return new memory as the destination looks at its own."""
    if part.tensor.is_neg():
        raise LayoutMismatch(
            f"tensor {part.name!r} is a negative view of memory that another one shares; give "
            "tensor.resolve_neg()"
        )
    return made.conj() if part.tensor.is_conj() else made


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor and its end."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (1 + reach) * tensor.element_size()
