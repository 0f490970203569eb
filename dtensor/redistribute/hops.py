"""Hops: the steps that a route is made of. Global knowledge, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..geometry.layout import Layout
from ..geometry.placement import Partial, format_placements

Axes = tuple[int, ...]
Kind = Literal["slice", "reduce", "gather", "exchange", "spread"]


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a route, from one layout to another, for all ranks at once."""

    kind: Kind
    source: Layout
    target: Layout
    axes: Axes = ()
    """Axes along which ranks talk to each other; none where a step is local. An exchange between
    two meshes has none either: all of their ranks take part."""

    def in_places(self) -> Hop:
        """Return the step between layouts of one order by places, of which each rank has a box."""
        if not self.source.is_dealt:
            return self
        return replace(self, source=self.source.in_places(), target=self.target.in_places())

    @property
    def is_across(self) -> bool:
        """Whether values go from one mesh to another."""
        return self.source.mesh != self.target.mesh

    @property
    def num_ranks(self) -> int:
        """Number of ranks that talk to each other; 1 where none does."""
        if self.is_across:
            return len({*self.source.mesh.all_ranks(), *self.target.mesh.all_ranks()})
        return math.prod(self.source.mesh.shape[axis] for axis in self.axes)

    @property
    def reduce_op(self) -> str:
        """What a step reduces by, or spreads terms for."""
        of = self.target if self.kind == "spread" else self.source
        return next(
            p.reduce_op
            for axis, p in enumerate(of.placements)
            if isinstance(p, Partial) and axis in self.axes
        )

    @property
    def most_moved(self) -> int:
        """Return a bound of the elements that any rank sends or receives in an exchange."""
        source, target = self.source, self.target
        if self.is_across:
            copies = target.num_replicas
        else:  # those that agree with the giver along axes that replicate take from it
            free = (axis for axis in target.replica_axes if axis not in source.replica_axes)
            copies = math.prod(target.mesh.shape[axis] for axis in free)
        sent = copies * math.prod(source.largest_cell())
        return max(sent, math.prod(target.largest_cell()))

    @property
    def moves_in_rows(self) -> bool:
        """Whether all that any rank sends or receives is whole rows of contiguous tensors."""
        return self.source.splits[1:] == self.target.splits[1:]

    @property
    def gathers_in_rows(self) -> bool:
        """Whether an all-gather joins as many rows of every rank, in the order of the ranks."""
        if not self.moves_in_rows or not self.source.shape:
            return False
        cuts = self.source.splits[0][len(self.target.splits[0]) :]
        if tuple(cut.axis for cut in cuts) != self.axes or any(
            cut.starts is not None for cut in cuts
        ):
            return False
        return self.source.shape[0] % self.source.grid[0] == 0

    def __str__(self) -> str:
        ways = {
            "slice": "local slice",
            "gather": f"all-gather over {self.num_ranks} ranks",
            "exchange": f"exchange over {self.num_ranks} ranks",
        }
        if self.kind == "spread":
            way = f"one term of {self.reduce_op}"
        elif self.kind == "reduce":
            name = "all-reduce" if self.source.splits == self.target.splits else "reduce-scatter"
            way = f"{name}({self.reduce_op}) over {self.num_ranks} ranks"
        else:
            way = ways[self.kind]
        return f"{way} to ({format_placements(self.target.placements)})"
