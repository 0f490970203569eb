"""What ranks tell each other once they have matched, and what follows from it for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import reduce
from operator import and_
from typing import Any

from ...storage.base import Store
from ..sharing.read_once import Offer, decide, share_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """What the others must know of what one rank has matched."""

    unexpected: str
    """Leaves of the checkpoint that it did not ask for, as ``Match.unexpected_mask`` tells them."""
    is_complete: bool
    """Whether the checkpoint has all that this rank must have."""
    strict: bool
    idle: Sequence[str]
    """Keys of ``rename`` that are no name on it."""
    compares: bool
    """Whether it has to compare what was saved for destinations that share memory."""
    offer: Offer
    calls_back: bool
    """Whether code of the user takes part in handing over what was read."""

    def to_bytes(self) -> bytes:
        """Return JSON without names: as many answers as there are ranks go to one of them."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Matched:
        """Return what ``to_bytes`` was called on."""
        names = [field.name for field in fields(cls)]
        value: dict[str, Any] = dict(zip(names, json.loads(data), strict=True))
        value["offer"] = Offer(*value["offer"])
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the coordinator makes of what all ranks have matched."""

    unexpected: str
    """Leaves of the checkpoint that no rank asked for, as a mask."""
    idle: Sequence[str]
    """Keys of ``rename`` that are no name on any rank."""
    read_once: bool
    in_memory: bool
    """Whether they do so by memory of the host that they share."""
    reason: str
    must_check: bool
    """Whether some rank has something to refuse, or reads still to plan, before any rank reads."""
    calls_back: bool
    """Whether handing over what was read may fail on some rank, so that all have to hear of it."""

    @classmethod
    def of(cls, told: Sequence[Matched], store: Store) -> Decision:
        """Return the decision for all ranks."""
        offers = [one.offer for one in told]
        read_once, reason = decide(offers, store)
        unexpected = reduce(and_, (int(one.unexpected, 16) for one in told))
        idle = set(told[0].idle).intersection(*(one.idle for one in told))
        return cls(
            unexpected=f"{unexpected:x}",
            idle=sorted(idle),
            read_once=read_once,
            in_memory=share_memory(offers),
            reason=reason,
            must_check=bool(
                idle
                or any(one.offer.has_something or not one.is_complete for one in told)
                or any(one.compares for one in told)
                or (unexpected and any(one.strict for one in told))
            ),
            calls_back=any(one.calls_back for one in told),
        )

    def to_bytes(self) -> bytes:
        """Return JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Decision:
        """Return what ``to_bytes`` was called on."""
        return cls(**json.loads(data))
