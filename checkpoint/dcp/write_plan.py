"""What the coordinator of a save through torch.distributed.checkpoint makes of all ranks' plans.

A planner says which rank writes which chunk, under flat names, and beside it from which paths it
has made them. From that follow the names, layouts and structure of the checkpoint, before anything
is written; only the values come with what the ranks have done.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dtckpt.errors import CheckpointError, LayoutMismatch, PlacementError, Unsavable

from ...dtensor.geometry.box import Box
from ..files.stored_tensor import StoredTensor
from ..formats.trees import StatePath, component_of, name_of, paths_of, tree_of_paths
from ..state.limits import MAX_NESTING
from ..state.names import is_encodable
from ..state.values import Node
from ..tensors.dtypes import DType
from ..tensors.local_tensor import dtype_of
from .chunk_layouts import ChunkLayouts

Place = tuple[str, tuple[int, ...]]
"""Flat name of a tensor, and where in it a chunk begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a rank has to know for its part of a save; goes with its plan."""

    save_id: str
    rank: int
    """Number of this rank's data file: its place among the plans."""
    paths: Mapping[str, StatePath]
    """Paths in the state by flat names."""
    skipped: frozenset[Place]
    """Chunks that hold nothing, or that a rank before this one writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """A save as its coordinator knows it before anything is written."""

    save_id: str
    paths: Mapping[str, StatePath]
    tensors: Mapping[str, StoredTensor]
    """By flat names; what is not among them is a value."""
    skipped: Sequence[frozenset[Place]]
    """Of every rank."""

    @classmethod
    def of(cls, plans: Sequence[SavePlan], url: str) -> WritePlan:
        """Return the save of these plans, one a rank.

        Raises LayoutMismatch where chunks overlap or leave a gap, Unsavable for what has no form.
        """
        items = {item.index.fqn: item for plan in plans for item in plan.items}
        paths = _paths(items, plans, url)
        found: dict[str, _Chunks] = {}
        skipped: list[set[Place]] = []
        for rank, plan in enumerate(plans):
            skipped.append(set())
            for item in plan.items:
                if item.tensor_data is not None:
                    chunks = found.setdefault(item.index.fqn, _Chunks(item, url))
                    if not chunks.add(item, rank):
                        skipped[rank].add(place_of(item))
        layouts = ChunkLayouts()
        return cls(
            save_id=secrets.token_hex(8),
            paths=paths,
            tensors={f: chunks.stored(name_of(paths[f]), layouts) for f, chunks in found.items()},
            skipped=[frozenset(places) for places in skipped],
        )

    def ticket(self, rank: int, plan: SavePlan) -> Ticket:
        """Return what a rank has to know."""
        return Ticket(
            save_id=self.save_id,
            rank=rank,
            paths={item.index.fqn: self.paths[item.index.fqn] for item in plan.items},
            skipped=self.skipped[rank],
        )

    def tree(self, values: Mapping[str, Node], url: str) -> Node:
        """Return the structure of the state, in which values have these nodes."""
        nodes: dict[str, Node] = {
            **{fqn: {"tensor": tensor.name} for fqn, tensor in self.tensors.items()},
            **values,
        }
        return tree_of_paths(((path, nodes[fqn]) for fqn, path in self.paths.items()), url)


def box_of(item: WriteItem) -> Box:
    """Return the box of a chunk."""
    data = item.tensor_data
    if data is None:
        raise Unsavable(f"{item.index.fqn!r} is planned as a tensor, without its sizes")
    return Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def planned_dtype(item: WriteItem) -> DType:
    """Return the element type of a tensor as it is planned; Unsavable where files have none."""
    data = item.tensor_data
    return dtype_of(item.index.fqn, None if data is None else data.properties.dtype)


def place_of(item: WriteItem) -> Place:
    """Return what tells a chunk from the others of a save."""
    return item.index.fqn, box_of(item).offsets


def _paths(
    items: Mapping[str, WriteItem], plans: Sequence[SavePlan], url: str
) -> dict[str, StatePath]:
    """Return the path of every flat name; Unsavable where there can be no tree of them."""
    noted: dict[str, Any] = {}
    for plan in plans:
        noted |= plan.planner_data if isinstance(plan.planner_data, dict) else {}
    try:
        paths = paths_of(items, noted)
        tree_of_paths(((path, None) for path in paths.values()), url)
    except (CheckpointError, ValueError, TypeError) as error:
        raise Unsavable(
            f"{url}: the planner tells names and paths that are no state: {error}"
        ) from error
    for fqn, path in paths.items():
        if len(path) > MAX_NESTING or not all(is_encodable(component_of(part)) for part in path):
            raise Unsavable(f"{fqn!a}: lies too deep, or is a name that UTF-8 has no bytes for")
    return paths


@dataclass(slots=True)
class _Chunks:
    """The chunks of one tensor, as they are met."""

    first: WriteItem
    url: str
    ranks: dict[Box, int] = field(default_factory=dict[Box, int])

    def add(self, item: WriteItem, rank: int) -> bool:
        """Note a chunk; return whether this rank is the one to write it."""
        data, first = item.tensor_data, self.first.tensor_data
        if data is None or first is None:
            raise Unsavable(f"{item.index.fqn!r} is a tensor on some ranks, a value on others")
        if (data.size, data.properties.dtype) != (first.size, first.properties.dtype):
            raise LayoutMismatch(
                f"{self.url}: tensor {item.index.fqn!r} is "
                f"{data.properties.dtype}{list(data.size)} on rank {rank}, elsewhere "
                f"{first.properties.dtype}{list(first.size)}; give different tensors other names"
            )
        box, shape = box_of(item), tuple(data.size)
        if box.is_empty and 0 in shape:
            box = Box.whole(shape)
        if box in self.ranks or (box.is_empty and 0 not in shape):
            return False
        self.ranks[box] = rank
        return True

    def stored(self, name: str, layouts: ChunkLayouts) -> StoredTensor:
        """Return the tensor as the checkpoint has it."""
        data = self.first.tensor_data
        shape = () if data is None else tuple(data.size)
        try:
            layout = layouts.of(shape, self.ranks)
        except PlacementError as error:
            raise LayoutMismatch(
                f"{self.url}: the planner's chunks of tensor {self.first.index.fqn!r} are not the "
                f"whole of it, once: {error}"
            ) from error
        return StoredTensor(name, planned_dtype(self.first), shape, layout)
