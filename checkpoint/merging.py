"""How the specs of ranks become the state of the whole job.

Every rank calls these functions with the same arguments, so all get the same result or the same
error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dtckpt.errors import LayoutMismatch, PlacementError

from ..dtensor.irregular import IrregularLayout
from ..dtensor.layout import Layout
from ..dtensor.mesh import Mesh
from ..dtensor.placement import Replicate
from .names import Path, index_component, join, key_component
from .spec import GlobalState, GlobalTensor, StateSpec, TensorSpec
from .text import ranks_text
from .tree import DICT_TAGS, Node, children, container_node, per_rank_nodes, tag_of

Report = tuple[tuple[int, ...], StateSpec]
"""Ranks with one and the same spec."""


def merge(reports: Sequence[Report]) -> GlobalState:
    """Return the state of all ranks; LayoutMismatch, naming the ranks, where they contradict.

    Every rank calls this with the same reports and so gets the same result or the same error.
    """
    holders: dict[str, list[tuple[tuple[int, ...], TensorSpec]]] = {}
    for ranks, spec in reports:
        for name, tensor in spec.tensors.items():
            holders.setdefault(name, []).append((ranks, tensor))
    tensors = tuple(_merge_tensor(name, found) for name, found in holders.items())
    return GlobalState(_merge_nodes([(r, spec.tree) for r, spec in reports], ()), tensors)


def _merge_tensor(name: str, found: list[tuple[tuple[int, ...], TensorSpec]]) -> GlobalTensor:
    ranks, first = found[0]
    for other_ranks, other in found[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise LayoutMismatch(
                f"tensor {name!r} is {_describe(first)} on {ranks_text(ranks)} but "
                f"{_describe(other)} on {ranks_text(other_ranks)}; give different tensors "
                "different names, or wrap a value of one rank in PerRank"
            )
        if not _are_alike(first, other):
            raise LayoutMismatch(
                f"tensor {name!r} is laid out as {_where(first)} on {ranks_text(ranks)} but as "
                f"{_where(other)} on {ranks_text(other_ranks)}"
            )
        if other.digest != first.digest:
            raise LayoutMismatch(
                f"plain tensor {name!r} has different values on {ranks_text(ranks)} and "
                f"{ranks_text(other_ranks)}. Plain tensors count as replicated: make them equal, "
                "shard them as DTensors, or wrap a value of one rank in PerRank"
            )
    holding = tuple(sorted(rank for ranks, _ in found for rank in ranks))
    layout = _merge_layout(name, first, found, holding)
    return GlobalTensor(
        name=name,
        dtype=first.dtype,
        shape=first.shape,
        layout=layout,
        is_joined=layout != first.layout if first.layout else _has_replicas(layout),
    )


def _has_replicas(layout: Layout | IrregularLayout) -> bool:
    return isinstance(layout, IrregularLayout) and len(layout.boxes()) < len(layout.pieces)


def _where(spec: TensorSpec) -> str:
    if spec.layout is None:
        return "a plain tensor" if spec.boxes is None else "chunks without a mesh"
    return f"{spec.layout} over {ranks_text(spec.layout.mesh.all_ranks())}"


def _are_alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether both say where they lie in the same way, be it on sibling meshes."""
    if one.layout is None or other.layout is None:
        return one.layout is other.layout and (one.boxes is None) == (other.boxes is None)
    if one.layout == other.layout:
        return True
    a, b = one.layout.mesh, other.layout.mesh
    same_form = (a.shape, one.layout.placements) == (b.shape, other.layout.placements)
    return same_form and not set(a.all_ranks()) & set(b.all_ranks())


def _join_siblings(name: str, layouts: Sequence[Layout]) -> Layout:
    """Return one layout for copies of a tensor on meshes of one form and different ranks.

    Under data plus tensor parallelism, what only the data axis shards lies so: every line of ranks
    along that axis is a mesh of its own and holds a copy. The joined mesh has an axis of copies.
    """
    first = layouts[0]
    if len(layouts) == 1:
        return first
    taken = first.mesh.axis_names
    label = next(n for n in ("copy", *(f"copy{i}" for i in range(len(taken)))) if n not in taken)
    ranks = tuple(rank for layout in layouts for rank in layout.mesh.all_ranks())
    if len(set(ranks)) != len(ranks):
        raise LayoutMismatch(
            f"tensor {name!r} lies on {len(layouts)} meshes, some of which share ranks: "
            f"{', '.join(ranks_text(layout.mesh.all_ranks()) for layout in layouts)}"
        )
    mesh = Mesh((len(layouts), *first.mesh.shape), (label, *taken), ranks)
    return Layout(mesh, (Replicate(), *first.placements), first.shape)


