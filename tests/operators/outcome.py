"""What came of trying an operator: values that travel between processes and into reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

RIGHT = "right"
REFUSED = "refused"
ERROR = "error"
WRONG = "wrong"
DIVERGENT = "divergent"
HANG = "hang"
CRASH = "crash"

KINDS = (RIGHT, REFUSED, ERROR, WRONG, DIVERGENT, HANG, CRASH)
"""From good to bad; an operator is as bad as its worst case."""

UNSAFE = (WRONG, DIVERGENT, HANG, CRASH)
"""Kinds that no operator may have."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one case failed on one rank."""

    kind: str
    text: str
    where: str = ""
    """Last line of our own code that the error came through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The first case of an operator that failed in one way."""

    case: str
    text: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpResult:
    """What came of one operator with one choice of sizes."""

    name: str
    sizes: str
    untestable: str = ""
    """Why nothing was compared; empty where something was."""
    compared: tuple[str, ...] = ()
    """What was compared: values, or less where no values are defined."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Number of cases of every kind."""
    writing: dict[str, int] = field(default_factory=dict[str, int])
    """Those of them that write in place or to ``out=``."""
    examples: dict[str, Example] = field(default_factory=dict[str, Example])
    """By kind, the first case of it."""
    runs: str = ""
    """rule, decomposed or fallback; empty where nothing was right."""
    gathered: tuple[str, ...] = ()
    """Operators that were gathered and run whole."""
    seconds: float = 0.0

    @property
    def worst(self) -> str:
        """The worst kind of all cases; an empty string where there were none."""
        found = [kind for kind in KINDS if self.counts.get(kind)]
        return found[-1] if found else ""

    @property
    def returns_right(self) -> bool:
        """Whether all cases are right but for those that write in place or to ``out=``."""
        return all(
            kind == RIGHT or count == self.writing.get(kind, 0)
            for kind, count in self.counts.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OpResult:
        """Return the result that ``to_json`` wrote."""
        examples = {kind: Example(**example) for kind, example in value["examples"].items()}
        fields: dict[str, Any] = {**value, "examples": examples}
        for name in ("compared", "gathered"):
            fields[name] = tuple(value[name])
        return cls(**fields)


def agree(failures: Iterable[Failure | None]) -> bool:
    """Whether ranks can go on together: none raised, or all the same error and none timed out.

    A value may be wrong on some ranks only; that is wrong, but the ranks go on together.
    """
    raised = {
        None if failure is None or failure.kind == WRONG else (failure.kind, failure.text)
        for failure in failures
    }
    return len(raised) == 1 and not any(entry and entry[0] == HANG for entry in raised)


def joined(failures: list[Failure | None]) -> Failure | None:
    """Return what a case came to, from what every rank saw; None where all is right."""
    some = [failure for failure in failures if failure is not None]
    if not some:
        return None
    if agree(failures):
        return max(some, key=lambda failure: KINDS.index(failure.kind))
    told = [f for f in some if f.kind != HANG]
    if not told and len(some) == len(failures):
        return some[0]
    text = "; ".join(
        f"rank {rank}: " + (f"{failure.kind}: {failure.text[:160]}" if failure else "no error")
        for rank, failure in enumerate(failures)
    )
    return Failure(DIVERGENT if told else HANG, text, (told or some)[0].where)
