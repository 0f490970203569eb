"""What ranks tell each other when torch's seed has changed, without a collective.

Nothing makes a program seed torch on all of its ranks, and a collective that some of them do not
enter would meet another one of theirs. So each rank that notices a new seed leaves a note in the
store of the job and reads those of the others, for a time that ends.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtckpt.errors import PlacementError

from ..device_mesh import DeviceMesh
from ..torch_private import job_store

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the notes of others: they may be slow, or never come."""


def rows_by_store(row: list[int], mesh: DeviceMesh, about: str) -> list[list[int]] | None:
    """Return the integers of all ranks of a mesh, by position; None where the job has no store.

    ``about`` is alike on all ranks and used once, but for a number after its last slash that
    counts up. Raises PlacementError where some rank has left none in time.
    """
    store = job_store() if dist.is_initialized() else None
    if store is None:
        return None
    ranks = mesh.layout_mesh.all_ranks()
    prefix, _, number = about.rpartition("/")
    digest = hashlib.sha256(f"{mesh.device_type} {mesh.layout_mesh} {ranks}".encode()).hexdigest()

    def key(rank: int, at: int) -> str:
        return f"dtckpt/random/{digest[:16]}/{prefix}/{at}/{rank}"

    here, at = mesh.get_rank(), int(number)
    store.set(key(here, at), " ".join(map(str, row)))
    keys = [key(rank, at) for rank in ranks]
    try:
        store.wait(keys, PATIENCE)
    except (RuntimeError, dist.DistError) as error:
        raise _missing(store, mesh, dict(zip(ranks, keys, strict=True))) from error
    # All ranks are here, so all have read what they left the last time.
    store.delete_key(key(here, at - 1))
    return [[int(word) for word in store.get(key).decode().split()] for key in keys]


def _missing(store: Any, mesh: DeviceMesh, keys: dict[int, str]) -> PlacementError:
    silent = [rank for rank, key in keys.items() if not store.check([key])]
    return PlacementError(
        f"torch's generator was seeded or set back on this rank ({mesh.get_rank()}), and ranks "
        f"{silent[:8]} of mesh {mesh.layout_mesh} have not done so within "
        f"{PATIENCE.total_seconds():.0f} s. Call torch.manual_seed on every rank, or give the mesh "
        "its own seed by dtckpt.dtensor.random.manual_seed, which torch's seeds do not change"
    )
