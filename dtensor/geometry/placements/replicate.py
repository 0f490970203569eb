"""``Replicate``: copies along an axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

from .base import Placement, is_torchs, refuse_subclass


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every coordinate of the axis holds the same values."""

    form: ClassVar[str] = "R"

    def __init_subclass__(cls) -> NoReturn:
        refuse_subclass("Replicate", cls)

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same values."""
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Replicate) or is_torchs(other, "Replicate"):
            return True
        return NotImplemented

    def __hash__(self) -> int:
        return -1

    @classmethod
    def parse(cls, text: str) -> Placement | None:
        """Return the placement for ``R``."""
        return cls() if text == "R" else None

    def __str__(self) -> str:
        return "R"
