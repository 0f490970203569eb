"""What a rank says it holds.

A rank describes its tensors by names, shapes, dtypes and layouts alone: that is all a plan needs,
and it stays the same from save to save. The tree with its values, and the hashes of plain tensors,
change with every step and are described apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from dtckpt.errors import Unsavable

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Placement, parse_placement
from ..state.names import Path, join
from ..state.tree import CONTAINERS, Node, children, container_node, tag_of, tensor_names
from .dtypes import DType, dtype_of_code

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as one rank sees it: distributed, told by its chunks, or plain."""

    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | None = None
    """Mesh and placements, for distributed tensors."""
    boxes: tuple[Box, ...] | None = None
    """What this rank holds, for tensors that only tell their chunks."""
    same_as: str | None = None
    """Name of another tensor that is the very same memory."""
    order: tuple[int, ...] | None = None
    """Order of the dims in memory, where it is not row-major."""

    @property
    def is_plain(self) -> bool:
        """Whether every rank that has the name must hold the same whole tensor."""
        return self.layout is None and self.boxes is None


TensorSpecs = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Values:
    """What of a rank's state changes with every step, but for the elements of its tensors."""

    tree: Node
    digests: dict[str, str]
    """Hashes of plain tensors, which count as replicated."""
    groups: tuple[str, ...] = ()
    """Lists of groups of named parameters, of which each rank may have other ones."""

    def to_bytes(self) -> bytes:
        """Return canonical JSON: equal values give equal bytes on all ranks."""
        return _dump({"tree": self.tree, "digests": self.digests, "groups": self.groups})

    @classmethod
    def from_bytes(cls, data: bytes) -> Values:
        """Return the values that ``to_bytes`` wrote."""
        value = json.loads(data)
        return cls(value["tree"], value["digests"], tuple(value["groups"]))


@dataclass(frozen=True, slots=True)
class PerRankPart:
    """What a rank keeps for itself (PerRank), or for all that have its coordinate on a mesh."""

    nodes: dict[str, Node]
    """Nodes of the tree by the name of their ``per_rank`` node."""
    tensors: TensorSpecs
    copies: Mapping[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """Of every value of a coordinate the rank that keeps it and a hash of what is here, by name."""

    def to_bytes(self) -> bytes:
        """Return JSON."""
        tensors = specs_to_json(self.tensors)
        return _dump({"nodes": self.nodes, "tensors": tensors, "copies": self.copies})

    @classmethod
    def from_bytes(cls, data: bytes) -> PerRankPart:
        """Return the part that ``to_bytes`` wrote."""
        value = json.loads(data)
        copies = {name: (owner, told) for name, (owner, told) in value["copies"].items()}
        return cls(value["nodes"], specs_from_json(value["tensors"]), copies)


def fingerprint(*parts: bytes) -> bytes:
    """Return 16 bytes that differ where parts differ."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def specs_to_json(specs: TensorSpecs) -> dict[str, Any]:
    """Return the JSON form of specs, of which most share a layout, for other ranks."""
    meshes: dict[Mesh, int] = {}
    places: dict[tuple[Mesh, tuple[Placement, ...]], int] = {}
    tensors: dict[str, tuple[object, ...]] = {}
    for name, spec in specs.items():
        where: object = None
        if spec.layout is not None:
            where = places.setdefault((spec.layout.mesh, spec.layout.placements), len(places))
        elif spec.boxes is not None:
            where = [str(box) for box in spec.boxes]
        order = () if spec.order is None else (spec.order,)
        tensors[name] = (spec.dtype.code, spec.shape, where, spec.same_as, *order)
    told = [[meshes.setdefault(mesh, len(meshes)), list(map(str, ps))] for mesh, ps in places]
    return {"meshes": [mesh.to_json() for mesh in meshes], "places": told, "tensors": tensors}


def specs_from_json(value: Mapping[str, Any], meshes: Sequence[Mesh] | None = None) -> TensorSpecs:
    """Return the specs that ``specs_to_json`` was given, or the same on other meshes."""
    if meshes is None:
        meshes = [Mesh.from_json(mesh) for mesh in value["meshes"]]
    places = [(meshes[mesh], tuple(map(parse_placement, ps))) for mesh, ps in value["places"]]
    specs: TensorSpecs = {}
    for name, (code, sizes, where, same_as, *orders) in value["tensors"].items():
        shape = tuple(sizes)
        is_placed = isinstance(where, int)
        specs[name] = TensorSpec(
            dtype=dtype_of_code(code, "state spec"),
            shape=shape,
            layout=Layout(*places[where], shape) if is_placed else None,
            boxes=None if is_placed or where is None else tuple(map(Box.parse, where)),
            same_as=same_as,
            order=tuple(orders[0]) if orders else None,
        )
    return specs


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalTensor:
    """A tensor of the whole job: who holds which box."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | IrregularLayout
    is_plain: bool | None = False
    """Whether every rank that has the name holds the whole, which their hashes vouch for; None
    where that is not known of a tensor that was stored."""
    is_joined: bool = False
    """Whether ranks hold copies only if their bytes agree, which is still to be seen."""
    same_as: str | None = None
    """Name of another tensor that is the very same memory on every rank."""
    order: tuple[int, ...] | None = None
    """Order of the dims in memory, where it is not row-major."""

    @property
    def has_replicas(self) -> bool:
        """Whether ranks of a mesh hold copies of one part."""
        return (
            isinstance(self.layout, Layout) and self.layout.num_replicas > 1 and not self.is_plain
        )


def split_per_rank(
    tree: Node, specs: TensorSpecs, copies: Mapping[str, tuple[int, str]]
) -> tuple[Node, TensorSpecs, PerRankPart]:
    """Return tree and specs without what the rank keeps for itself, and that part alone."""
    own: dict[str, Node] = {}
    shared = _without_per_rank(tree, (), own)
    mine = {tensor for node in own.values() for tensor in tensor_names(node)}
    for name in mine:
        if not specs[name].is_plain:
            raise Unsavable(
                f"tensor {name!r} is distributed; PerRank and PerCoordinate are for plain tensors "
                "and values"
            )
    if not mine:
        return shared, specs, PerRankPart(own, {}, copies)
    kept = {name: spec for name, spec in specs.items() if name in mine}
    rest = {name: spec for name, spec in specs.items() if name not in mine}
    return shared, rest, PerRankPart(own, kept, copies)


def _without_per_rank(node: Node, path: Path, own: dict[str, Node]) -> Node:
    tag = tag_of(node)
    if tag == "per_rank":
        own[join(path)] = node
        return {tag: {}}
    if tag not in CONTAINERS:
        return node
    inner = [
        (key, _without_per_rank(child, (*path, component), own))
        for key, component, child in children(node)
    ]
    return container_node(tag, inner)
