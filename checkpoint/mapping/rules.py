"""Rules that people write for tensors one by one: names, order of dims, shapes, padding.

All rules are frozen values of JSON's types, so a table of them is a file, and each has an inverse
or says why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dtckpt.errors import LayoutMismatch

from ..copies.mapped import Mapped, concatenated
from ..state.patterns import pattern
from .changes import (
    Change,
    MappingRule,
    Tensors,
    check_captures,
    dim_of,
    each_by_itself,
    matching,
    shape_of,
    slab,
)


@dataclass(frozen=True, slots=True)
class Move:
    """Give tensors other names: ``Move("model.{rest*}", "{rest*}")`` takes a prefix away."""

    kind: ClassVar[str] = "move"
    source: str
    target: str

    def __post_init__(self) -> None:
        check_captures([self.source], [self.target])

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        yield from each_by_itself(self.source, self.target, tensors, lambda _, mapped: mapped)

    def inverse(self) -> Move:
        """Return the move back."""
        return Move(self.target, self.source)


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave tensors out, so that nobody has to ask for them. It cannot be undone."""

    kind: ClassVar[str] = "drop"
    source: str

    def __post_init__(self) -> None:
        pattern(self.source)

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        for name, _ in matching(self.source, tensors):
            yield Change((name,), {})

    def inverse(self) -> MappingRule:
        """Raise LayoutMismatch."""
        raise LayoutMismatch(f"{self}: what was left out cannot be brought back")


@dataclass(frozen=True, slots=True)
class Permute:
    """Reorder dims: ``dims=(1, 0)`` transposes, as weights of Conv1D want it.

    With ``view`` the tensor is seen in that shape first (one size may be -1), and afterwards with
    its own shape again: rotary halves to pairs are ``view=(heads, 2, -1, width)`` and
    ``dims=(0, 2, 1, 3)``.
    """

    kind: ClassVar[str] = "permute"
    source: str
    target: str
    dims: tuple[int, ...]
    view: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_captures([self.source], [self.target])
        if sorted(self.dims) != list(range(len(self.dims))):
            raise LayoutMismatch(f"dims={self.dims}: expected each of 0 to {len(self.dims) - 1}")
        if self.view is not None and len(self.view) != len(self.dims):
            raise LayoutMismatch(f"view={self.view} and dims={self.dims} are not of one length")

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        yield from each_by_itself(self.source, self.target, tensors, self._permuted)

    def _permuted(self, name: str, mapped: Mapped) -> Mapped:
        if self.view is not None:
            viewed = mapped.reshaped(shape_of(name, mapped, self.view))
            return viewed.permuted(self.dims).reshaped(mapped.shape)
        if len(mapped.shape) != len(self.dims):
            raise LayoutMismatch(
                f"tensor {name!r}: expected {len(self.dims)} dims, got shape {mapped.shape}"
            )
        return mapped.permuted(self.dims)

    def inverse(self) -> Permute:
        """Return the permutation back."""
        back = tuple(self.dims.index(dim) for dim in range(len(self.dims)))
        view = None if self.view is None else tuple(self.view[dim] for dim in self.dims)
        return Permute(self.target, self.source, back, view)


@dataclass(frozen=True, slots=True)
class Reshape:
    """Give a tensor another shape of as many elements; one size may be -1."""

    kind: ClassVar[str] = "reshape"
    source: str
    target: str
    shape: tuple[int, ...]
    source_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_captures([self.source], [self.target])

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        yield from each_by_itself(self.source, self.target, tensors, self._reshaped)

    def _reshaped(self, name: str, mapped: Mapped) -> Mapped:
        if shape_of(name, mapped, self.source_shape) != mapped.shape:
            raise LayoutMismatch(
                f"tensor {name!r}: expected shape {self.source_shape}, got {mapped.shape}"
            )
        return mapped.reshaped(shape_of(name, mapped, self.shape))

    def inverse(self) -> Reshape:
        """Return the change back."""
        return Reshape(self.target, self.source, self.source_shape, self.shape)


@dataclass(frozen=True, slots=True)
class Pad:
    """Make a dim longer, to ``size``, by zeros at its end: padded vocabularies.

    ``of`` is the size before, without which it could not be undone.
    """

    kind: ClassVar[str] = "pad"
    source: str
    target: str
    size: int
    of: int | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        check_captures([self.source], [self.target])

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        yield from each_by_itself(self.source, self.target, tensors, self._padded)

    def _padded(self, name: str, mapped: Mapped) -> Mapped:
        dim, shape = dim_of(name, mapped, self.dim), mapped.shape
        if self.of not in (None, shape[dim]) or not shape[dim] <= self.size:
            expected = f"at most {self.size}" if self.of is None else self.of
            raise LayoutMismatch(
                f"tensor {name!r} of shape {shape}: expected a size of {expected} in dim {dim}, "
                f"got {shape[dim]}"
            )
        if shape[dim] == self.size:
            return mapped
        zeros = (*shape[:dim], self.size - shape[dim], *shape[dim + 1 :])
        return concatenated([mapped, Mapped.zeros(mapped.dtype, zeros)], dim)

    def inverse(self) -> Crop:
        """Return what takes the padding away."""
        if self.of is None:
            raise LayoutMismatch(f"{self}: to be undone it needs of=, the size without padding")
        return Crop(self.target, self.source, self.of, self.dim)


@dataclass(frozen=True, slots=True)
class Crop:
    """Leave out what lies beyond a size in a dim: padding. It cannot be undone."""

    kind: ClassVar[str] = "crop"
    source: str
    target: str
    size: int
    dim: int = 0

    def __post_init__(self) -> None:
        check_captures([self.source], [self.target])

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        yield from each_by_itself(self.source, self.target, tensors, self._cropped)

    def _cropped(self, name: str, mapped: Mapped) -> Mapped:
        dim, shape = dim_of(name, mapped, self.dim), mapped.shape
        if not 0 <= self.size <= shape[dim]:
            raise LayoutMismatch(
                f"tensor {name!r} of shape {shape}: expected {self.size} or more in dim {dim}, "
                f"got {shape[dim]}"
            )
        return mapped.part(slab(shape, dim, 0, self.size))

    def inverse(self) -> MappingRule:
        """Raise LayoutMismatch."""
        raise LayoutMismatch(
            f"{self}: what was cut off cannot be brought back; Pad is what goes both ways"
        )
