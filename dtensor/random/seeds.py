"""Which seed a mesh draws by: one that it was given, or torch's with the number of its stream.

Meshes that share a rank never share a stream, so they never repeat each other's numbers: the ranks
of a mesh agree, when it first draws, on the lowest number that none of them has used. The first
mesh of a job has stream 0, which is torch's seed itself.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from struct import Struct
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dtckpt.errors import PlacementError

from ..comm.caches import BoundedDict
from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_rows
from .counter_rng import signed
from .seed_notes import REMEDY, Notes

_MASK = (1 << 64) - 1
_WORDS = Struct("<QQ")
_MAX_LEFT = 256


class _Begun:
    """How many streams this rank has begun."""

    def __init__(self) -> None:
        self.count = 0


_BEGUN: WeakKeyDictionary[object, _Begun] = WeakKeyDictionary()
"""By the default group of a job."""


def _begun(mesh: DeviceMesh) -> _Begun:
    if dist.is_initialized():
        return _BEGUN.setdefault(dist.group.WORLD, _Begun())
    return (mesh.within or mesh).root.state("random_streams", _Begun)


def seed_of_stream(seed: int, number: int) -> int:
    """Return the seed of a stream, an unsigned number of 64 bits.

    >>> seed_of_stream(7, 0)
    7
    """
    if number == 0:
        return seed
    return int.from_bytes(blake2b(_WORDS.pack(seed, number), digest_size=8).digest(), "little")


class Seeds:
    """Where the seed of one mesh comes from."""

    def __init__(self) -> None:
        self.follow_torch = True
        self._given = 0
        self._torch_seed = 0
        """Torch's seed on this rank when the ranks last agreed."""
        self._stream = 0
        self._notes = Notes("")
        self._disagreement: str | None = None
        """Why the ranks may stand at different draws; None while they do not."""
        self._left: BoundedDict[int, int] = BoundedDict(_MAX_LEFT)
        """The count of draws by each seed of torch that another one has followed."""

    def give(self, seed: int) -> None:
        """Take a seed, which torch's seeds do not change."""
        self._given, self.follow_torch = seed & _MASK, False
        self._disagreement = None

    def have_moved(self) -> bool:
        """Whether torch has another seed than when the ranks agreed."""
        return self.follow_torch and torch.initial_seed() != self._torch_seed

    def agree(
        self,
        mesh: DeviceMesh,
        seed: int | None,
        offset: int,
        *,
        known: tuple[int, int] | None,
        ticket: int | None,
    ) -> tuple[int, int]:
        """Return seed and offset of the next draw, the same on all ranks of the mesh.

        ``seed`` is the one so far, None before the first draw or where one was given. ``known`` is
        the earlier draw at which torch's generator stands again. Raises PlacementError where they
        cannot agree. Which ranks have gone on then nobody knows, so it is raised again until a seed
        is given.
        """
        if self._disagreement is not None:
            raise PlacementError(
                f"the ranks of mesh {mesh.layout_mesh} did not agree on its random numbers, and "
                "none are drawn until all of them call manual_seed or set_rng_state of "
                f"dtckpt.dtensor.random for it. What happened: {self._disagreement}"
            )
        if seed is None:
            return self._begin(mesh, offset)
        try:
            return self._move(mesh, offset, known, ticket)
        except BaseException as error:
            self._disagreement = str(error) or type(error).__name__
            raise

    def _begin(self, mesh: DeviceMesh, offset: int) -> tuple[int, int]:
        now = torch.initial_seed()
        own = now & _MASK if self.follow_torch else self._given
        if mesh.has_rank and mesh.get_coordinate() is None:
            self._torch_seed = now
            return own, offset
        begun = _begun(mesh)
        row = [int(self.follow_torch), signed(own), offset, begun.count, secrets.randbits(62)]
        rows = {(): row} if _is_alone(mesh) else gather_rows(row, mesh)
        first = next(iter(rows.values()))
        differing = [
            at
            for at, row in rows.items()
            if row[0] != first[0] or (row[:3] != first[:3] and not first[0])
        ]
        if differing:
            raise PlacementError(
                f"the random numbers of mesh {mesh.layout_mesh} differ between ranks: those at "
                f"{differing[:4]} have another seed or offset than the first (this rank has "
                f"seed {own} and offset {offset}); call manual_seed or set_rng_state with "
                "the same values on every rank"
            )
        self._torch_seed = now
        if not self.follow_torch:
            return own, offset
        # A name that was never used: the store may still have the notes of an earlier job.
        self._notes = Notes(f"{first[4]:x}")
        self._stream = max(row[3] for row in rows.values())
        begun.count = self._stream + 1
        return seed_of_stream(first[1] & _MASK, self._stream), offset

    def _move(
        self, mesh: DeviceMesh, offset: int, known: tuple[int, int] | None, ticket: int | None
    ) -> tuple[int, int]:
        """Follow torch, whose generator has another seed now or stands where it stood before."""
        now = torch.initial_seed()
        if known is None:
            at = 0 if _is_start(now, ticket) else self._left.get(now, 0)
            row = [0, 0, at, signed(now & _MASK)]
        else:
            row = [1, signed(known[0]), known[1], signed(now & _MASK)]
        rows = [row] if _is_alone(mesh) else self._rows(row, mesh, soon=now == self._torch_seed)
        if any(other[:3] != rows[0][:3] for other in rows):
            raise PlacementError(
                f"torch's generator was seeded or set back on every rank of mesh "
                f"{mesh.layout_mesh}, but not alike: some ranks continue an earlier seed, others "
                f"begin anew. {REMEDY}"
            )
        # Not before: a rank that moved on alone would draw other numbers than the rest.
        self._left.put(self._torch_seed, offset)
        self._torch_seed = now
        if known is not None:
            return known
        return seed_of_stream(rows[0][3] & _MASK, self._stream), rows[0][2]

    def _rows(self, row: list[int], mesh: DeviceMesh, *, soon: bool) -> list[list[int]]:
        found = self._notes.exchange(row, mesh, soon=soon)
        return list(gather_rows(row, mesh).values()) if found is None else found


def _is_alone(mesh: DeviceMesh) -> bool:
    return mesh.size() == 1 or mesh.is_silent or not mesh.has_rank


def _is_start(seed: int, ticket: int | None) -> bool:
    """Whether a ticket is the first number that torch's generator gives after a seed."""
    if ticket is None:
        return False
    generator = torch.Generator(device="cpu").manual_seed(seed)
    first = torch.empty(1, dtype=torch.int64, device="cpu").random_(generator=generator)
    return int(first.item()) == ticket
