"""How ranks agree on the state of the whole job before anything is written.

All exchange one record of fixed size. Ranks whose descriptions have the same fingerprint need
nothing more; of others one rank per fingerprint sends its description. What ranks keep for
themselves (PerRank) is left out of the fingerprint, since it differs by nature, and is exchanged
by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from dtckpt.errors import LayoutMismatch

from .merging import Report, check_copies, merge, with_per_rank
from .ranks import Ranks, together
from .spec import GlobalState, StateSpec, fingerprint
from .text import ranks_text


@dataclass(frozen=True, slots=True)
class Record:
    """What every rank tells every other one, in 32 bytes."""

    fingerprint: bytes
    place: bytes
    """Hash of where the rank saves to: all must mean the same place."""
    save_id: bytes
    """A random id; that of the first rank is taken."""

    def to_bytes(self) -> bytes:
        """Return 16 + 8 + 8 bytes."""
        return self.fingerprint + self.place + self.save_id

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Return the record that ``to_bytes`` wrote."""
        return cls(data[:16], data[16:24], data[24:32])


def describe(shared: StateSpec, url: str, save_id: bytes) -> Record:
    """Return the record of a rank that saves to ``url``."""
    return Record(fingerprint(shared.to_bytes()), fingerprint(url.encode())[:8], save_id)


def agree(
    ranks: Ranks,
    records: list[Record],
    shared: StateSpec,
    per_rank: StateSpec,
    digests_of: Callable[[str], dict[str, str]],
) -> GlobalState:
    """Return the state of all ranks; the same on each of them, or the same error.

    ``digests_of`` gives the hash of every box of a tensor that this rank holds.
    """
    _check_places(ranks, records)
    by_print: dict[bytes, list[int]] = {}
    for rank, record in zip(ranks.all, records, strict=True):
        by_print.setdefault(record.fingerprint, []).append(rank)
    reports: list[Report] = [(ranks.all, shared)]
    if len(by_print) > 1:
        speakers = {group[0]: tuple(group) for group in by_print.values()}
        own = shared.to_bytes() if ranks.rank in speakers else b""
        answers = together(ranks, "save: agree", lambda: own)
        told = dict(zip(ranks.all, answers, strict=True))
        reports = [(group, StateSpec.from_bytes(told[r])) for r, group in speakers.items()]
    whole = merge(reports)
    _compare_copies(ranks, whole, digests_of)
    if whole.has_per_rank:
        answers = together(ranks, "save: values of each rank", per_rank.to_bytes)
        found = {r: StateSpec.from_bytes(a) for r, a in zip(ranks.all, answers, strict=True)}
        whole = with_per_rank(whole, found)
    return whole


def _check_places(ranks: Ranks, records: list[Record]) -> None:
    first = records[0].place
    others = [r for r, record in zip(ranks.all, records, strict=True) if record.place != first]
    if others:
        raise LayoutMismatch(
            f"the ranks save to different places: {ranks_text(others)} to another one than rank "
            f"{ranks.all[0]}. Give all ranks the same checkpoint_id; a path made from the clock "
            "differs from rank to rank"
        )


def _compare_copies(
    ranks: Ranks, whole: GlobalState, digests_of: Callable[[str], dict[str, str]]
) -> None:
    """Check that ranks which hold copies of a tensor that nothing else vouches for agree on it."""
    joined = [tensor.name for tensor in whole.tensors if tensor.is_joined]
    if not joined:
        return

    def digests() -> bytes:
        found = {name: digests_of(name) for name in joined}
        return json.dumps(found).encode()

    answers = together(ranks, "save: compare copies", digests)
    check_copies(whole.tensors, {r: json.loads(a) for r, a in zip(ranks.all, answers, strict=True)})
