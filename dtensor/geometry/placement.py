"""Placements: how a tensor lies along one axis of a mesh.

A tensor has one placement per mesh axis. ``Shard`` and ``Ragged`` split a tensor dim over the axis,
``Replicate`` repeats the tensor along it, ``Partial`` holds terms that are still to be reduced over
it. They are plain frozen values that know nothing of torch, with a short text form that manifests
and the command line share: ``S(0)``, ``S(0)@1``, ``R``, ``P(sum)``, ``Ragged(0:3,1,4)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import PlacementError

from .integers import integer, ints

_TORCHS = "torch.distributed.tensor.placement_types"


def _is_torchs(value: object, name: str) -> bool:
    """Whether a value is torch's placement of that name; torch is not loaded for it."""
    cls = type(value)
    return cls.__name__ == name and cls.__module__ == _TORCHS


REDUCE_OPS = ("sum", "avg", "product", "max", "min")
"""Element-wise reductions that a ``Partial`` can be waiting for."""

_FORMS = re.compile(
    r"S\((?P<shard>-?\d+)\)(?:@(?P<order>\d+))?"
    r"|(?P<replicate>R)"
    r"|P\((?P<partial>\w+)\)"
    r"|Ragged\((?P<ragged>-?\d+)(?::(?P<sizes>\d+(?:,\d+)*))?\)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Base of all placements; ``isinstance`` or the three questions below tell them apart.

    A placement equals torch's of the same meaning and has its hash; it is no instance of torch's
    classes. The three questions are torch's, too, and have the same answers there.
    """

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis splits a tensor dim (the one given, if any)."""
        return isinstance(self, Shard | Ragged) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same values."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether values are still to be reduced over the axis (by the op given, if any)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Splits tensor dim ``dim`` over the axis as ``torch.chunk`` does.

    Of n indices over k coordinates each holds ``ceil(n / k)``; the last ones hold fewer or none.

    Where several axes split one dim, the axes cut in the order of the mesh unless ``order`` says
    otherwise: ``Shard(0, order=1), Shard(0, order=0)`` lets the second axis cut first, and the
    first axis cut the pieces (tensor parallel inside FSDP). Orders count from 0 among the axes
    that split the dim, and are given for all of them or for none.

    >>> print(Shard(0), Shard(1, order=2))
    S(0) S(1)@2
    """

    dim: int
    order: int | None = None

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            object.__setattr__(self, "dim", integer(self.dim, "the dim of a Shard"))
        if self.order is not None and type(self.order) is not int:
            object.__setattr__(self, "order", integer(self.order, "the order of a Shard"))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Shard):
            return self.dim == other.dim and self.order == other.order
        if _is_torchs(other, "Shard"):
            return self.order is None and self.dim == getattr(other, "dim", None)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.dim if self.order is None else (self.dim, self.order))

    def _split_tensor(
        self, tensor: Any, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Any], list[int]]:
        """Return the parts of a tensor, and by how much each is padded: a name of torch's."""
        size, dim = tensor.shape[self.dim], self.dim
        step = -(-size // num_chunks)
        parts: list[Any] = []
        lacking: list[int] = []
        for index in range(num_chunks):
            first = min(index * step, size)
            part = tensor.narrow(dim, first, min(step, size - first))
            lacking.append(step - part.shape[dim])
            if with_padding and lacking[-1]:
                sizes = list(part.shape)
                sizes[dim] = step
                padded = part.new_zeros(sizes)
                padded.narrow(dim, 0, part.shape[dim]).copy_(part)
                part = padded
            parts.append(part.contiguous() if contiguous else part)
        return parts, lacking if with_padding else []

    def __str__(self) -> str:
        return f"S({self.dim})" if self.order is None else f"S({self.dim})@{self.order}"


@dataclass(frozen=True, slots=True)
class Ragged(Placement):
    """Splits tensor dim ``dim`` over the axis into pieces of the given sizes, one per coordinate.

    The sizes sum to the size of the dim; any of them may be 0. A ragged axis is the first to cut
    its dim, whatever its place in the mesh; other axes may shard its pieces further.

    Without sizes it is a question, which ``DTensor.from_local`` alone answers, by asking the ranks;
    a layout refuses it.

    >>> print(Ragged(0, (3, 0, 5)), Ragged(0))
    Ragged(0:3,0,5) Ragged(0)
    """

    dim: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", integer(self.dim, "the dim of a Ragged"))
        object.__setattr__(self, "sizes", ints(self.sizes, f"the sizes of Ragged(dim={self.dim})"))
        if min(self.sizes, default=0) < 0:
            raise PlacementError(
                f"Ragged(dim={self.dim}) needs one size of 0 or more per coordinate, "
                f"got {self.sizes}"
            )

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.sizes))
        return f"Ragged({self.dim}:{sizes})" if sizes else f"Ragged({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every coordinate of the axis holds the same values."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Replicate) or _is_torchs(other, "Replicate"):
            return True
        return NotImplemented

    def __hash__(self) -> int:
        return -1

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every coordinate holds a term; the value is their element-wise reduction over the axis.

    ``reduce_op`` is one of "sum", "avg", "product", "max", "min".
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                f"Partial cannot reduce by {self.reduce_op!r}; expected one of {REDUCE_OPS}"
            )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Partial) or _is_torchs(other, "Partial"):
            return self.reduce_op == getattr(other, "reduce_op", None)
        return NotImplemented

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


def reductions(placements: Iterable[Placement]) -> set[str]:
    """Return what placements wait for, as reductions of which two do not commute.

    >>> reductions((Partial("avg"), Replicate(), Partial("sum")))
    {'sum'}
    """
    waiting = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return {"sum" if op == "avg" else op for op in waiting}


KINDS = (Shard, Ragged, Replicate, Partial)
"""All placements there are: a new one has to be known to layouts, routes and rules first."""


def parse_placement(text: str) -> Placement:
    """Return the placement that ``str`` wrote.

    >>> parse_placement("Ragged(0:3,0,5)")
    Ragged(dim=0, sizes=(3, 0, 5))
    """
    match = _FORMS.fullmatch(text.strip())
    if match is None or max(map(len, re.findall(r"\d+", text)), default=0) > 18:
        raise PlacementError(
            f"not a placement: {text!r}; expected S(dim), S(dim)@order, R, P(op) "
            "or Ragged(dim:size,size,...)"
        )
    if match["replicate"]:
        return Replicate()
    if match["partial"]:
        return Partial(match["partial"])
    if match["ragged"]:
        sizes = match["sizes"].split(",") if match["sizes"] else ()
        return Ragged(int(match["ragged"]), tuple(map(int, sizes)))
    return Shard(int(match["shard"]), int(match["order"]) if match["order"] else None)


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Return placements from a comma-separated list, one per mesh axis.

    >>> parse_placements("S(0), R")
    (Shard(dim=0, order=None), Replicate())
    """
    return tuple(parse_placement(part) for part in re.split(r",(?![^()]*\))", text))


def format_placements(placements: Sequence[Placement]) -> str:
    """Return placements in their text form, as ``parse_placements`` reads them."""
    return ", ".join(str(placement) for placement in placements)
