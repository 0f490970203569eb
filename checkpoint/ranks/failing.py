"""How a failure of one rank becomes the same error on all ranks.

Errors travel as text, so no exception has to be picklable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dtckpt.errors
from dtckpt.errors import CheckpointError, RankFailed

from .text import ranks_text

OK, FAILED = b"\0", b"\1"
"""The first byte of every answer and decision."""
RELAYED, OFFERED = b"\2", b"\3"
"""Instead of it: what follows is a decision, to be handed on; or who hands one on."""

CALLED_OFF = json.dumps(
    {"type": "RankFailed", "text": "another rank failed", "errno": None, "is_certain": False}
).encode()
"""What a rank tells that leaves a phase because another one has failed."""

_OWN_ERRORS = tuple(
    cls
    for cls in vars(dtckpt.errors).values()
    if isinstance(cls, type) and issubclass(cls, CheckpointError)
)


class Departure(str):
    """Why a rank is lost that has left by itself: it has said so, or is at another call."""

    __slots__ = ()


class CalledOff(Exception):
    """Raised by a rank that leaves a phase because another one has failed in it."""


def told(error: BaseException) -> bytes:
    """Return the type, if it is one of ours or derived from it, and the text; never raises."""
    if isinstance(error, CalledOff):
        return CALLED_OFF
    ours = [cls.__name__ for cls in type(error).__mro__ if cls in _OWN_ERRORS]
    text = _safe_str(error)
    if not ours or type(error) not in _OWN_ERRORS:
        text = f"{type(error).__name__}: {text}"
    return json.dumps(
        {
            "type": ours[0] if ours else None,
            "text": text,
            "errno": error.errno if isinstance(error, OSError) else None,
            "is_certain": isinstance(error, CheckpointError) and error.is_certain,
        }
    ).encode()


def failure(
    failed: Mapping[int, bytes], lost: Mapping[int, str], *, is_certain: bool = False
) -> bytes:
    """Return the decision that a phase has failed, and whether it is certain to have no effect."""
    causes = {rank: json.loads(cause) for rank, cause in failed.items()}
    is_certain = is_certain or all(cause["is_certain"] for cause in causes.values())
    left = [rank for rank, why in lost.items() if isinstance(why, Departure)]
    value = {"failed": causes, "lost": lost, "left": left, "is_certain": is_certain}
    return FAILED + json.dumps(value).encode()


def as_text(error: BaseException) -> str:
    """Return type and text; never raises."""
    return f"{type(error).__name__}: {_safe_str(error)}"


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"(its text could not be made: {type(broken).__name__})"


def joint_error(phase: str, decision: dict[str, Any], *, alone: bool) -> CheckpointError:
    """Return the error that all ranks raise, from what ``failure`` has made of its causes."""
    failed, lost = decision["failed"], decision["lost"]
    by_text: dict[str, list[int]] = {}
    for rank, cause in failed.items():
        by_text.setdefault(cause["text"], []).append(int(rank))
    if alone:
        message = f"{phase}: {next(iter(by_text))}"
    else:
        parts = [f"{phase} failed on {ranks_text(r)}: {text}" for text, r in by_text.items()]
        parts += [f"{phase} failed: rank {rank} is lost: {why}" for rank, why in lost.items()]
        message = "\n".join(parts)
    names = {cause["type"] for cause in failed.values()}
    cls = next((c for c in _OWN_ERRORS if names == {c.__name__}), CheckpointError)
    error = cls(message) if failed else RankFailed(message)
    if isinstance(error, RankFailed) and not failed and not decision["left"]:
        error.lost = tuple(sorted(map(int, lost)))
    error.phase, error.is_certain = phase, decision["is_certain"]
    numbers = {cause["errno"] for cause in failed.values()}
    if isinstance(error, OSError) and len(numbers) == 1:
        error.errno = numbers.pop()
    return error
