"""What a redistribute would do, told without doing it and without any process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dtckpt.errors import PlacementError

from ..comm.costs import GLOO, CostModel
from ..comm.reductions import all_reduced_bytes
from ..geometry.flows import Flows, numel_lacking
from ..geometry.layout import Layout
from ..geometry.placement import Placement
from ..mesh.device_mesh import DeviceMesh
from .estimates import hop_seconds
from .hops import Hop
from .route import Planner, Route


class LaidOut(Protocol):
    """A DTensor, as far as it counts here."""

    @property
    def global_layout(self) -> Layout:
        """What its ranks hold."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, which knows what communication costs there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a redistribute does: its steps, and bytes by global rank.

    ``print`` shows it as text.
    """

    source: Layout
    target: Layout
    steps: tuple[str, ...]
    why: str
    """The ways that the cost model compared, the chosen one first; empty where there is one."""
    seconds: float
    """Estimate of the cost model, for the busiest rank."""
    ranks: tuple[int, ...]
    """The ranks that are told of."""
    received_bytes: dict[int, int]
    """What comes from other ranks."""
    sent_bytes: dict[int, int]
    """What goes to other ranks."""
    needed_bytes: dict[int, int]
    """What a rank is to hold and does not hold. Nobody can receive less where nothing is reduced;
    of terms, more has to come."""
    peak_bytes: dict[int, int]
    """The most memory at any time: of the old local tensor, the new one, what lies between, and
    buffers."""
    buffer_bytes: int
    """The most that buffers take of it on any rank."""

    def __str__(self) -> str:
        def widest(by_rank: dict[int, int]) -> str:
            most = max(by_rank.values(), default=0)
            mean = sum(by_rank.values()) / max(len(by_rank), 1)
            return f"at most {most:,} a rank, {mean:,.0f} on average"

        lines = [f"{self.source}", f"-> {self.target}"]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        if not self.steps:
            lines.append("  nothing to do")
        lines += [
            f"bytes received: {widest(self.received_bytes)}",
            f"bytes needed:   {widest(self.needed_bytes)}",
            f"bytes sent:     {widest(self.sent_bytes)}",
            f"peak memory:    {widest(self.peak_bytes)}, buffers {self.buffer_bytes:,}",
            f"estimate:       {self.seconds * 1e6:,.0f} us"
            + (f" ({self.why})" if self.why else ""),
        ]
        return "\n".join(lines)


def explain(
    source: Layout | LaidOut,
    target: Layout | LaidOut | Sequence[Placement],
    dtype: torch.dtype | None = None,
    *,
    costs: CostModel | None = None,
    ranks: Iterable[int] | None = None,
) -> Explanation:
    """Return what redistributing a tensor from one layout to another does.

    Both layouts are of one shape; their meshes may differ. A DTensor stands for its layout, and as
    the source for its dtype, float32 by default; placements for a layout on the mesh of the source.
    ``costs`` is what the way is chosen by, by default that of a DTensor's mesh, of plain layouts
    Gloo's; ``ranks`` are those to tell of, by default all, of very large meshes better a few.

    >>> from dtckpt.dtensor import Mesh, Shard
    >>> mesh = Mesh((4,))
    >>> rows, columns = Layout(mesh, (Shard(0),), (8, 8)), Layout(mesh, (Shard(1),), (8, 8))
    >>> told = explain(rows, columns)
    >>> told.steps
    ('exchange over 4 ranks to (S(1))',)
    >>> told.received_bytes == told.needed_bytes == {0: 48, 1: 48, 2: 48, 3: 48}
    True
    """
    if costs is None:
        costs = GLOO if isinstance(source, Layout) else source.device_mesh.cost_model()
    dtype = dtype or (torch.float32 if isinstance(source, Layout) else source.dtype)
    source = source if isinstance(source, Layout) else source.global_layout
    if isinstance(target, Sequence):
        target = Layout(source.mesh, tuple(target), source.shape)
    target = target if isinstance(target, Layout) else target.global_layout
    if source.shape != target.shape:
        raise PlacementError(f"{source} and {target} are layouts of different shapes")
    route = Planner(dtype.itemsize, costs).route(source, target)
    everyone = (*source.mesh.all_ranks(), *target.mesh.all_ranks())
    told = tuple(sorted(set(everyone if ranks is None else ranks)))
    totals = [_of_rank(route, source, target, dtype, rank, costs) for rank in told]
    return Explanation(
        source=source,
        target=target,
        steps=tuple(map(str, route.hops)),
        why=route.why,
        seconds=sum(hop_seconds(hop, dtype.itemsize, costs) for hop in route.hops),
        ranks=told,
        received_bytes={r: t.received for r, t in zip(told, totals, strict=True)},
        sent_bytes={r: t.sent for r, t in zip(told, totals, strict=True)},
        needed_bytes={r: numel_lacking(source, target, r) * dtype.itemsize for r in told},
        peak_bytes={r: t.peak for r, t in zip(told, totals, strict=True)},
        buffer_bytes=max((t.buffers for t in totals), default=0),
    )


@dataclass(slots=True)
class _Totals:
    received: int = 0
    sent: int = 0
    peak: int = 0
    buffers: int = 0


def _of_rank(
    route: Route, source: Layout, target: Layout, dtype: torch.dtype, rank: int, costs: CostModel
) -> _Totals:
    totals = _Totals()
    itemsize = dtype.itemsize
    given = _held(source, rank) * itemsize
    totals.peak = max(given, _held(target, rank) * itemsize)
    for number, hop in enumerate(route.hops):
        received, sent, buffers = _traffic(hop, dtype, rank, costs)
        totals.received += received
        totals.sent += sent
        totals.buffers = max(totals.buffers, buffers)
        old = _held(hop.source, rank) * itemsize if number else 0
        new = _held(hop.target, rank) * itemsize
        totals.peak = max(totals.peak, given + old + new + buffers)
    return totals


def _held(layout: Layout, rank: int) -> int:
    return sum(box.numel for box in layout.held_by(rank))


def _traffic(hop: Hop, dtype: torch.dtype, rank: int, costs: CostModel) -> tuple[int, int, int]:
    """Return what a rank receives and sends in a hop, and what its buffers take, in bytes."""
    itemsize = dtype.itemsize
    if hop.kind == "exchange":
        flows = Flows(hop.source, hop.target)
        sent = itemsize * sum(box.numel for taker, box in flows.out_of(rank) if taker != rank)
        received = itemsize * sum(box.numel for giver, box in flows.into(rank) if giver != rank)
        rounds = costs.num_rounds(hop.most_moved * itemsize)
        return received, sent, -(-sent // rounds) - (-received // rounds)
    at = hop.source.mesh.coordinate(rank)
    if at is None or hop.kind in ("slice", "spread"):
        return 0, 0, 0
    if hop.kind == "gather":
        row = hop.source.mesh.submesh(hop.axes, at).all_ranks()
        width = itemsize * max(_held(hop.source, other) for other in row)
        others = width * (hop.num_ranks - 1)
        if hop.gathers_in_rows:
            return others, others, 0
        rounds = costs.num_rounds(width * hop.num_ranks)
        return others, others, (hop.num_ranks + 1) * -(-width // rounds)
    old, new = _held(hop.source, rank) * itemsize, _held(hop.target, rank) * itemsize
    size = hop.num_ranks
    if hop.source.splits == hop.target.splits:
        numel = old // itemsize
        moved, buffers = all_reduced_bytes(numel, dtype, hop.reduce_op, size, costs.few_bytes)
        return moved, moved, buffers
    pieces = hop.source.mesh.submesh(hop.axes, at).all_ranks()
    sent = sum(_held(hop.target, other) for other in pieces if other != rank) * itemsize
    return new * (size - 1), sent, sent + new + new * size
