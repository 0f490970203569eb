"""What a run keeps beside each committed checkpoint, so that one listing tells what there is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dtckpt.errors import CheckpointError, Corrupt

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of one checkpoint, a small JSON file beside its directory.

    It is written after the commit and taken away before a deletion, so that a checkpoint without
    one may be whole (its manifest tells), and one with it was committed.
    """

    step: int
    save_id: str
    """Of the save that this is about; that of another one is out of date."""
    saved_at: float
    """When it was committed, in seconds since 1970."""
    bases: tuple[str, ...] = ()
    """Names of the checkpoints beside it to whose files it refers."""
    total_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        told = {
            "version": _VERSION,
            "step": self.step,
            "save_id": self.save_id,
            "saved_at": self.saved_at,
            "bases": list(self.bases),
            "total_bytes": self.total_bytes,
            "metrics": {name: _told(value) for name, value in self.metrics.items()},
        }
        return json.dumps(told, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> StepRecord:
        """Read the text of the file; Corrupt if it is none, CheckpointError if it is newer."""
        try:
            told = cast(dict[str, Any], json.loads(text))
            if told["version"] > _VERSION:
                raise CheckpointError(  # not Corrupt: it is not to be made anew, without metrics
                    f"{where}: this record has version {told['version']}, {_VERSION} is the newest "
                    "that is read. Use the version of dtckpt that wrote it"
                )
            return cls(
                step=int(told["step"]),
                save_id=str(told["save_id"]),
                saved_at=float(told["saved_at"]),
                bases=tuple(str(name) for name in told["bases"]),
                total_bytes=int(told["total_bytes"]),
                metrics={str(name): float(value) for name, value in told["metrics"].items()},
            )
        except (
            ValueError,
            OverflowError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise Corrupt(f"{where}: this is no record of a checkpoint: {error!r}") from error


def _told(value: float) -> float | str:
    """Return a number as JSON has it, those that it has not as text that ``float`` reads."""
    return value if math.isfinite(value) else str(value)
