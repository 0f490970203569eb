"""The ground form as a rule: named tensors, and the copies that make them of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dtckpt.errors import LayoutMismatch

from ..copies.copies import Copy, Loop, joined
from ..copies.mapped import Mapped
from ..copies.meeting import through
from ..copies.tiling import check_tiling
from ..state.limits import MAX_DIMS, list_of, object_of, size_of, text_of
from ..tensors.dtypes import DType, dtype_of_code
from .changes import Change, Tensors, check_dtype


@dataclass(frozen=True, slots=True)
class Made:
    """The shape of a tensor, and the copies that make it."""

    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    dtype: DType | None = None
    """Where no tensor that it is made of tells: it has no elements, or zeros alone."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        told: dict[str, Any] = {"shape": list(self.shape)}
        if self.dtype is not None:
            told["dtype"] = self.dtype.code
        return told | {"copies": [list(_told(copy)) for copy in self.copies]}

    @classmethod
    def from_json(cls, value: object) -> Made:
        """Return what ``to_json`` wrote; ValueError or TypeError where it is malformed."""
        told = object_of(value, "a tensor")
        copies = tuple(map(_copy_of, list_of(told["copies"], "copies")))
        dtype = dtype_of_code(told["dtype"], "a tensor") if "dtype" in told else None
        return cls(shape_of_json(told["shape"]), copies, dtype)


@dataclass(frozen=True, slots=True)
class Copies:
    """Make tensors of copies of others, whose names and shapes are these; a traced mapping.

    Raises LayoutMismatch, naming the tensor, where elements lie outside of one, or where those of
    a target come from several places or from none.
    """

    kind: ClassVar[str] = "copies"
    sources: Mapping[str, tuple[int, ...]]
    """All that is taken, with the shapes."""
    targets: Mapping[str, Made]

    def __post_init__(self) -> None:
        for name, made in self.targets.items():
            for copy in made.copies:
                self._check_source(name, copy)
            check_tiling(made.copies, math.prod(made.shape), f"tensor {name!r}")

    def _check_source(self, name: str, copy: Copy) -> None:
        if copy.source is None:
            return
        if copy.source not in self.sources:
            raise LayoutMismatch(f"tensor {name!r} is made of {copy.source!r}, which is no source")
        numel = math.prod(self.sources[copy.source])
        lowest = min((loop.of for loop in copy.loops), default=0)
        if lowest < 0 or copy.source_start < 0 or copy.source_end > numel:
            raise LayoutMismatch(
                f"tensor {name!r} needs elements {copy.source_start} to {copy.source_end} of "
                f"{copy.source!r}, which has {numel}"
            )

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield the one change; LayoutMismatch where a source is missing or of another shape."""
        for name, shape in self.sources.items():
            if name not in tensors:
                raise LayoutMismatch(f"there is no tensor {name!r}")
            if tensors[name].shape != shape:
                raise LayoutMismatch(
                    f"tensor {name!r}: expected shape {shape}, got {tensors[name].shape}"
                )
        made = {name: self._mapped(name, told, tensors) for name, told in self.targets.items()}
        yield Change(tuple(self.sources), made)

    def _mapped(self, name: str, made: Made, tensors: Tensors) -> Mapped:
        used = list(dict.fromkeys(copy.source for copy in made.copies if copy.source is not None))
        dtype = tensors[used[0]].dtype if used else made.dtype
        if dtype is None:
            raise LayoutMismatch(
                f"tensor {name!r} is made of no tensor, and has no dtype of its own"
            )
        copies: list[Copy] = []
        for source in used:
            check_dtype(source, tensors[source], used[0], tensors[used[0]])
        for copy in made.copies:
            found = tensors[copy.source].copies if copy.source is not None else ()
            copies += through(copy, found) if copy.source is not None else (copy,)
        return Mapped(dtype=dtype, shape=made.shape, copies=joined(copies))

    def inverse(self) -> Copies:
        """Return the copies back, if each element of a source is somewhere, and once."""
        back: dict[str, list[Copy]] = {name: [] for name in self.sources}
        for name, made in self.targets.items():
            for copy in made.copies:
                if copy.source is not None:
                    back[copy.source].append(copy.inverse(name))
        try:
            return Copies(
                {name: made.shape for name, made in self.targets.items()},
                {n: Made(shape, joined(back[n])) for n, shape in self.sources.items()},
            )
        except LayoutMismatch as error:
            raise LayoutMismatch(f"these copies cannot be undone: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "sources": dict(self.sources),
            "targets": {name: made.to_json() for name, made in self.targets.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Copies:
        """Return what ``to_json`` wrote; ValueError or TypeError where it is malformed."""
        sources = object_of(value["sources"], "sources").items()
        targets = object_of(value["targets"], "targets").items()
        return cls(
            {name: shape_of_json(shape) for name, shape in sources},
            {name: Made.from_json(told) for name, told in targets},
        )


def shape_of_json(value: object) -> tuple[int, ...]:
    """Return a shape from JSON; ValueError or TypeError where it is malformed."""
    sizes = tuple(size_of(size, "a size") for size in list_of(value, "a shape"))
    if len(sizes) > MAX_DIMS:
        raise ValueError(f"a shape has {len(sizes)} dims, at most {MAX_DIMS} are possible")
    return sizes


def _told(copy: Copy) -> Sequence[Any]:
    return copy.source, copy.start, copy.source_start, [list(loop) for loop in copy.loops]


def _copy_of(value: object) -> Copy:
    source, start, source_start, loops = list_of(value, "a copy")
    return Copy(
        source=None if source is None else text_of(source, "a source"),
        start=size_of(start, "a start"),
        source_start=size_of(source_start, "a start"),
        loops=tuple(
            Loop(*(size_of(number, "a loop") for number in (size, to, of)))
            for size, to, of in (list_of(loop, "a loop") for loop in list_of(loops, "loops"))
        ),
    )
