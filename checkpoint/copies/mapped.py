"""Mapped tensors: made of copies of stored ones, and read by asking these in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ..files.stored_tensor import StoredTensor
from ..reading import limits
from ..tensors.dtypes import DType
from ..tensors.sink import Sink
from .boxes import source_boxes
from .copies import Copy, box_copy, joined, permutation
from .meeting import through
from .sinks import PlacingSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A tensor and the copies that make it up, each element by one of them."""

    dtype: DType
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    empty: str | None = None
    """The tensor without elements that this one is, which no copy names."""

    @classmethod
    def of(cls, tensor: StoredTensor) -> Mapped:
        """Return a tensor as it is."""
        if 0 in tensor.shape:
            return cls(dtype=tensor.dtype, shape=tensor.shape, copies=(), empty=tensor.name)
        copies = (Copy.whole(tensor.name, tensor.shape),)
        return cls(dtype=tensor.dtype, shape=tensor.shape, copies=copies)

    @classmethod
    def zeros(cls, dtype: DType, shape: tuple[int, ...]) -> Mapped:
        """Return elements that come from nowhere."""
        copies = () if 0 in shape else (Copy.whole(None, shape),)
        return cls(dtype=dtype, shape=shape, copies=copies)

    @property
    def source(self) -> str | None:
        """The only tensor that it is made of, if it is of one."""
        return self.copies[0].source if len(self.copies) == 1 else self.empty

    def is_all_of(self, name: str) -> bool:
        """Whether the elements are those of another tensor, in the same order."""
        return self.empty == name or self.copies == (Copy.whole(name, self.shape),)

    def reshaped(self, shape: tuple[int, ...]) -> Mapped:
        """Return the same elements in another shape of as many."""
        return Mapped(dtype=self.dtype, shape=shape, copies=self.copies)

    def permuted(self, dims: Sequence[int]) -> Mapped:
        """Return the tensor whose dim i is dim ``dims[i]`` of this one."""
        shape = tuple(self.shape[dim] for dim in dims)
        return self._seen(lambda: permutation(self.shape, dims), shape)

    def part(self, box: Box) -> Mapped:
        """Return the elements of a box."""
        return self._seen(lambda: box_copy("", box, self.shape), box.sizes)

    def _seen(self, outer: Callable[[], Copy], shape: tuple[int, ...]) -> Mapped:
        copies = () if 0 in shape else joined(through(outer(), self.copies))
        return Mapped(dtype=self.dtype, shape=shape, copies=copies)


def assembled(dtype: DType, shape: tuple[int, ...], parts: Mapping[Box, Mapped]) -> Mapped:
    """Return a tensor whose boxes, of which it consists, are some others."""
    copies: list[Copy] = []
    for box, part in parts.items():
        if not box.is_empty:
            copies += through(box_copy("", box, shape).inverse(), part.copies)
    return Mapped(dtype=dtype, shape=shape, copies=joined(copies))


def concatenated(parts: Sequence[Mapped], dim: int) -> Mapped:
    """Return tensors of one dtype, one after the other along a dim."""
    first = parts[0]
    total = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    boxes: dict[Box, Mapped] = {}
    at = 0
    for part in parts:
        offsets = tuple(at if d == dim else 0 for d in range(len(shape)))
        boxes[Box(offsets, part.shape)] = part
        at += part.shape[dim]
    return assembled(first.dtype, shape, boxes)


@dataclass(frozen=True, slots=True)
class Copied:
    """The recipe of a mapped tensor."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    sources: Mapping[str, StoredTensor]
    """All that the copies name."""

    @property
    def in_any_order(self) -> bool:
        """Whether that is so for all sources."""
        recipes = (source.recipe for source in self.sources.values())
        return all(recipe is None or recipe.in_any_order for recipe in recipes)

    def parts(
        self, box: Box, sink: Sink, *, exact: bool = False
    ) -> Iterator[tuple[StoredTensor | None, Box, Sink]]:
        """Yield boxes of the sources, each with the sink that puts them where they belong."""
        for copy in through(box_copy("", box, self.shape), self.copies):
            if copy.source is None:
                for filled, _ in source_boxes(copy.inverse(), box.sizes):
                    yield None, filled, sink
                continue
            source = self.sources[copy.source]
            itemsize = source.dtype.itemsize
            skipped = 0 if exact else limits.STEP_BYTES // itemsize
            for wanted, placed in source_boxes(copy, source.shape, skipped):
                yield source, wanted, PlacingSink(sink, box.sizes, itemsize, wanted, placed)


_SOMEWHERE = Mesh((1,), (), (0,))


def mapped_tensor(name: str, mapped: Mapped, sources: Mapping[str, StoredTensor]) -> StoredTensor:
    """Return a mapped tensor as matching and planning take it.

    One that is another tensor under a new name is that tensor, and is read as before.
    """
    if mapped.source is not None:
        source = sources[mapped.source]
        if source.shape == mapped.shape and mapped.is_all_of(source.name):
            stored = source.stored_name if source.recipe is None else None
            return source._replace(name=name, same_as=stored)
    used = {c.source: sources[c.source] for c in mapped.copies if c.source is not None}
    return StoredTensor(
        name=name,
        dtype=mapped.dtype,
        shape=mapped.shape,
        layout=Layout(_SOMEWHERE, (Replicate(),), mapped.shape),
        recipe=Copied(mapped.shape, mapped.copies, used),
    )
