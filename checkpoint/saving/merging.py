"""How the specs of ranks become the state of the whole job.

Every rank calls these functions with the same arguments, so all get the same result or the same
error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dtckpt.errors import LayoutMismatch, PlacementError

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ..ranks.text import ranks_text
from ..state.names import Path, index_component, join, key_component
from ..state.tree import DICT_TAGS, Node, children, container_node, per_rank_nodes, tag_of
from ..tensors.spec import GlobalTensor, PerRankPart, TensorSpec, TensorSpecs, Values
from .merging_groups import NodeOfRanks, differ, merge_groups

SpecReport = tuple[tuple[int, ...], TensorSpecs]
"""Ranks with the same tensors."""
ValueReport = tuple[tuple[int, ...], Values]
"""Ranks with the same values."""


def merge_tensors(reports: Sequence[SpecReport]) -> tuple[GlobalTensor, ...]:
    """Return the tensors of all ranks; LayoutMismatch, naming the ranks, where they contradict."""
    holders: dict[str, _Found] = {}
    for ranks, specs in reports:
        for name, tensor in specs.items():
            holders.setdefault(name, []).append((ranks, tensor))
    merge = _Merge()
    return tuple(merge.tensor(name, found) for name, found in holders.items())


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
                    "value of one rank in PerRank"
                )
    groups = frozenset(name for _, values in reports for name in values.groups)
    return _merge_nodes([(ranks, values.tree) for ranks, values in reports], (), groups)


_Found = list[tuple[tuple[int, ...], TensorSpec]]


class _Merge:
    """Merges the specs of tensors, one by one.

    What depends on ranks and meshes alone is worked out once: there are few different ones, but
    each may list thousands of ranks.
    """

    def __init__(self) -> None:
        # Tuples of ranks are told apart by identity: hashing them would cost most of the time.
        self.holding: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.siblings: dict[tuple[Mesh, Mesh], bool] = {}
        self.joined: dict[tuple[Mesh, ...], Mesh | LayoutMismatch] = {}
        self.absent: dict[tuple[Mesh, int], list[int]] = {}
        self.lines: dict[int, Mesh] = {}

    def tensor(self, name: str, found: _Found) -> GlobalTensor:
        ranks, first = found[0]
        for other_ranks, other in found[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise LayoutMismatch(
                    f"tensor {name!r} is {_describe(first)} on {ranks_text(ranks)} but "
                    f"{_describe(other)} on {ranks_text(other_ranks)}; give different tensors "
                    "different names, or wrap a value of one rank in PerRank"
                )
            if not self.are_alike(first, other):
                raise LayoutMismatch(
                    f"tensor {name!r} is laid out as {_where(first)} on {ranks_text(ranks)} but as "
                    f"{_where(other)} on {ranks_text(other_ranks)}"
                )
        layout = self.layout(name, first, found)
        return GlobalTensor(
            name=name,
            dtype=first.dtype,
            shape=first.shape,
            layout=layout,
            is_plain=first.is_plain,
            is_joined=layout != first.layout if first.layout else _have_copies(found, layout),
            same_as=first.same_as if len({spec.same_as for _, spec in found}) == 1 else None,
        )

    def are_alike(self, one: TensorSpec, other: TensorSpec) -> bool:
        """Return whether both say where they lie in the same way, be it on sibling meshes."""
        if one.layout is None or other.layout is None:
            return one.layout is other.layout and (one.boxes is None) == (other.boxes is None)
        if one.layout == other.layout:
            return True
        a, b = one.layout.mesh, other.layout.mesh
        if (a, b) not in self.siblings:
            apart = set(a.all_ranks()).isdisjoint(b.all_ranks())
            self.siblings[(a, b)] = apart and a.shape == b.shape
        return self.siblings[(a, b)] and one.layout.placements == other.layout.placements

    def layout(self, name: str, first: TensorSpec, found: _Found) -> Layout | IrregularLayout:
        holding = self.holders(found)
        if first.layout is not None:
            layouts = dict.fromkeys(spec.layout for _, spec in found if spec.layout is not None)
            joined = self.join(name, list(layouts))
            absent = self.absentees(joined.mesh, holding)
            if absent:
                raise LayoutMismatch(
                    f"tensor {name!r} lies on the ranks of mesh {joined.mesh}, but "
                    f"{ranks_text(absent)} did not bring it to this save (taking part: "
                    f"{ranks_text(holding)}); save from every rank of the mesh"
                )
            return joined
        if first.boxes is None:
            if id(holding) not in self.lines:
                self.lines[id(holding)] = Mesh((len(holding),), ("rank",), holding)
            return Layout.replicated(self.lines[id(holding)], first.shape)
        pieces = [(rank, box) for ranks, s in found for rank in ranks for box in s.boxes or ()]
        layout = IrregularLayout(first.shape, tuple(pieces))
        try:
            layout.validate()
        except PlacementError as error:
            raise LayoutMismatch(f"tensor {name!r}: {error}") from error
        return layout

    def holders(self, found: _Found) -> tuple[int, ...]:
        """Return all ranks that have a tensor, sorted."""
        key = tuple(id(ranks) for ranks, _ in found)
        if key not in self.holding:
            self.holding[key] = tuple(sorted(rank for ranks, _ in found for rank in ranks))
        return self.holding[key]

    def absentees(self, mesh: Mesh, holding: tuple[int, ...]) -> list[int]:
        """Return the ranks of a mesh that do not have a tensor which lies on it."""
        key = (mesh, id(holding))
        if key not in self.absent:
            self.absent[key] = sorted(set(mesh.all_ranks()) - set(holding))
        return self.absent[key]

    def join(self, name: str, layouts: Sequence[Layout]) -> Layout:
        """Return one layout for copies of a tensor on meshes of one form and different ranks.

        Under data plus tensor parallelism, what only the data axis shards lies so: every line of
        ranks along that axis is a mesh of its own and holds a copy. The joined mesh has an axis of
        copies.
        """
        first = layouts[0]
        if len(layouts) == 1:
            return first
        meshes = tuple(layout.mesh for layout in layouts)
        if meshes not in self.joined:
            self.joined[meshes] = _join_meshes(meshes)
        mesh = self.joined[meshes]
        if isinstance(mesh, LayoutMismatch):
            raise LayoutMismatch(f"tensor {name!r} {mesh}")
        return Layout(mesh, (Replicate(), *first.placements), first.shape)


def _join_meshes(meshes: tuple[Mesh, ...]) -> Mesh | LayoutMismatch:
    taken = meshes[0].axis_names
    label = next(n for n in ("copy", *(f"copy{i}" for i in range(len(taken)))) if n not in taken)
    ranks = tuple(rank for mesh in meshes for rank in mesh.all_ranks())
    if len(set(ranks)) != len(ranks):
        return LayoutMismatch(
            f"lies on {len(meshes)} meshes, some of which share ranks: "
            f"{', '.join(ranks_text(mesh.all_ranks()) for mesh in meshes)}"
        )
    return Mesh((len(meshes), *meshes[0].shape), (label, *taken), ranks)


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
            name=name, dtype=t.dtype, shape=t.shape, layout=Layout.replicated(mesh, t.shape)
        )
        for name, t in part.tensors.items()
    ]


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
