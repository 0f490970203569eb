"""Counts over the results of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .outcome import RIGHT, UNSAFE, OpResult

WAYS = {
    "rule": "by sharding rules and our own decompositions",
    "decomposed": "by torch's decomposition, at least one step of them",
    "fallback": "on whole tensors, at least one step of them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a sweep with one choice of sizes found, as numbers of operators."""

    sizes: str
    total: int
    testable: int
    right: int
    returns_right: int
    """Those, and others that are wrong only where they write in place or to ``out=``."""
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    """Testable operators by their worst kind."""
    ways: dict[str, int] = field(default_factory=dict[str, int])
    """Testable operators by how they run."""
    cases: int

    @property
    def share(self) -> float:
        """Share of the testable operators that are entirely right, from 0 to 1."""
        return self.right / self.testable if self.testable else 1.0


def summary_of(results: Sequence[OpResult], sizes: str) -> Summary:
    """Return the counts of the results of one choice of sizes."""
    chosen = [result for result in results if result.sizes == sizes]
    tested = [result for result in chosen if not result.untestable]
    return Summary(
        sizes=sizes,
        total=len(chosen),
        testable=len(tested),
        right=sum(result.worst == RIGHT for result in tested),
        returns_right=sum(result.returns_right for result in tested),
        kinds=_counts(result.worst for result in tested),
        ways=_counts(result.runs for result in tested if result.runs),
        cases=sum(sum(result.counts.values()) for result in tested),
    )


def is_unsafe(result: OpResult) -> bool:
    """Whether an operator computes a wrong value, or parts the ranks."""
    return any(result.counts.get(kind) for kind in UNSAFE)


def _counts(values: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found
