"""What ranks tell each other when torch's seed has changed, without a collective.

Nothing makes a program seed torch on all of its ranks, and a collective that some of them do not
enter would meet another one of theirs. So each rank that notices a new seed leaves a note in the
store of the job and reads those of the others, for a time that ends.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtckpt.errors import PlacementError

from ..mesh.device_mesh import DeviceMesh
from ..torch_private import job_store

SOON = timedelta(minutes=1)
"""How long a rank waits at most whose generator was set back without another seed: others notice
that only if they have used theirs alike, and wait for this rank in their turn if they have not."""

_LONGEST = timedelta(minutes=30)
"""How long a rank waits for a store that has no timeout."""

_WITHDRAWN = "withdrawn"
"""The note of a rank that waits no longer, and whose random numbers stand still."""


REMEDY = (
    "Call dtckpt.dtensor.random.manual_seed(seed, mesh) on every rank of the mesh, which torch's "
    "seeds do not change from then on, or begin anew and seed torch at the same place on every rank"
)
"""What to do where the ranks of a mesh did not agree."""


class Notes:
    """What the ranks of one mesh leave for each other in the store of their job, round by round.

    ``name`` is the same on all of them, and no other mesh's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._round = 0

    def exchange(
        self, row: list[int], mesh: DeviceMesh, *, soon: bool = False
    ) -> list[list[int]] | None:
        """Return the integers of all ranks of a mesh, by position; None where there is no store.

        Waits as long as the job waits for its ranks, with ``soon`` not longer than `SOON`. Raises
        PlacementError where some rank has left no note by then, or has given up. Whatever is
        raised, the note of this rank is withdrawn, so that nobody agrees with it later.
        """
        store = job_store()
        if store is None:
            return None
        ranks = mesh.layout_mesh.all_ranks()
        keys = {rank: self._key(rank, self._round) for rank in ranks}
        own = keys[mesh.get_rank()]
        patience = store.timeout or _LONGEST
        patience = min(patience, SOON) if soon else patience
        try:
            store.set(own, " ".join(map(str, row)))
            _wait(store, mesh, keys, patience, soon=soon)
            notes = {rank: store.get(key).decode() for rank, key in keys.items()}
            _require_all(notes, mesh)
        except BaseException:
            with suppress(RuntimeError):  # the store is gone, and the other ranks hear of that
                store.set(own, _WITHDRAWN)
            raise
        # All ranks are here, so all have read what they left the last time.
        store.delete_key(self._key(mesh.get_rank(), self._round - 1))
        self._round += 1
        return [[int(word) for word in note.split()] for note in notes.values()]

    def _key(self, rank: int, number: int) -> str:
        return f"dtckpt/random/{self._name}/{number}/{rank}"


def _wait(
    store: Any, mesh: DeviceMesh, keys: dict[int, str], patience: timedelta, *, soon: bool
) -> None:
    try:
        store.wait(list(keys.values()), patience)
    except (RuntimeError, dist.DistError) as error:
        silent = [rank for rank, key in keys.items() if not store.check([key])]
        same = (
            " It has the same seed as before, which a rank notices only if its generator gave "
            "numbers alike since: a torch.rand on one rank is enough to miss it."
        )
        raise PlacementError(
            f"torch's generator was seeded or set back on this rank ({mesh.get_rank()}), and ranks "
            f"{silent[:8]} of mesh {mesh.layout_mesh} have not done so within "
            f"{patience.total_seconds():g} s.{same if soon else ''} {REMEDY}"
        ) from error


def _require_all(notes: dict[int, str], mesh: DeviceMesh) -> None:
    gone = [rank for rank, note in notes.items() if note == _WITHDRAWN]
    if gone:
        raise PlacementError(
            f"torch's generator was seeded or set back on the ranks of mesh {mesh.layout_mesh}, "
            f"but ranks {gone[:8]} did so earlier, alone, and gave up waiting. {REMEDY}"
        )
