"""Abstract meshes: ranks arranged in an n-d array with named axes.

A ``Mesh`` is a value: it needs no process group and no torch, so a laptop can plan for 16,384
ranks. ``DeviceMesh`` adds the process groups of a running job.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from dtckpt.errors import MeshDimError, PlacementError

from .integers import ints

_MAX_DIGITS = 9
"""Of the size of an axis in text; no job has a billion ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """An n-d array of ranks.

    Two meshes are equal when shape and ranks are: axis names are labels.

    >>> mesh = Mesh((2, 3), ("dp", "tp"))
    >>> mesh.coordinate(4), mesh.rank((1, 1)), mesh.axis("tp")
    ((1, 1), 4, 1)
    """

    shape: tuple[int, ...]
    """Number of coordinates along every axis."""
    axis_names: tuple[str, ...] = field(default=(), compare=False)
    """One name per axis; ``axis0``, ``axis1``, ... where none are given."""
    ranks: tuple[int, ...] | None = None
    """Global rank of every coordinate in row-major order; None means 0, 1, 2, ..."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", ints(self.shape, "the shape of a mesh"))
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        if self.ranks is not None:
            object.__setattr__(self, "ranks", ints(self.ranks, "the ranks of a mesh"))
        if not self.axis_names:
            object.__setattr__(self, "axis_names", _default_names(len(self.shape)))
        if self.ranks is not None and _count_up(self.ranks, self.size):
            object.__setattr__(self, "ranks", None)
        self._validate()
        # Meshes are keys of many tables and may list thousands of ranks.
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    def _validate(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise PlacementError(f"a mesh needs axes of at least one rank, got shape {self.shape}")
        if len(self.axis_names) != len(self.shape):
            raise PlacementError(
                "mesh_shape and mesh_dim_names should have same length! "
                f"Got the shape {self.shape} and the names {self.axis_names}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise PlacementError(f"Each mesh_dim_name must be unique. Got {self.axis_names}")
        if self.ranks is not None and (
            len(self.ranks) != self.size or len(set(self.ranks)) != self.size or min(self.ranks) < 0
        ):
            raise PlacementError(
                f"a mesh of shape {self.shape} needs {self.size} different ranks, got {self.ranks}"
            )

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Return the mesh of a text such as ``dp=2,tp=4``.

        >>> Mesh.parse("dp=2,tp=4")
        Mesh(shape=(2, 4), axis_names=('dp', 'tp'), ranks=None)
        """
        names: list[str] = []
        sizes: list[int] = []
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if not name or not size.isdecimal() or len(size) > _MAX_DIGITS:
                raise PlacementError(f"not a mesh: {text[:80]!r}; expected a form like 'dp=2,tp=4'")
            names.append(name)
            sizes.append(int(size))
        return cls(tuple(sizes), tuple(names))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def axis(self, axis: int | str) -> int:
        """Return the index of an axis given by name or (negative) index."""
        if isinstance(axis, str):
            if axis not in self.axis_names:
                raise MeshDimError(
                    f"Invalid mesh_dim_name {axis!r}: mesh {self} has the dims {self.axis_names}"
                )
            return self.axis_names.index(axis)
        if not -self.ndim <= axis < self.ndim:
            raise MeshDimError(f"mesh dim {axis} is out of range: mesh {self} has {self.ndim}")
        return axis % self.ndim

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """Return the global rank at a coordinate."""
        index = 0
        if len(coordinate) == len(self.shape):
            for i, n in zip(coordinate, self.shape, strict=True):
                if not 0 <= i < n:
                    break
                index = index * n + i
            else:
                return index if self.ranks is None else self.ranks[index]
        raise self._outside(coordinate)

    def check(self, coordinate: tuple[int, ...]) -> None:
        """Raise PlacementError unless a coordinate lies in the mesh."""
        if len(coordinate) != len(self.shape):
            raise self._outside(coordinate)
        for i, n in zip(coordinate, self.shape, strict=True):
            if not 0 <= i < n:
                raise self._outside(coordinate)

    def _outside(self, coordinate: tuple[int, ...]) -> PlacementError:
        return PlacementError(f"coordinate {coordinate} is outside of a mesh of shape {self.shape}")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a global rank, or None where the rank is not in the mesh."""
        if self.ranks is None:
            index = rank if 0 <= rank < self.size else None
        else:
            index = _index_by_rank(self.ranks).get(rank)
        return None if index is None else unravel(index, self.shape)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield every coordinate in row-major order."""
        return itertools.product(*(range(n) for n in self.shape))

    def all_ranks(self) -> tuple[int, ...]:
        """Return every rank in row-major order of its coordinate."""
        return tuple(range(self.size)) if self.ranks is None else self.ranks

    def submesh(self, axes: tuple[int | str, ...], at: tuple[int, ...]) -> Mesh:
        """Return the mesh over ``axes``, in the order given, through coordinate ``at``.

        >>> Mesh((2, 3), ("dp", "tp")).submesh(("tp",), at=(1, 0))
        Mesh(shape=(3,), axis_names=('tp',), ranks=(3, 4, 5))
        """
        if len(at) != self.ndim:
            raise PlacementError(f"coordinate {at} does not fit a mesh of {self.ndim} axes")
        indices = [self.axis(axis) for axis in axes]
        shape = tuple(self.shape[i] for i in indices)
        ranks: list[int] = []
        for part in itertools.product(*(range(n) for n in shape)):
            coordinate = list(at)
            for i, position in zip(indices, part, strict=True):
                coordinate[i] = position
            ranks.append(self.rank(tuple(coordinate)))
        return Mesh(shape, tuple(self.axis_names[i] for i in indices), tuple(ranks))

    def joined(self, parts: tuple[tuple[int, ...], ...], names: tuple[str, ...]) -> Mesh:
        """Return the mesh of these ranks in which the axes of each part are one.

        ``parts`` names every axis once, in the order of the ranks.

        >>> Mesh((2, 2, 3)).joined(((0, 1), (2,)), ("dp", "tp")).shape
        (4, 3)
        """
        shape = tuple(math.prod(self.shape[axis] for axis in part) for part in parts)
        return Mesh(shape, names, self.all_ranks())

    def split(self, axis: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
        """Return the mesh in which one axis is several, the last of which varies fastest.

        >>> str(Mesh((2, 6), ("dp", "tp")).split(1, (3, 2), ("ep", "etp")))
        'dp=2,ep=3,etp=2'
        """
        if not sizes or math.prod(sizes) != self.shape[axis]:
            raise PlacementError(
                f"axis {self.axis_names[axis]!r} of {self.shape[axis]} ranks cannot be split into "
                f"{sizes}: their product must be {self.shape[axis]}"
            )
        shape = (*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        return Mesh(
            shape,
            (*self.axis_names[:axis], *names, *self.axis_names[axis + 1 :]),
            self.all_ranks(),
        )

    @property
    def is_named(self) -> bool:
        """Whether its axes have names of their own: other than ``axis0``, ``axis1``, ..."""
        return self.axis_names != _default_names(self.ndim)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; ``ranks`` is left out where they count up from 0."""
        value: dict[str, Any] = {"shape": list(self.shape), "axes": list(self.axis_names)}
        if self.ranks is not None:
            value["ranks"] = list(self.ranks)
        return value

    @classmethod
    def from_json(cls, value: object) -> Mesh:
        """Return the mesh that ``to_json`` wrote; PlacementError where it is malformed."""
        try:
            fields = cast(dict[str, Any], value)
            ranks = fields.get("ranks")
            return cls(
                ints(fields["shape"], "shape"),
                tuple(str(name) for name in fields["axes"]),
                None if ranks is None else ints(ranks, "ranks"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlacementError(f"not a mesh: {value!r} ({error})") from error

    def __str__(self) -> str:
        return ",".join(f"{name}={n}" for name, n in zip(self.axis_names, self.shape, strict=True))


def _count_up(ranks: tuple[int, ...], size: int) -> bool:
    """Whether ranks are 0 to ``size - 1``; ``size`` may be any number, the ranks are there."""
    return len(ranks) == size and ranks == tuple(range(size))


def _default_names(ndim: int) -> tuple[str, ...]:
    return tuple(f"axis{i}" for i in range(ndim))


@lru_cache(maxsize=256)
def _index_by_rank(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: index for index, rank in enumerate(ranks)}


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the multi-index of a row-major index.

    >>> unravel(5, (2, 3))
    (1, 2)
    """
    digits: list[int] = []
    for n in reversed(shape):
        index, digit = divmod(index, n)
        digits.append(digit)
    return tuple(reversed(digits))
