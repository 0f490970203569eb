"""``Shard``: even chunks, which several axes may cut one after the other in any order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from ..integers import integer
from .base import Placement, SplitPlacement, is_torchs, refuse_subclass

_TEXT = re.compile(r"S\((?P<dim>-?\d+)\)(?:@(?P<order>\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shard(SplitPlacement):
    """Splits tensor dim ``dim`` over the axis as ``torch.chunk`` does.

    Of n indices over k coordinates each holds ``ceil(n / k)``; the last ones hold fewer or none.

    Where several axes split one dim, the axes cut in the order of the mesh unless ``order`` says
    otherwise: ``Shard(0, order=1), Shard(0, order=0)`` lets the second axis cut first, and the
    first axis cut the pieces (tensor parallel inside FSDP). Orders count from 0 among the axes
    that split the dim, and are given for all of them or for none.

    >>> print(Shard(0), Shard(1, order=2))
    S(0) S(1)@2
    """

    form: ClassVar[str] = "S(dim), S(dim)@order"

    order: int | None = None

    def __init_subclass__(cls) -> NoReturn:
        refuse_subclass("Shard", cls)

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            object.__setattr__(self, "dim", integer(self.dim, "the dim of a Shard"))
        if self.order is not None and type(self.order) is not int:
            object.__setattr__(self, "order", integer(self.order, "the order of a Shard"))

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        """Return even chunks, and what is left.

        >>> Shard(0).sizes_over(5, 4)
        (2, 2, 1, 0)
        """
        chunk = max(-(-size // count), 1)
        full, rest = divmod(size, chunk)
        return ((chunk,) * full + (rest,) + (0,) * count)[:count]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Shard):
            return self.dim == other.dim and self.order == other.order
        if is_torchs(other, "Shard"):
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
        first = 0
        for length in self.sizes_over(size, num_chunks):
            part = tensor.narrow(dim, first, length)
            first += length
            lacking.append(step - length)
            if with_padding and lacking[-1]:
                sizes = list(part.shape)
                sizes[dim] = step
                padded = part.new_zeros(sizes)
                padded.narrow(dim, 0, length).copy_(part)
                part = padded
            parts.append(part.contiguous() if contiguous else part)
        return parts, lacking if with_padding else []

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """Return the placement for ``S(dim)`` or ``S(dim)@order``."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        return cls(int(match["dim"]), int(match["order"]) if match["order"] else None)

    def __str__(self) -> str:
        return f"S({self.dim})" if self.order is None else f"S({self.dim})@{self.order}"
