"""What every placement answers, so that nobody else has to know the kinds there are.

A placement is one of three: a ``SplitPlacement``, a ``Replicate`` or a ``Partial``. Layouts refuse
any other, which would be taken for replicated.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, fields
from typing import ClassVar, NoReturn, Self

from dtckpt.errors import PlacementError

from ..integers import integer
from ..order import Order, Span, covers, order_of

KINDS: dict[str, type[Placement]] = {}
"""Every class with a text form, by the name that this begins with."""

_SPLIT = re.compile(r"\w+\((?P<dim>-?\d+)(?::(?P<numbers>\d+(?:,\d+)*))?\)", re.ASCII)
_TORCHS = "torch.distributed.tensor.placement_types"


@dataclass(frozen=True, slots=True)
class Placement:
    """Base of all placements; ``isinstance`` or the three questions below tell them apart.

    A placement equals torch's of the same meaning and has its hash; it is no instance of torch's
    classes. The three questions are torch's, too, and have the same answers there.
    """

    form: ClassVar[str] = ""
    """Its text form, as errors show it. A class that states one is found by its name when texts are
    read; others are written as the class that they are derived from."""
    name: ClassVar[str] = ""
    """What the text form has before its bracket."""

    def __init_subclass__(cls) -> None:
        if "form" in vars(cls):
            cls.name = cls.form.partition("(")[0]
            known = KINDS.setdefault(cls.name, cls)
            # A dataclass with slots is made twice, and a module may be run again.
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise PlacementError(
                    f"{cls.__qualname__} cannot have the text form {cls.form}: {cls.name} is "
                    f"that of {known.__module__}.{known.__qualname__}"
                )
            KINDS[cls.name] = cls

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """Return the placement of this class that ``str`` wrote; None for another text."""
        del text
        return None

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis splits a tensor dim (the one given, if any)."""
        del dim
        return False

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether values are still to be reduced over the axis (by the op given, if any)."""
        del reduce_op
        return False

    @property
    def label(self) -> str:
        """A short text for drawings."""
        return str(self)


@dataclass(frozen=True, slots=True)
class SplitPlacement(Placement):
    """Base of what splits tensor dim ``dim`` over the axis: a range of indices per coordinate.

    A new one states ``form`` and ``sizes_over``; it is a frozen dataclass whose other fields are
    numbers of 0 or more. All but ``Shard`` are the first to cut their dim, whatever their place in
    the mesh; axes of ``Shard`` may cut their pieces further. One that gives a coordinate several
    ranges states ``ranges_over``, too.
    """

    dim: int

    def __post_init__(self) -> None:
        dim = integer(self.dim, f"the dim of a {type(self).__name__}")
        object.__setattr__(self, "dim", dim)

    def __init_subclass__(cls) -> None:
        super(SplitPlacement, cls).__init_subclass__()
        if "form" not in vars(cls) or cls.sizes_over is SplitPlacement.sizes_over:
            raise PlacementError(
                f"{cls.__qualname__} needs a form of its own, the text that it is written as, and "
                "sizes_over(size, count), the sizes of its pieces"
            )

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        """Return the sizes of the pieces that ``count`` coordinates hold of ``size`` indices.

        They follow from the fields, ``size`` and ``count`` alone; any of them may be 0.
        """
        raise PlacementError(
            "a SplitPlacement does not say how it splits; use Shard, Ragged or a class of your own "
            f"with sizes_over(size, count), to cut {size} over {count}"
        )

    def ranges_over(self, size: int, count: int) -> tuple[tuple[Span, ...], ...]:
        """Return (start, size) of the ranges of ``size`` indices that each coordinate holds.

        In the order in which its local tensor has them; they may be empty. Like ``sizes_over``, and
        to the same sums, they follow from the fields and the arguments alone. By default each has
        one, and indices ascend; they must where there is one coordinate, which cuts nothing.
        """
        starts = itertools.accumulate(sizes := self.sizes_over(size, count), initial=0)
        return tuple(((start, length),) for start, length in zip(starts, sizes, strict=False))

    def misfit(self, size: int, count: int) -> str:
        """Return why so many indices cannot be cut so over so many coordinates; else nothing."""
        sizes = self.sizes_over(size, count)
        if type(sizes) is not tuple or {*map(type, sizes)} != {int}:
            return f"must be cut into a tuple of ints, got {sizes!r}"
        total = sum(sizes)
        if len(sizes) != count or total != size or min(sizes) < 0:
            return f"needs {count} sizes that sum to {size}, got {len(sizes)} that sum to {total}"
        if not self._deals:
            return ""
        ranges = self.ranges_over(size, count)
        sums = tuple(sum(length for _, length in held) for held in ranges)
        if sums != sizes or not covers(itertools.chain(*ranges), size):
            return f"must deal out {size} indices, each once, as {sizes}, got the ranges {ranges}"
        if count == 1 and order_of(ranges[0]) is not None:
            return f"must leave all indices in order over one coordinate, got {ranges[0]}"
        return ""

    def order_over(self, size: int, count: int) -> Order | None:
        """Return the order in which coordinates hold the indices; None where they ascend."""
        return order_of(itertools.chain(*self.ranges_over(size, count))) if self._deals else None

    @property
    def _deals(self) -> bool:
        """Whether a coordinate may hold several ranges; of thousands, they are costly to list."""
        return type(self).ranges_over is not SplitPlacement.ranges_over

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the text form says beside the dim."""
        return tuple(getattr(self, field.name) for field in fields(self)[1:])

    @classmethod
    def of_numbers(cls, dim: int, numbers: tuple[int, ...]) -> Self:
        """Return the placement of a dim and of such numbers; TypeError for too many or few."""
        return cls(dim, *numbers)

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """Return the placement of this class that ``str`` wrote; None for another text."""
        match = _SPLIT.fullmatch(text)
        if match is None:
            return None
        numbers = match["numbers"].split(",") if match["numbers"] else ()
        try:
            return cls.of_numbers(int(match["dim"]), tuple(map(int, numbers)))
        except TypeError:
            return None

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis splits a tensor dim (the one given, if any)."""
        return dim is None or dim == self.dim

    def __str__(self) -> str:
        numbers = ",".join(map(str, self.numbers))
        return f"{self.name}({self.dim}:{numbers})" if numbers else f"{self.name}({self.dim})"


def refuse_subclass(base: str, cls: type) -> NoReturn:
    """Raise PlacementError: what is done with a class would be done with one derived from it."""
    raise PlacementError(
        f"{cls.__qualname__} cannot be derived from {base}: it would be taken for that everywhere. "
        "Derive it from SplitPlacement, with a form and sizes_over(size, count)"
    )


def is_torchs(value: object, name: str) -> bool:
    """Whether a value is torch's placement of that name; torch is not loaded for it."""
    cls = type(value)
    return cls.__name__ == name and cls.__module__ == _TORCHS
