"""What the library logs, and how the environment turns it on.

``DTCKPT_LOGS=+dtensor,redistribute,-checkpoint`` sets the loggers ``dtckpt.dtensor``,
``dtckpt.redistribute`` and ``dtckpt.checkpoint``: ``+`` shows DEBUG and above, nothing INFO, ``-``
WARNING. They are ordinary loggers of the standard library. Where the program has set up logging
its handlers get the messages; where it has not, those of the names given go to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

VARIABLE = "DTCKPT_LOGS"
NAMES = {
    "checkpoint": "what a save or load moves, per rank, and how long it takes",
    "dtensor": "operators without a rule of their own, and plans as they are made",
    "redistribute": "every redistribute: from, to, bytes and steps",
    "storage": "agents that hold checkpoints in memory, and which do not answer",
}
"""What there is to be logged."""

_LEVELS = {"+": logging.DEBUG, "-": logging.WARNING}


def levels_of(text: str) -> dict[str, int]:
    """Return a level by name; ValueError, naming what there is, for anything else.

    >>> levels_of("+dtensor, checkpoint")
    {'dtensor': 10, 'checkpoint': 20}
    """
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        level = _LEVELS.get(part[0], logging.INFO)
        name = part[1:] if part[0] in _LEVELS else part
        if name not in NAMES:
            known = "; ".join(f"{name}: {what}" for name, what in NAMES.items())
            raise ValueError(
                f"{VARIABLE}={text!r}: there is no {name!r} to be logged. Names, each with + in "
                f"front for more or - for warnings only, are {known}"
            )
        found[name] = level
    return found


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a part of the library."""
    return logging.getLogger(f"dtckpt.{name}")


class _ToStderr(logging.StreamHandler[Any]):
    """Writes what nobody else would."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


class _WithRank(logging.Formatter):
    """Puts the rank in front, if the process is one of a job."""

    def format(self, record: logging.LogRecord) -> str:
        text, rank = super().format(record), rank_of_job()
        return text if rank is None else f"[rank {rank}] {text}"


def rank_of_job() -> int | None:
    """Return the rank of this process in its job; None where it is none. Never imports torch."""
    torch: Any = sys.modules.get("torch")
    distributed: Any = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank()


def _follow_environment() -> None:
    levels = levels_of(os.environ.get(VARIABLE, ""))
    if not levels:
        return
    handler = _ToStderr()
    handler.setFormatter(_WithRank("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    for name, level in levels.items():
        logger = logger_of(name)
        logger.setLevel(level)
        logger.addHandler(handler)


_follow_environment()
