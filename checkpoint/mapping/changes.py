"""What rules have in common: the names that fit, the shapes that have to, what they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ..copies.mapped import Mapped
from ..state.patterns import pattern

Tensors = Mapping[str, Mapped]
"""Those that there are when a rule is applied, by name."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a rule does to one set of tensors."""

    taken: tuple[str, ...]
    """Names that are there no more."""
    made: Mapping[str, Mapped]


class MappingRule(Protocol):
    """One line of a table."""

    kind: ClassVar[str]
    """Its name in JSON."""

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Yield what becomes of every set of tensors whose names fit.

        LayoutMismatch where names fit and shapes do not.
        """
        ...

    def inverse(self) -> MappingRule:
        """Return the rule that undoes this one; LayoutMismatch where there is none."""
        ...


def matching(source: str, tensors: Tensors) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the names that fit, with what is captured."""
    fits = pattern(source).match
    for name in list(tensors):
        captured = fits(name)
        if captured is not None:
            yield name, captured


def matching_all(
    patterns: Sequence[str], tensors: Tensors
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield names that fit each of some patterns alike; LayoutMismatch where one is missing."""
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for text in patterns:
        for name, captured in matching(text, tensors):
            names = tuple(filled(patterns, captured))
            missing = [other for other in names if other not in tensors]
            if missing:
                raise LayoutMismatch(f"there is {name!r}, but no {missing[0]!r} to go with it")
            seen[names] = captured
    yield from seen.items()


def each_by_itself(
    source: str, target: str, tensors: Tensors, make: Callable[[str, Mapped], Mapped]
) -> Iterator[Change]:
    """Yield changes of one tensor to one."""
    made = pattern(target)
    for name, captured in matching(source, tensors):
        yield Change((name,), {made.fill(captured): make(name, tensors[name])})


def filled(patterns: Sequence[str], captured: Mapping[str, str]) -> list[str]:
    return [pattern(text).fill(captured) for text in patterns]


def check_captures(sources: Sequence[str], targets: Sequence[str]) -> None:
    """Raise LayoutMismatch unless all patterns capture the same, so that names go both ways."""
    if not sources or not targets:
        raise LayoutMismatch("a rule needs names of sources and of targets")
    first = pattern(sources[0])
    for text in (*sources, *targets):
        if pattern(text).captures != first.captures:
            raise LayoutMismatch(
                f"{text!r} captures {sorted(pattern(text).captures)}, and {first.text!r} "
                f"{sorted(first.captures)}: names have to go both ways"
            )


def one_more(longer: str, shorter: str) -> str:
    """Return the one capture that a pattern has beyond those of another one."""
    ours, others = pattern(longer).captures, pattern(shorter).captures
    more = ours - others
    if len(more) != 1 or not others <= ours or (number := next(iter(more)))[-1] == "*":
        raise LayoutMismatch(
            f"{longer!r} has to capture one thing, a number, beyond what {shorter!r} does"
        )
    return number


def check_parts(parts: Sequence[str], sizes: Sequence[int] | None, groups: int) -> None:
    if sizes is not None and (len(sizes) != len(parts) or min(sizes) < 1):
        raise LayoutMismatch(f"sizes={sizes} are not those of {len(parts)} parts")
    if groups < 1:
        raise LayoutMismatch(f"groups={groups}: expected 1 or more")
    if len(set(parts)) != len(parts):
        raise LayoutMismatch(f"a name stands twice in {list(parts)}")


def check_dtype(name: str, mapped: Mapped, other: str, first: Mapped) -> None:
    if mapped.dtype is not first.dtype:
        raise LayoutMismatch(
            f"tensor {name!r} is {mapped.dtype.torch_name} and {other!r} is "
            f"{first.dtype.torch_name}; they cannot be one tensor"
        )


def dim_of(name: str, mapped: Mapped, dim: int) -> int:
    """Return a dim that counts from the front; LayoutMismatch where there is none."""
    ndim = len(mapped.shape)
    if not -ndim <= dim < ndim:
        raise LayoutMismatch(f"tensor {name!r} of shape {mapped.shape} has no dim {dim}")
    return dim % ndim


def new_dim_of(name: str, mapped: Mapped, dim: int) -> int:
    ndim = len(mapped.shape) + 1
    if not -ndim <= dim < ndim:
        raise LayoutMismatch(f"tensor {name!r} of shape {mapped.shape} gets no dim {dim}")
    return dim % ndim


def equal_sizes(name: str, size: int, groups: int, count: int) -> tuple[int, ...]:
    """Return the sizes of equal parts in each group; LayoutMismatch where there are none."""
    if size % (groups * count):
        raise LayoutMismatch(
            f"tensor {name!r}: a size of {size} is not that of {groups * count} equal parts"
        )
    return (size // (groups * count),) * count


def slab(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(offsets, (*shape[:dim], size, *shape[dim + 1 :]))


def shape_of(name: str, mapped: Mapped, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with its -1 replaced; LayoutMismatch where it has other elements."""
    numel = math.prod(mapped.shape)
    known = math.prod(size for size in shape if size != -1)
    if shape.count(-1) == 1 and known and numel % known == 0:
        shape = tuple(numel // known if size == -1 else size for size in shape)
    if min(shape, default=0) < 0 or math.prod(shape) != numel:
        raise LayoutMismatch(f"tensor {name!r} of shape {mapped.shape} cannot be seen as {shape}")
    return shape