def _merge_layout(
    name: str,
    first: TensorSpec,
    found: list[tuple[tuple[int, ...], TensorSpec]],
    holding: tuple[int, ...],
) -> Layout | IrregularLayout:
    if first.layout is not None:
        layouts = dict.fromkeys(spec.layout for _, spec in found if spec.layout is not None)
        joined = _join_siblings(name, list(layouts))
        absent = sorted(set(joined.mesh.all_ranks()) - set(holding))
        if absent:
            raise LayoutMismatch(
                f"tensor {name!r} lies on the ranks of mesh {joined.mesh}, but "
                f"{ranks_text(absent)} did not bring it to this save (taking part: "
                f"{ranks_text(holding)}); save from every rank of the mesh"
            )
        return joined
    if first.boxes is None:
        mesh = Mesh((len(holding),), ("rank",), holding)
        return Layout.replicated(mesh, first.shape)
    pieces = [(rank, box) for ranks, s in found for rank in ranks for box in s.boxes or ()]
    layout = IrregularLayout(first.shape, tuple(pieces))
    try:
        layout.validate()
    except PlacementError as error:
        raise LayoutMismatch(f"tensor {name!r}: {error}") from error
    return layout


def with_per_rank(whole: GlobalState, parts: dict[int, StateSpec]) -> GlobalState:
    """Return the state with what every rank keeps for itself put into its place."""
    tree = json.loads(json.dumps(whole.tree))
    for name, node in per_rank_nodes(tree):
        for part in parts.values():
            node["per_rank"].update(part.tree.get(name, {}).get("per_rank", {}))
    tensors = list(whole.tensors)
    for rank, part in parts.items():
        mesh = Mesh((1,), ("rank",), (rank,))
        tensors += [
            GlobalTensor(
                name=name, dtype=t.dtype, shape=t.shape, layout=Layout.replicated(mesh, t.shape)
            )
            for name, t in part.tensors.items()
        ]
    return GlobalState(tree, tuple(tensors))


def check_copies(
    tensors: Iterable[GlobalTensor], digests: dict[int, dict[str, dict[str, str]]]
) -> None:
    """Raise LayoutMismatch unless ranks that hold the same box of a joined tensor hold one value.

    ``digests`` gives the hash of every box by rank and name. Two pipeline stages that call
    different tensors by one name are told apart here.
    """
    for tensor in tensors:
        if not tensor.is_joined:
            continue
        seen: dict[str, tuple[int, str]] = {}
        for rank, found in digests.items():
            for box, value in found.get(tensor.name, {}).items():
                first, expected = seen.setdefault(box, (rank, value))
                if value != expected:
                    raise LayoutMismatch(
                        f"tensor {tensor.name!r}: {box} has different values on "
                        f"{ranks_text([first])} and {ranks_text([rank])}. Give different tensors "
                        "different names, or bring the copies into step"
                    )


def _merge_nodes(nodes: list[tuple[tuple[int, ...], Node]], path: Path) -> Node:
    ranks, first = nodes[0]
    text = json.dumps(first)  # tells 1 from True and 0.0 from -0.0, which == does not
    if all(json.dumps(node) == text for _, node in nodes[1:]):
        return first
    tags = [tag_of(node) for _, node in nodes]
    if set(tags) <= {"dict", "items"} or (len(set(tags)) == 1 and tags[0] in DICT_TAGS):
        return _merge_dicts(nodes, path)
    if len(set(tags)) == 1 and tags[0] in ("list", "tuple"):
        lists = [(r, node[tags[0]]) for r, node in nodes]
        if len({len(items) for _, items in lists}) == 1:
            return {
                tags[0]: [
                    _merge_nodes([(r, items[i]) for r, items in lists], (*path, index_component(i)))
                    for i in range(len(lists[0][1]))
                ]
            }
    differing = next((r, node) for r, node in nodes if json.dumps(node) != text)
    raise LayoutMismatch(
        f"value {join(path)!r} differs between ranks: {_shorten(first)} on {ranks_text(ranks)}, "
        f"{_shorten(differing[1])} on {ranks_text(differing[0])}. Values count as replicated: "
        "make them equal or wrap them in PerRank"
    )


def _merge_dicts(nodes: list[tuple[tuple[int, ...], Node]], path: Path) -> Node:
    by_key: dict[Any, list[tuple[tuple[int, ...], Node]]] = {}
    for ranks, node in nodes:
        for key, _, child in children(node):
            by_key.setdefault(key, []).append((ranks, child))
    merged = [
        (key, _merge_nodes(found, (*path, key_component(key)))) for key, found in by_key.items()
    ]
    tags = {tag_of(node) for _, node in nodes}
    return container_node("items" if tags == {"dict", "items"} else tags.pop(), merged)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype.torch_name}{list(spec.shape)}"


def _shorten(node: Node) -> str:
    text = json.dumps(node)
    return text if len(text) <= 80 else text[:77] + "..."
