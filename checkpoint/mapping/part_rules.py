"""Rules that make several tensors of one, or one of several: fused projections, experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from dtckpt.errors import LayoutMismatch

from ..copies.mapped import Mapped, concatenated
from ..state.patterns import pattern
from .changes import (
    Change,
    Tensors,
    check_captures,
    check_dtype,
    check_parts,
    dim_of,
    equal_sizes,
    filled,
    matching,
    matching_all,
    new_dim_of,
    one_more,
    slab,
)


@dataclass(frozen=True, slots=True)
class Split:
    """Cut a tensor along a dim into several: fused QKV to three.

    With ``groups`` the dim is that many times the parts, one after the other, and each target
    has its part of every group: query heads with the keys and values that they share, as Megatron
    stores them; ``sizes`` are those in one group, equal ones if not given.
    """

    kind: ClassVar[str] = "split"
    source: str
    targets: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        check_captures([self.source], self.targets)
        check_parts(self.targets, self.sizes, self.groups)

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each name that fits."""
        for name, captured in matching(self.source, tensors):
            parts = self._parts(name, tensors[name])
            yield Change((name,), dict(zip(filled(self.targets, captured), parts, strict=True)))

    def _parts(self, name: str, mapped: Mapped) -> Iterator[Mapped]:
        dim, shape, groups = dim_of(name, mapped, self.dim), mapped.shape, self.groups
        sizes = self.sizes or equal_sizes(name, shape[dim], groups, len(self.targets))
        if sum(sizes) * groups != shape[dim]:
            raise LayoutMismatch(
                f"tensor {name!r} of shape {shape}: expected dim {dim} of {groups} x {list(sizes)}"
                f" = {sum(sizes) * groups}, got {shape[dim]}"
            )
        grouped = mapped.reshaped((*shape[:dim], groups, sum(sizes), *shape[dim + 1 :]))
        at = 0
        for size in sizes:
            part = grouped.part(slab(grouped.shape, dim + 1, at, size))
            yield part.reshaped((*shape[:dim], groups * size, *shape[dim + 1 :]))
            at += size

    def inverse(self) -> Merge:
        """Return the merge of the parts."""
        return Merge(self.targets, self.source, self.dim, self.sizes, self.groups)


@dataclass(frozen=True, slots=True)
class Merge:
    """Put tensors together along a dim, group by group: the inverse of ``Split``.

    Parts of different sizes need ``sizes``, without which it could not be undone.
    """

    kind: ClassVar[str] = "merge"
    sources: tuple[str, ...]
    target: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        check_captures(self.sources, [self.target])
        check_parts(self.sources, self.sizes, self.groups)

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each set of names that fit."""
        target = pattern(self.target)
        for names, captured in matching_all(self.sources, tensors):
            merged = self._merged({name: tensors[name] for name in names})
            yield Change(names, {target.fill(captured): merged})

    def _merged(self, parts: Mapping[str, Mapped]) -> Mapped:
        names, groups = list(parts), self.groups
        first = parts[names[0]]
        dim = dim_of(names[0], first, self.dim)
        default = first.shape[dim] // groups
        sizes = self.sizes or (default,) * len(names)
        grouped: list[Mapped] = []
        for (name, part), size in zip(parts.items(), sizes, strict=True):
            expected = (*first.shape[:dim], groups * size, *first.shape[dim + 1 :])
            if part.shape != expected:
                hint = "" if self.sizes else "; parts of different sizes need sizes="
                raise LayoutMismatch(
                    f"tensor {name!r}: expected shape {expected}, got {part.shape}{hint}"
                )
            check_dtype(name, part, names[0], first)
            grouped.append(part.reshaped((*expected[:dim], groups, size, *expected[dim + 1 :])))
        total = groups * sum(sizes)
        merged = concatenated(grouped, dim + 1)
        return merged.reshaped((*first.shape[:dim], total, *first.shape[dim + 1 :]))

    def inverse(self) -> Split:
        """Return the split into the parts."""
        return Split(self.target, self.sources, self.dim, self.sizes, self.groups)


@dataclass(frozen=True, slots=True)
class Stack:
    """Make a tensor of many, along a new dim: experts that were stored one by one.

    The source captures one more than the target, which numbers them from 0:
    ``Stack("experts.{expert}.w1", "experts.w1")``.
    """

    kind: ClassVar[str] = "stack"
    source: str
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        one_more(self.source, self.target)

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each target."""
        number, target = one_more(self.source, self.target), pattern(self.target)
        found: dict[str, dict[int, str]] = {}
        for name, captured in matching(self.source, tensors):
            text = captured[number]
            if not (text.isascii() and text.isdecimal() and str(int(text)) == text):
                raise LayoutMismatch(f"tensor {name!r}: expected a number, got {text!r}")
            found.setdefault(target.fill(captured), {})[int(text)] = name
        for made, numbered in found.items():
            names = [numbered.get(i, "") for i in range(len(numbered))]
            if not all(names):
                told = sorted(numbered)[:8]
                raise LayoutMismatch(
                    f"expected 0 to {len(names) - 1} to be stacked as {made!r}, got {told}"
                )
            yield Change(tuple(names), {made: self._stacked({n: tensors[n] for n in names})})

    def _stacked(self, parts: Mapping[str, Mapped]) -> Mapped:
        names = list(parts)
        first = parts[names[0]]
        shape, dim = first.shape, new_dim_of(names[0], first, self.dim)
        for name, part in parts.items():
            if part.shape != shape:
                raise LayoutMismatch(f"tensor {name!r}: expected shape {shape}, got {part.shape}")
            check_dtype(name, part, names[0], first)
        rows = [part.reshaped((*shape[:dim], 1, *shape[dim:])) for part in parts.values()]
        return concatenated(rows, dim)

    def inverse(self) -> Unstack:
        """Return what takes the stack apart."""
        return Unstack(self.target, self.source, self.dim)


@dataclass(frozen=True, slots=True)
class Unstack:
    """Make many tensors of one, which lose a dim: the inverse of ``Stack``."""

    kind: ClassVar[str] = "unstack"
    source: str
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        one_more(self.target, self.source)

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield a change for each source."""
        number, target = one_more(self.target, self.source), pattern(self.target)
        for name, captured in matching(self.source, tensors):
            mapped = tensors[name]
            dim, shape = dim_of(name, mapped, self.dim), mapped.shape
            if not shape[dim]:
                raise LayoutMismatch(f"tensor {name!r} of shape {shape} has no parts")
            made = {
                target.fill(captured | {number: str(i)}): mapped.part(
                    slab(shape, dim, i, 1)
                ).reshaped((*shape[:dim], *shape[dim + 1 :]))
                for i in range(shape[dim])
            }
            yield Change((name,), made)

    def inverse(self) -> Stack:
        """Return the stack."""
        return Stack(self.target, self.source, self.dim)
