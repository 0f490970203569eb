"""``CheckpointException`` of torch, which errors are, too, where they leave this package."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dtckpt.errors import CheckpointError

from ...dtensor.comm.caches import remembered

__all__ = ["CheckpointException"]


@contextmanager
def failing_as_torch() -> Generator[None]:
    """Have errors of checkpoints be torch's, too: programs catch CheckpointException."""
    try:
        yield
    except CheckpointError as error:
        failed_as_torch(error)
        raise


def failed_as_torch(error: BaseException) -> None:
    """Let an error be a CheckpointException, too, with all that it is and has."""
    if isinstance(error, CheckpointError) and not isinstance(error, CheckpointException):
        error.__class__ = _both(type(error))


@remembered(64)
def _both(kind: type[CheckpointError]) -> type[Any]:
    """Return the class of an error that is one of torch's, too; it is called as ours."""
    own = {
        "__module__": kind.__module__,
        "__str__": kind.__str__,
        "__reduce__": _reduced,
        "failures": property(_failures),
    }
    return type(kind.__name__, (kind, CheckpointException), own)


def _reduced(error: CheckpointError) -> tuple[type[CheckpointError], tuple[Any, ...], Any]:
    """Return what pickles hold: an error of ours alone, whose class has a name to be found by."""
    return type(error).__mro__[1], error.args, vars(error)


def _failures(error: BaseException) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
    """Return what torch tells of each rank: of this one, whose error says what others met."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {rank: (error, traceback.extract_tb(error.__traceback__))}
