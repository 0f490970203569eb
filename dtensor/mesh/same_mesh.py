"""All ranks of a job make the same mesh, or all of them raise."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers, all_gather_ints
from ..comm.devices import device_of_rank


def require_same_mesh(device_type: str, arguments: str) -> None:
    """Raise PlacementError on every rank of the job unless all of them pass the same arguments.

    They are compared as text, before anything is made of them that could raise on some ranks only.
    Every rank of the job must call.
    """
    size = dist.get_world_size()
    if size == 1:
        return
    peers = Peers(dist.group.WORLD, tuple(range(size)))
    rows = all_gather_ints([code_of(arguments)], peers, _device(device_type))
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise PlacementError(
            f"ranks disagree about the mesh: {others} differ from rank 0; this rank has {arguments}"
        )


def code_of(text: str) -> int:
    """Return a number that is the same for a text on all ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _device(device_type: str) -> torch.device:
    """Return where the job's group can gather a number."""
    group: Any = dist.group.WORLD
    if any(name in str(dist.get_backend(group)) for name in ("gloo", "mpi", "ucc")):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if device_type == "cpu" and accelerator is not None:
        return device_of_rank(accelerator.type)
    return device_of_rank(device_type)
