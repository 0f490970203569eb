"""``Partial``: terms along an axis that are still to be reduced."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from dtckpt.errors import PlacementError

from .base import Placement, is_torchs, refuse_subclass

REDUCE_OPS = ("sum", "avg", "product", "max", "min")
"""Element-wise reductions that a ``Partial`` can be waiting for."""

_TEXT = re.compile(r"P\((\w+)\)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every coordinate holds a term; the value is their element-wise reduction over the axis.

    ``reduce_op`` is one of "sum", "avg", "product", "max", "min".
    """

    form: ClassVar[str] = "P(op)"

    reduce_op: str = "sum"

    def __init_subclass__(cls) -> NoReturn:
        refuse_subclass("Partial", cls)

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                f"Partial cannot reduce by {self.reduce_op!r}; expected one of {REDUCE_OPS}"
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether values are still to be reduced over the axis (by the op given, if any)."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Partial) or is_torchs(other, "Partial"):
            return self.reduce_op == getattr(other, "reduce_op", None)
        return NotImplemented

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """Return the placement for ``P(op)``."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(match[1])

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


def reductions(placements: Iterable[Placement]) -> set[str]:
    """Return what placements wait for, as reductions of which two do not commute.

    >>> from .replicate import Replicate
    >>> reductions((Partial("avg"), Replicate(), Partial("sum")))
    {'sum'}
    """
    waiting = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return {"sum" if op == "avg" else op for op in waiting}
