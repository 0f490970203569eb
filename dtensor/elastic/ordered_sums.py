"""Sums of gradients over the groups of a batch, added one by one in the order of the groups.

That is what one rank does that runs one group after the other, and so the bits are those. A
reduction of all ranks' sums would add in another order on each mesh. So ranks do not add what they
have: each gets, of the part of the sum that it keeps, the terms of all groups of a round, and adds
them in order to what there is. That moves as many bytes as a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.placement import Placement, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_locals
from .rounds import Round, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What is summed: where the result is to lie, and in which dtypes."""

    goal: DTensorSpec
    term_dtype: torch.dtype
    sum_dtype: torch.dtype
    """In which terms are added."""

    @property
    def sent_dtype(self) -> torch.dtype:
        """What is wider than the sum is rounded before it goes, what is narrower once it came."""
        wide = self.term_dtype.itemsize > self.sum_dtype.itemsize
        return self.sum_dtype if wide else self.term_dtype


class OrderedSums:
    """The sums of some tensors that every rank has a term of, for each group that it runs."""

    def __init__(self, mesh: DeviceMesh, summed: Sequence[Summed]) -> None:
        self._mesh = mesh
        self._summed = summed
        self._kept = [_kept_as(one.goal.with_dtype(one.sum_dtype)) for one in summed]
        self._sums: list[Tensor | None] = [None] * len(summed)
        self._used: Tensor | None = None
        """Which of them any group had a term for."""

    def add(self, terms: Sequence[Tensor | None], now: Round) -> None:
        """Add the terms of all groups of a round; every rank has to call.

        ``terms`` are local tensors of the whole shapes, None for one that this rank's group did not
        use, which counts as zero. Those of a rank without a group are not looked at.
        """
        sent: list[Tensor] = []
        moves: list[tuple[DTensorSpec, DTensorSpec]] = []
        for one, kept, term in zip(self._summed, self._kept, terms, strict=True):
            row = self._row(one, term, now)
            if kept.ndim == 0:
                sent.append(row.view(-1, 1))
                moves.append(self._to_all(sent, now))
            else:
                sent.append(row)
                moves.append(self._move(row, [_deeper(p) for p in kept.placements], now))
        used = torch.tensor([[term is not None for term in terms]], device=self._mesh.device)
        sent.append(used[: int(now.own is not None)])
        moves.append(self._to_all(sent, now))
        *rows, used = redistribute_locals(sent, moves)
        any_used = used.any(0)
        self._used = any_used if self._used is None else self._used | any_used
        for number, (one, kept, found) in enumerate(
            zip(self._summed, self._kept, rows, strict=True)
        ):
            terms_in_order = found.view(-1) if kept.ndim == 0 else found
            self._sums[number] = _added(self._sums[number], terms_in_order, one.sum_dtype)

    def totals(self, divisors: Sequence[float]) -> list[Tensor | None]:
        """Return the local parts of the sums over ``divisors``, as they are to lie; forget them.

        None for one that no group has used. Every rank has to call.
        """
        sums, used = self._sums, self._used
        self._sums, self._used = [None] * len(sums), None
        if used is None:
            return list(sums)
        sent = [s / divisor for s, divisor in zip(sums, divisors, strict=True) if s is not None]
        moves = [(kept, one.goal.with_dtype(kept.dtype)) for kept, one in self._pairs()]
        moved = redistribute_locals(sent, moves)
        return [
            local.to(one.goal.dtype) if is_used else None
            for local, one, is_used in zip(moved, self._summed, used.tolist(), strict=True)
        ]

    def _pairs(self) -> list[tuple[DTensorSpec, Summed]]:
        return list(zip(self._kept, self._summed, strict=True))

    def _row(self, one: Summed, term: Tensor | None, now: Round) -> Tensor:
        """Return the term of this rank's group as a row; no row where it has none."""
        shape = tuple(one.goal.shape)
        if term is not None and term.layout != torch.strided:
            raise PlacementError(
                f"ElasticSteps: the gradient of a parameter of {list(shape)} is {term.layout}; "
                "expected a dense one: make embeddings with sparse=False"
            )
        if term is not None and now.own is not None:
            return term.detach().to(one.sent_dtype).reshape(1, *shape)
        rows = int(now.own is not None)
        return torch.zeros((rows, *shape), dtype=one.sent_dtype, device=self._mesh.device)

    def _to_all(self, sent: list[Tensor], now: Round) -> tuple[DTensorSpec, DTensorSpec]:
        """Let every rank have the last of ``sent``, of all groups; return how it moves.

        As many copies as there are ranks are sharded as all else is, and so go with it: another
        collective would cost more.
        """
        sent[-1] = sent[-1].repeat(1, self._mesh.size())
        return self._move(sent[-1], [Shard(1)] * self._mesh.ndim, now)

    def _move(
        self, rows: Tensor, placements: Sequence[Placement], now: Round
    ) -> tuple[DTensorSpec, DTensorSpec]:
        mesh, shape = self._mesh, (now.count, *rows.shape[1:])
        source = rows_of(mesh.layout_mesh, shape).placements
        return (
            spec_of(mesh, source, shape, None, rows.dtype),
            spec_of(mesh, placements, shape, None, rows.dtype),
        )


def _added(total: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum with rows added one by one: ``rows.sum(0)`` would choose the order itself."""
    first, *others = rows.unbind(0)
    total = first.to(dtype, copy=True) if total is None else total.add_(first)
    for row in others:
        total.add_(row)
    return total


def _kept_as(goal: DTensorSpec) -> DTensorSpec:
    """Return how a sum lies while it grows: no rank keeps what another one has.

    The axes along which the result is repeated cut what each part of it is.
    """
    if goal.ndim == 0:
        return goal
    cuts = {axis: p for axis, p in enumerate(goal.placements) if isinstance(p, Shard)}
    dim = next((p.dim for p in cuts.values()), 0)
    # Those that cut the result cut first, in their order.
    first = sorted(cuts, key=lambda axis: (cuts[axis].order or 0, axis))
    axes = [*first, *(axis for axis in range(goal.mesh.ndim) if axis not in cuts)]
    placements: list[Placement] = [Shard(dim, order=axes.index(a)) for a in range(len(axes))]
    return goal.with_placements(placements)


def _deeper(placement: Placement) -> Placement:
    """Return a placement in a tensor that has a dim of groups before its own."""
    if not isinstance(placement, Shard):
        raise TypeError(f"gradients are sharded, got {placement!r}")
    return Shard(placement.dim + 1, order=placement.order)
