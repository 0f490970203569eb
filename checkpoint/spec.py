"""What a rank says it holds, and how ranks come to one view of the whole.

A rank describes its state by names, shapes, dtypes and layouts alone. Ranks whose descriptions
have the same fingerprint need to exchange nothing else, because a layout tells what every rank
holds. Where they differ (pipeline stages, experts, values of one rank) one description per
fingerprint is sent to all, and every rank merges them by the same rules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import xxhash

from dtckpt.errors import Unsavable

from ..dtensor.box import Box
from ..dtensor.irregular import IrregularLayout
from ..dtensor.layout import Layout
from ..dtensor.mesh import Mesh
from ..dtensor.placement import parse_placement
from .dtypes import DType, dtype_of_code
from .names import Path, join
from .tree import (
    CONTAINERS,
    Node,
    children,
    container_node,
    per_rank_nodes,
    tag_of,
    tensor_names,
)

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as one rank sees it; exactly one of the last three fields is given."""

    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | None = None
    """Mesh and placements, for distributed tensors."""
    boxes: tuple[Box, ...] | None = None
    """What this rank holds, for tensors that only tell their chunks."""
    digest: str | None = None
    """Hash of the bytes, for plain tensors: every rank that has the name must hold the same."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one rank without the bytes of its tensors."""

    tree: Node
    tensors: dict[str, TensorSpec]

    def to_bytes(self) -> bytes:
        """Return canonical JSON: equal states give equal bytes on all ranks."""
        meshes: dict[Mesh, int] = {}
        tensors = {name: _tensor_json(spec, meshes) for name, spec in self.tensors.items()}
        value = {
            "format": FORMAT_VERSION,
            "meshes": [mesh.to_json() for mesh in meshes],
            "tensors": tensors,
            "tree": self.tree,
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StateSpec:
        """Return the spec that ``to_bytes`` wrote."""
        value = json.loads(data)
        meshes = [Mesh.from_json(mesh) for mesh in value["meshes"]]
        tensors = {name: _tensor_from_json(t, meshes) for name, t in value["tensors"].items()}
        return cls(value["tree"], tensors)


def fingerprint(spec: bytes) -> bytes:
    """Return 16 bytes that differ where specs differ."""
    return xxhash.xxh3_128_digest(spec)


def _tensor_json(spec: TensorSpec, meshes: dict[Mesh, int]) -> list[Any]:
    where: Any
    if spec.layout is not None:
        mesh = meshes.setdefault(spec.layout.mesh, len(meshes))
        where = [mesh, *(str(p) for p in spec.layout.placements)]
    elif spec.boxes is not None:
        where = {"boxes": [str(box) for box in spec.boxes]}
    else:
        where = {"digest": spec.digest}
    return [spec.dtype.code, list(spec.shape), where]


def _tensor_from_json(value: list[Any], meshes: Sequence[Mesh]) -> TensorSpec:
    code, sizes, where = value
    dtype, shape = dtype_of_code(code, "state spec"), tuple(sizes)
    if isinstance(where, list):
        mesh, *placements = cast(list[Any], where)
        layout = Layout(meshes[mesh], tuple(parse_placement(p) for p in placements), shape)
        return TensorSpec(dtype=dtype, shape=shape, layout=layout)
    if "boxes" in where:
        boxes = tuple(Box.parse(text) for text in where["boxes"])
        return TensorSpec(dtype=dtype, shape=shape, boxes=boxes)
    return TensorSpec(dtype=dtype, shape=shape, digest=where["digest"])


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalTensor:
    """A tensor of the whole job: who holds which box."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout | IrregularLayout
    is_joined: bool = False
    """Whether ranks hold copies only if their bytes agree, which is still to be seen."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return Box.whole(self.shape).numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GlobalState:
    """The state of all ranks."""

    tree: Node
    tensors: tuple[GlobalTensor, ...]

    @property
    def has_per_rank(self) -> bool:
        """Whether ranks keep something for themselves."""
        return any(True for _ in per_rank_nodes(self.tree))


def split_per_rank(spec: StateSpec) -> tuple[StateSpec, StateSpec]:
    """Return a spec without what the rank keeps for itself, and that part alone.

    The tree of the second part is a dict from the names of ``per_rank`` nodes to the nodes.
    """
    own: dict[str, Node] = {}
    tree = _without_per_rank(spec.tree, (), own)
    mine = {tensor for node in own.values() for tensor in tensor_names(node)}
    for name in mine:
        if spec.tensors[name].layout is not None or spec.tensors[name].boxes is not None:
            raise Unsavable(
                f"tensor {name!r} is distributed; PerRank is for plain tensors and values"
            )
    shared = {name: tensor for name, tensor in spec.tensors.items() if name not in mine}
    kept = {name: tensor for name, tensor in spec.tensors.items() if name in mine}
    return StateSpec(tree, shared), StateSpec(own, kept)


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
