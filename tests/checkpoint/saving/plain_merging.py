"""Merging as it is meant: each group of ranks gives its tensors, and each is looked at.

What the package does comes to the same and the same errors, with many groups at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.checkpoint.ranks.text import ranks_text
from dtckpt.checkpoint.tensors.spec import GlobalTensor, TensorSpec, TensorSpecs
from dtckpt.dtensor import IrregularLayout, Layout, Mesh, Replicate
from dtckpt.errors import LayoutMismatch, PlacementError

SpecReport = tuple[tuple[int, ...], TensorSpecs]
"""Ranks with the same tensors."""


def merge_plainly(reports: Sequence[SpecReport]) -> tuple[GlobalTensor, ...]:
    """Return the tensors of all ranks; LayoutMismatch, naming the ranks, where they contradict."""
    holders: dict[str, _Found] = {}
    for ranks, specs in reports:
        for name, tensor in specs.items():
            holders.setdefault(name, []).append((ranks, tensor))
    return tuple(_merged(name, found) for name, found in holders.items())


_Found = list[tuple[tuple[int, ...], TensorSpec]]


def _merged(name: str, found: _Found) -> GlobalTensor:
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
    layout = _layout(name, first, found)
    is_joined = any(len(layout.replica_ranks(box)) > 1 for _, s in found for box in s.boxes or ())
    return GlobalTensor(
        name=name,
        dtype=first.dtype,
        shape=first.shape,
        layout=layout,
        is_plain=first.is_plain,
        is_joined=layout != first.layout if first.layout else is_joined,
        same_as=first.same_as if len({spec.same_as for _, spec in found}) == 1 else None,
    )


def _are_alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether both say where they lie in the same way, be it on sibling meshes."""
    if one.layout is None or other.layout is None:
        return one.layout is other.layout and (one.boxes is None) == (other.boxes is None)
    if one.layout == other.layout:
        return True
    a, b = one.layout.mesh, other.layout.mesh
    are_siblings = set(a.all_ranks()).isdisjoint(b.all_ranks()) and a.shape == b.shape
    return are_siblings and one.layout.placements == other.layout.placements


def _layout(name: str, first: TensorSpec, found: _Found) -> Layout | IrregularLayout:
    holding = sorted(rank for ranks, _ in found for rank in ranks)
    if first.layout is not None:
        layouts = dict.fromkeys(spec.layout for _, spec in found if spec.layout is not None)
        joined = _join(name, list(layouts))
        absent = sorted(set(joined.mesh.all_ranks()) - set(holding))
        if absent:
            raise LayoutMismatch(
                f"tensor {name!r} lies on the ranks of mesh {joined.mesh}, but "
                f"{ranks_text(absent)} did not bring it to this save (taking part: "
                f"{ranks_text(holding)}); save from every rank of the mesh"
            )
        return joined
    if first.boxes is None:
        return Layout.replicated(Mesh((len(holding),), ("rank",), tuple(holding)), first.shape)
    pieces = [(rank, box) for ranks, s in found for rank in ranks for box in s.boxes or ()]
    layout = IrregularLayout(first.shape, tuple(pieces))
    try:
        layout.validate()
    except PlacementError as error:
        raise LayoutMismatch(f"tensor {name!r}: {error}") from error
    return layout


def _join(name: str, layouts: Sequence[Layout]) -> Layout:
    first = layouts[0]
    if len(layouts) == 1:
        return first
    meshes = [layout.mesh for layout in layouts]
    taken = first.mesh.axis_names
    label = next(n for n in ("copy", *(f"copy{i}" for i in range(len(taken)))) if n not in taken)
    ranks = tuple(rank for mesh in meshes for rank in mesh.all_ranks())
    if len(set(ranks)) != len(ranks):
        raise LayoutMismatch(
            f"tensor {name!r} lies on {len(meshes)} meshes, some of which share ranks: "
            f"{', '.join(ranks_text(mesh.all_ranks()) for mesh in meshes)}"
        )
    mesh = Mesh((len(meshes), *first.mesh.shape), (label, *taken), ranks)
    return Layout(mesh, (Replicate(), *first.placements), first.shape)


def _where(spec: TensorSpec) -> str:
    if spec.layout is None:
        return "a plain tensor" if spec.boxes is None else "chunks without a mesh"
    return f"{spec.layout} over {ranks_text(spec.layout.mesh.all_ranks())}"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype.torch_name}{list(spec.shape)}"
