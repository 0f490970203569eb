"""What a checkpoint is to become: options, and the plan that follows from them on every process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.mesh import Mesh
from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..mapping.table import MappingTable, mapped_manifest
from ..mapping.trees import edited
from ..saving.writers import assign_writers
from ..state.selecting import Selection
from ..state.tree import index_tree, tensor_names
from ..tensors.dtypes import DType
from ..tensors.spec import GlobalTensor
from .dtype_rules import DTypeRule, new_dtypes
from .placing import Placed, Rule, place
from .world import place_for_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How a checkpoint is written anew. ValueError where options exclude each other."""

    mesh: Mesh | None = None
    rules: tuple[Rule, ...] = ()
    to_world: int | None = None
    select: tuple[str, ...] | None = None
    dtypes: tuple[DTypeRule, ...] = ()
    mapping: MappingTable | None = None
    is_compressed: bool = False

    def __post_init__(self) -> None:
        if self.to_world is not None and (self.mesh is not None or self.rules):
            raise ValueError("to_world goes without mesh and rules: it keeps those of the source")
        if self.rules and self.mesh is None:
            raise ValueError("rules place tensors on a mesh, and none is given")

    def seen(self, manifest: Manifest, where: str) -> Manifest:
        """Return a checkpoint under its new names, without what is not selected."""
        found = mapped_manifest(manifest, self.mapping, where)
        return found if self.select is None else _selected(found, self.select, where)

    def place(self, seen: Manifest) -> list[Placed]:
        """Return where the tensors of what was ``seen`` are to lie."""
        if self.to_world is not None:
            return place_for_world(seen.tensors.values(), self.to_world)
        if self.mesh is not None:
            return place(seen, self.mesh, self.rules)
        return [Placed(tensor=t, layout=t.layout, note="as it is") for t in seen.tensors.values()]

    def plan(self, manifest: Manifest, where: str) -> Plan:
        """Return what follows for a checkpoint, the same on every process.

        LayoutMismatch where an option fits nothing, or does not fit what it is about.
        """
        seen = self.seen(manifest, where)
        placed = self.place(seen)
        dtypes = new_dtypes(seen, self.dtypes) if self.dtypes else {}
        ties = _ties(placed, dtypes)
        tensors = assign_writers(
            GlobalTensor(
                name=p.tensor.name,
                dtype=dtypes.get(p.tensor.name, p.tensor.dtype),
                shape=p.tensor.shape,
                layout=p.layout,
                is_plain=p.tensor.is_plain,
                same_as=ties.get(p.tensor.name),
                order=p.tensor.order,
            )
            for p in placed
        )
        return Plan(source=seen, placed=tuple(placed), tensors=tensors)

    def digest(self) -> bytes:
        """Return bytes that are equal for equal options."""
        table = b"" if self.mapping is None else self.mapping.to_bytes()
        told = repr(replace(self, mapping=None)).encode()
        return hashlib.blake2b(told + b"\n" + table).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is written, and what it is read from."""

    source: Manifest
    """The checkpoint as it is seen under the new names."""
    placed: tuple[Placed, ...]
    tensors: tuple[StoredTensor, ...]
    """As they will be stored."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have a data file, the ones with the most bytes first."""
        held: dict[int, int] = {}
        for tensor in self.tensors:
            for rank, chunk in tensor.chunks():
                held[rank] = held.get(rank, 0) + chunk.numel * tensor.dtype.itemsize
        return tuple(sorted(held, key=lambda rank: (-held[rank], rank)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as they are read."""
        return sum(
            self.source.tensors[tensor.name].num_bytes
            for tensor in self.tensors
            if tensor.same_as is None
        )

    def bytes_of(self, rank: int) -> int:
        """Return how many of them are for the file of a rank."""
        return sum(
            box.numel * self.source.tensors[tensor.name].dtype.itemsize
            for tensor in self.tensors
            for box in tensor.chunks_of(rank)
        )


def _ties(placed: Sequence[Placed], dtypes: Mapping[str, DType]) -> dict[str, str]:
    """Return the first of its kind for every other tensor of the same elements, stored alike."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for each in placed:
        tensor = each.tensor
        dtype = dtypes.get(tensor.name, tensor.dtype)
        other = first.setdefault((tensor.stored_name, dtype, each.layout), tensor.name)
        if other != tensor.name:
            ties[tensor.name] = other
    return ties


def _selected(manifest: Manifest, select: Sequence[str], where: str) -> Manifest:
    """Return a checkpoint without the leaves that are not selected."""
    selection = Selection(select)
    leaves = index_tree(manifest.tree).leaves
    selection.check(leaves, where)
    tree = edited(manifest.tree, {leaf for leaf in leaves if leaf not in selection}, [])
    names = set(tensor_names(tree))
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name in names}
    if not tensors:
        raise LayoutMismatch(f"{where}: what is selected holds no tensor")
    return replace(manifest, tree=tree, tensors=tensors, stored=manifest.stored or manifest)
