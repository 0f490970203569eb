"""How the specs of ranks become the state of the whole job.

Every rank calls these functions with the same arguments, so all get the same result or the same
error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtckpt.errors import LayoutMismatch, PlacementError

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ..ranks.text import ranks_text
from ..state.coordinates import VALUES
from ..state.names import Path, index_component, join, key_component
from ..state.tree import (
    DICT_TAGS,
    PACKED,
    Node,
    children,
    container_node,
    packed_name,
    per_rank_nodes,
    tag_of,
)
from ..tensors.spec import GlobalTensor, PerRankPart, TensorSpec, TensorSpecs, Values
from .merging_groups import NodeOfRanks, differ, merge_groups
from .merging_meshes import Holders, RanksOfMeshes, Side, are_siblings


@dataclass(frozen=True, slots=True)
class SpecReport:
    """Ranks whose tensors differ in nothing but the ranks of the meshes on which they lie."""

    specs: TensorSpecs
    """As the first group has them."""
    groups: tuple[RanksOfMeshes, ...]
    """Their meshes correspond by their places."""

    @classmethod
    def of(cls, ranks: tuple[int, ...], specs: TensorSpecs, place: int = 0) -> SpecReport:
        """Return the report of one group, which has the same meshes."""
        layouts = (spec.layout for spec in specs.values())
        meshes = dict.fromkeys(layout.mesh for layout in layouts if layout is not None)
        return cls(specs, (RanksOfMeshes(place, ranks, tuple(meshes)),))


ValueReport = tuple[tuple[int, ...], Values]
"""Ranks with the same values."""


def merge_tensors(reports: Sequence[SpecReport]) -> tuple[GlobalTensor, ...]:
    """Return the tensors of all ranks; LayoutMismatch, naming the ranks, where they contradict.

    Reports come in the order of their first groups.
    """
    return _Merge(reports).run()


def merge_values(reports: Sequence[ValueReport]) -> Node:
    """Return the tree of all ranks; LayoutMismatch, naming the ranks, where values differ."""
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
    for ranks, values in reports:
        for name, value in values.digests.items():
            first, expected = seen.setdefault(name, (ranks, value))
            if value != expected:
                raise LayoutMismatch(
                    f"plain tensor {name!r} has different values on {ranks_text(first)} and "
                    f"{ranks_text(ranks)}. Plain tensors count as replicated: make them equal, "
                    "shard them as DTensors, say by with_layouts what they are parts of, or wrap a "
                    "value of one rank in PerRank, and one of a place on a mesh in PerCoordinate. "
                    "Buffers that count as the first rank has them, as under DDP, are declared by "
                    "buffers_of_first_rank(module)"
                )
    groups = frozenset(name for _, values in reports for name in values.groups)
    return _merge_nodes([(ranks, values.tree) for ranks, values in reports], (), groups)


def packed_conflicts(reports: Sequence[ValueReport]) -> list[str]:
    """Return the names of packed values that are not the same on all ranks that have them.

    Values are merged, and differences are named, by their nodes: so these have to be nodes first.
    """
    return sorted(set(_packed_conflicts([values.tree for _, values in reports])))


def _packed_conflicts(nodes: Sequence[Node]) -> Iterator[str]:
    first = nodes[0]
    if all(node == first for node in nodes[1:]):
        return
    tags = {tag_of(node) for node in nodes}
    if PACKED in tags:
        yield from (packed_name(node) for node in nodes if tag_of(node) == PACKED)
    elif tags <= {*DICT_TAGS} or (len(tags) == 1 and tags <= {"list", "tuple"}):
        by_key: dict[Any, list[Node]] = {}
        for node in nodes:
            for key, _, child in children(node):
                by_key.setdefault(key, []).append(child)
        for found in by_key.values():
            yield from _packed_conflicts(found)


_VALUES = f"/{key_component(VALUES)}"
_Found = list[tuple[int, TensorSpec]]
"""What reports, by their numbers, say of a tensor."""


class _Merge:
    """Merges the specs of tensors, one by one."""

    def __init__(self, reports: Sequence[SpecReport]) -> None:
        self.reports = reports
        self.slots = [
            {mesh: slot for slot, mesh in enumerate(report.groups[0].meshes)} for report in reports
        ]
        self.holders: dict[tuple[tuple[int, int], ...], Holders] = {}

    def run(self) -> tuple[GlobalTensor, ...]:
        found: dict[str, _Found] = {}
        for number, report in enumerate(self.reports):
            for name, tensor in report.specs.items():
                found.setdefault(name, []).append((number, tensor))
        return tuple(self.tensor(name, specs) for name, specs in found.items())

    def tensor(self, name: str, found: _Found) -> GlobalTensor:
        _, first = found[0]
        holders = self.holders_of(found)
        if not holders.are_alike or not all(_match(first, other) for _, other in found[1:]):
            raise _contradiction(name, dict(found), holders)
        layout = _layout(name, dict(found), holders)
        return GlobalTensor(
            name=name,
            dtype=first.dtype,
            shape=first.shape,
            layout=layout,
            is_plain=first.is_plain,
            is_joined=layout != first.layout if first.layout else _have_copies(found, layout),
            same_as=first.same_as if len({spec.same_as for _, spec in found}) == 1 else None,
            order=first.order,
        )

    def holders_of(self, found: _Found) -> Holders:
        key = tuple((number, self.slot_of(number, spec)) for number, spec in found)
        if key not in self.holders:
            self.holders[key] = Holders(
                [
                    Side(group, number, None if slot < 0 else group.meshes[slot])
                    for number, slot in key
                    for group in self.reports[number].groups
                ]
            )
        return self.holders[key]

    def slot_of(self, number: int, spec: TensorSpec) -> int:
        """Return which mesh of a report a tensor lies on; -1 for none."""
        return -1 if spec.layout is None else self.slots[number][spec.layout.mesh]


def _match(one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether two specs say the same, but for the ranks of their meshes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.layout is None or other.layout is None:
        return one.layout is other.layout and (one.boxes is None) == (other.boxes is None)
    return one.layout.placements == other.layout.placements


def _contradiction(name: str, specs: Mapping[int, TensorSpec], holders: Holders) -> LayoutMismatch:
    """Return the error that names the first group of ranks which does not agree with the first."""
    sides = [(side.group.ranks, _on(specs[side.report], side.mesh)) for side in holders.sides]
    ranks, first = sides[0]
    other_ranks, other = next(
        side for side in sides if not (_match(first, side[1]) and _lie_alike(first, side[1]))
    )
    if (other.dtype, other.shape) != (first.dtype, first.shape):
        return LayoutMismatch(
            f"tensor {name!r} is {_describe(first)} on {ranks_text(ranks)} but "
            f"{_describe(other)} on {ranks_text(other_ranks)}; give different tensors "
            "different names, or wrap a value of one rank in PerRank"
        )
    return LayoutMismatch(
        f"tensor {name!r} is laid out as {_where(first)} on {ranks_text(ranks)} but as "
        f"{_where(other)} on {ranks_text(other_ranks)}"
    )


def _on(spec: TensorSpec, mesh: Mesh | None) -> TensorSpec:
    if spec.layout is None or mesh is None:
        return spec
    return replace(spec, layout=Layout(mesh, spec.layout.placements, spec.shape))


def _lie_alike(one: TensorSpec, other: TensorSpec) -> bool:
    if one.layout is None or other.layout is None:
        return True
    meshes = one.layout.mesh, other.layout.mesh
    return meshes[0] == meshes[1] or are_siblings(*meshes)


def _layout(
    name: str, specs: Mapping[int, TensorSpec], holders: Holders
) -> Layout | IrregularLayout:
    first = specs[holders.sides[0].report]
    if first.layout is not None:
        mesh = holders.joined
        if isinstance(mesh, LayoutMismatch):
            raise LayoutMismatch(f"tensor {name!r} {mesh}")
        if holders.absent:
            raise LayoutMismatch(
                f"tensor {name!r} lies on the ranks of mesh {mesh}, but "
                f"{ranks_text(holders.absent)} did not bring it to this save (taking part: "
                f"{ranks_text(holders.ranks)}); save from every rank of the mesh"
            )
        if mesh is holders.meshes[0]:
            return first.layout
        return Layout(mesh, (Replicate(), *first.layout.placements), first.shape)
    if first.boxes is None:
        return Layout.replicated(holders.line, first.shape)
    pieces = [
        (rank, box)
        for side in holders.sides
        for rank in side.group.ranks
        for box in specs[side.report].boxes or ()
    ]
    layout = IrregularLayout(first.shape, tuple(pieces))
    try:
        layout.validate()
    except PlacementError as error:
        raise LayoutMismatch(f"tensor {name!r}: {error}") from error
    return layout


def _have_copies(found: _Found, layout: Layout | IrregularLayout) -> bool:
    """Whether several ranks told of one box."""
    return any(len(layout.replica_ranks(box)) > 1 for _, spec in found for box in spec.boxes or ())


def _where(spec: TensorSpec) -> str:
    if spec.layout is None:
        return "a plain tensor" if spec.boxes is None else "chunks without a mesh"
    return f"{spec.layout} over {ranks_text(spec.layout.mesh.all_ranks())}"


def per_rank_tensors(rank: int, part: PerRankPart) -> list[GlobalTensor]:
    """Return the tensors that a rank keeps for itself."""
    mesh = Mesh((1,), ("rank",), (rank,))
    return [
        GlobalTensor(
            name=name,
            dtype=t.dtype,
            shape=t.shape,
            layout=Layout.replicated(mesh, t.shape),
            is_plain=True,
            order=t.order,
        )
        for name, t in part.tensors.items()
    ]


def check_copies(parts: Mapping[int, PerRankPart]) -> None:
    """Raise LayoutMismatch, naming the ranks, where two have other values of one coordinate."""
    seen: dict[tuple[str, int], tuple[int, str]] = {}
    for rank, part in parts.items():
        for name, (owner, told) in part.copies.items():
            first, expected = seen.setdefault((name, owner), (rank, told))
            if told != expected:
                raise LayoutMismatch(
                    f"value {name.removesuffix(_VALUES)!r} belongs to a coordinate that "
                    f"{ranks_text([first, rank])} have, and differs between them. Make it "
                    "equal, or name the axes along which it differs, too"
                )


def with_per_rank_parts(tree: Node, parts: Iterable[PerRankPart]) -> Node:
    """Return the tree with what every rank keeps for itself put into its place."""
    whole = json.loads(json.dumps(tree))
    parts = list(parts)
    for name, node in per_rank_nodes(whole):
        for part in parts:
            node["per_rank"].update(part.nodes.get(name, {}).get("per_rank", {}))
    return whole


def _merge_nodes(nodes: list[NodeOfRanks], path: Path, groups: frozenset[str]) -> Node:
    ranks, first = nodes[0]
    text = json.dumps(first)  # tells 1 from True and 0.0 from -0.0, which == does not
    if all(json.dumps(node) == text for _, node in nodes[1:]):
        return first
    if groups and join(path) in groups:
        return merge_groups(nodes, join(path))
    tags = [tag_of(node) for _, node in nodes]
    if set(tags) <= {"dict", "items"} or (len(set(tags)) == 1 and tags[0] in DICT_TAGS):
        return _merge_dicts(nodes, path, groups)
    if len(set(tags)) == 1 and tags[0] in ("list", "tuple"):
        lists = [(r, node[tags[0]]) for r, node in nodes]
        if len({len(items) for _, items in lists}) == 1:
            return {
                tags[0]: [
                    _merge_nodes(
                        [(r, items[i]) for r, items in lists], (*path, index_component(i)), groups
                    )
                    for i in range(len(lists[0][1]))
                ]
            }
    other, differing = next((r, node) for r, node in nodes if json.dumps(node) != text)
    raise differ(join(path), (ranks, first), (other, differing))


def _merge_dicts(nodes: list[NodeOfRanks], path: Path, groups: frozenset[str]) -> Node:
    by_key: dict[Any, list[NodeOfRanks]] = {}
    for ranks, node in nodes:
        for key, _, child in children(node):
            by_key.setdefault(key, []).append((ranks, child))
    merged = [
        (key, _merge_nodes(found, (*path, key_component(key)), groups))
        for key, found in by_key.items()
    ]
    tags = {tag_of(node) for _, node in nodes}
    return container_node("items" if tags == {"dict", "items"} else tags.pop(), merged)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype.torch_name}{list(spec.shape)}"
