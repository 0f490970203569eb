"""What a load onto a mesh would cost each rank, planned as a load plans it; nothing is read.

Only the headers of files are, which tell where chunks lie.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...storage.base import Store
from ..files.stored_data import StoredData
from ..formats.opening import open_place, read_manifest, stored_data
from ..reading import limits
from ..reading.read_plan import Read, plan_reads
from ..reading.wants import Want
from ..resharding.placing import Placed, Rule, is_of_rank, place
from ..sharing.stripes import Stripe, StripedTensor, deal, times_read
from ..tensors.sink import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What a load costs one rank, and how many others cost the same."""

    ranks: tuple[int, ...]
    state_bytes: int
    """Memory of the tensors that it gets."""
    read_bytes: int
    """What it reads for them where each rank reads for itself: whole blocks."""
    num_files: int
    """Data files that it opens."""
    num_requests: int
    """Ranges of files that it asks for, beside the headers of these."""
    shared_read_bytes: int
    """What it reads where the ranks of a host read each block once for all."""
    received_bytes: int
    """What it then gets from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCosts:
    """What a load costs all ranks."""

    url: str
    mesh: Mesh
    stored_bytes: int
    """Bytes of all tensors."""
    ranks: tuple[RankCost, ...]
    """Those that cost alike are one entry; the one that reads most comes first."""

    @property
    def read_bytes(self) -> int:
        """What all ranks read, each for itself."""
        return sum(cost.read_bytes * len(cost.ranks) for cost in self.ranks)

    @property
    def slowest(self) -> RankCost:
        """The ranks that read most, each for itself."""
        return self.ranks[0]


def load_costs(
    checkpoint_id: str | os.PathLike[str] | Store,
    mesh: Mesh,
    rules: Sequence[Rule],
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadCosts:
    """Return what a load of the tensors onto a mesh costs, placed by rules as ``place`` says.

    What ranks kept for themselves is left out. Sharing is that of ranks of one host by its memory,
    of tensors that would be read twice or more: what a load chooses from an object store, and from
    a local disk with ``read_once=True``. ``on_progress(done, total)`` is called with ranks. Errors
    are those of ``place`` and of a load that cannot be planned.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    manifest = read_manifest(store)
    placed = [item for item in place(manifest, mesh, rules) if not is_of_rank(item.tensor)]
    planner = _Planner(stored_data(store, manifest), placed, mesh)
    found: dict[tuple[int, ...], list[int]] = {}
    for done, rank in enumerate(mesh.all_ranks(), 1):
        found.setdefault(planner.facts(rank), []).append(rank)
        if on_progress is not None:
            on_progress(done, mesh.size)
    costs = [
        RankCost(
            ranks=tuple(ranks),
            state_bytes=facts[0],
            read_bytes=facts[1],
            num_files=facts[2],
            num_requests=facts[3],
            shared_read_bytes=facts[4],
            received_bytes=facts[5],
        )
        for facts, ranks in found.items()
    ]
    return LoadCosts(
        url=store.url,
        mesh=mesh,
        stored_bytes=sum(item.tensor.num_bytes for item in placed),
        ranks=tuple(sorted(costs, key=lambda cost: (-cost.read_bytes, cost.ranks))),
    )


@dataclass(frozen=True, slots=True)
class _Unmade:
    """Memory that a load would fill, and a plan does not make."""

    is_memory = True

    def memory(self) -> None:
        """Return None: nothing is read into it."""

    def put(self, part: Box, items: Array) -> None:
        """Take nothing."""


_Held = tuple[tuple[Box, ...], ...]
"""The boxes of a rank, of every tensor."""


class _Planner:
    def __init__(self, data: StoredData, placed: Sequence[Placed], mesh: Mesh) -> None:
        self.data = data
        self.tensors = [(item.tensor, item.layout) for item in placed]
        self.ranks = mesh.all_ranks()
        striped = [
            StripedTensor(tensor, layout)
            for tensor, layout in self.tensors
            if isinstance(layout, Layout)
            and times_read(tensor, layout) * layout.num_replicas >= limits.MIN_TIMES
        ]
        if sum(tensor.num_bytes for tensor in striped) < limits.MIN_SHARED_BYTES:
            striped = []  # each rank reads so little sooner than they agree
        self.striped = {tensor.stored.name for tensor in striped}
        rounds = deal(striped, len(self.ranks), limits.slot_bytes(data.store)) if striped else []
        self.stripes: dict[int, list[Stripe]] = {}
        for stripe in itertools.chain.from_iterable(rounds):
            self.stripes.setdefault(stripe.reader, []).append(stripe)
        self.known: dict[_Held, tuple[int, ...]] = {}

    def facts(self, rank: int) -> tuple[int, ...]:
        """Return what a load costs a rank, in the order of the fields of ``RankCost``."""
        held = tuple(
            layout.held_by(rank) if isinstance(layout, Layout) else () for _, layout in self.tensors
        )
        if held not in self.known:
            self.known[held] = (*self._read(held, ()), *self._read(held, self.striped)[:2])
        state, read, files, requests, rest, rest_read = self.known[held]
        mine = self.stripes.get(self.ranks.index(rank), [])
        own = sum(stripe.num_bytes for stripe in mine)
        return state, read, files, requests, rest_read + own, state - rest - self._kept(held, mine)

    def _read(self, held: _Held, without: Container[str]) -> tuple[int, int, int, int]:
        """Return bytes that are needed, those that are read, files and ranges."""
        wants = [
            Want(tensor=tensor, box=box, sink=_Unmade())
            for (tensor, _), boxes in zip(self.tensors, held, strict=True)
            for box in boxes
            if tensor.name not in without
        ]
        reads = [read for read in plan_reads(self.data, wants) if isinstance(read, Read)]
        return (
            sum(want.box.numel * want.tensor.dtype.itemsize for want in wants),
            sum(read.num_bytes for read in reads),
            len({id(read.file) for read in reads}),
            sum(len(read.in_place) + len(read.ranges) for read in reads),
        )

    def _kept(self, held: _Held, stripes: Sequence[Stripe]) -> int:
        """Return how many bytes of stripes are wanted by the rank itself that reads them."""
        wanted = {t.name: boxes for (t, _), boxes in zip(self.tensors, held, strict=True)}
        return sum(
            common.numel * stripe.tensor.stored.dtype.itemsize
            for stripe in stripes
            for box in stripe.boxes
            for mine in wanted[stripe.tensor.stored.name]
            if (common := box.intersect(mine)) is not None
        )
