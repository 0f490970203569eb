"""Where a rank stands: the collective that it is about to issue, in a form that travels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

_MAX_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What one rank is about to issue."""

    kind: str = ""
    """Empty where a rank has issued none."""
    reduce_op: str = ""
    agreed: str = ""
    ranks: tuple[int, ...] = ()
    lane: str = ""
    """Of its group."""
    number: int = 0
    """How many collectives of the group came before."""
    count: int = 0
    """How many collectives this rank has come to, this one included."""
    threads: int = 0
    """How many threads of the rank have issued some."""
    site: str = ""
    sent_to: tuple[int, ...] = ()
    received_from: tuple[int, ...] = ()
    left: str = ""
    """How the rank has left, after this collective; empty while it has not."""

    @property
    def fingerprint(self) -> str:
        """The hash of what has to be equal on all ranks."""
        facts = json.dumps([self.kind, self.reduce_op, self.agreed])
        return blake2b(facts.encode(), digest_size=12).hexdigest()

    def leaving(self, how: str) -> Pending:
        """Return the same for a rank that has left."""
        return replace(self, left=how)

    def to_json(self) -> str:
        """Return a text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Pending:
        """Return what ``to_json`` wrote."""
        value = json.loads(text)
        for name in ("ranks", "sent_to", "received_from"):
            value[name] = tuple(value[name])
        return cls(**value)

    def doing(self) -> str:
        """Return what the rank was last seen at, as the end of a sentence about it."""
        if not self.kind:
            return f"has {self.left}, and issued no collective in it"
        if self.left:
            return f"has {self.left}; its last collective was {self}"
        return f"is at, or past, {self}"

    def what(self) -> str:
        """Return the collective itself."""
        terms = ", ".join(term for term in (self.reduce_op, self.agreed) if term)
        return f"{self.kind}({terms})" if terms else self.kind

    def __str__(self) -> str:
        return (
            f"{self.what()} over ranks {_shown(self.ranks)}, number {self.number + 1} over these "
            f"and {self.count} of its own, at {self.site or 'the backward pass'}"
        )


def told_divergence(pending: Mapping[int, Pending]) -> tuple[str, tuple[int, ...]]:
    """Return what to say of ranks that are about to issue different collectives, and who differs.

    Those differ who are not with the most, or, among as many, not with the lowest rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, one in pending.items():
        groups.setdefault(one.fingerprint, []).append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    first = pending[ordered[0][0]]
    lines = [
        f"ranks are about to issue different collectives over {len(first.ranks)} ranks, as number "
        f"{first.number + 1} over these:"
    ]
    for ranks in ordered:
        for site, there in _by_site(pending, ranks).items():
            what = pending[there[0]].what()
            lines.append(f"{_listed(there)}: {what} at {site or 'the backward pass'}")
    return "\n  ".join(lines), tuple(sorted(r for ranks in ordered[1:] for r in ranks))


def _by_site(pending: Mapping[int, Pending], ranks: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(pending[rank].site, []).append(rank)
    return found


def _listed(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {_shown(ranks)}"


def _shown(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    more = len(ranks) - _MAX_RANKS
    return f"{shown} and {more:,} more" if more > 0 else shown
