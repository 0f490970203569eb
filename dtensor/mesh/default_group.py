"""The default process group, where nobody has made it yet."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.errors import PlacementError

_c10d: Any = dist  # torch's stubs leave out the stores


def is_launched() -> bool:
    """Whether a launcher such as torchrun has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_here() -> int | None:
    """Return the rank of this process in its job; None where it has none."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_launched() else None


def join_job() -> None:
    """Initialise torch.distributed from the environment, if that tells how and nobody has."""
    if not dist.is_initialized() and is_launched():
        dist.init_process_group()


def join_or_be_alone(shape: tuple[int, ...]) -> None:
    """Make sure of a default process group: the launcher's, or of this process and no other.

    Raises PlacementError where a process that was started alone needs others for a mesh of
    ``shape``.
    """
    join_job()
    if dist.is_initialized():
        return
    size = torch.Size(shape).numel()
    if size != 1:
        raise PlacementError(
            f"a mesh of shape {shape} needs {size} processes, and this one was started alone "
            "(RANK and WORLD_SIZE are not set): start the script by torchrun "
            f"--nproc-per-node={size}, or plan with Mesh({shape}), which needs no process"
        )
    backend = None if torch.accelerator.is_available() else "gloo"
    dist.init_process_group(backend, store=_c10d.HashStore(), rank=0, world_size=1)
    own = dist.group.WORLD

    def leave() -> None:
        if dist.is_initialized() and dist.group.WORLD is own:
            dist.destroy_process_group()

    atexit.register(leave)
