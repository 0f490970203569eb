"""Distributed tensors in pickles: what a rank holds of a whole, and how the whole lies on ranks.

A DTensor is pickled with its mesh and placements, a ShardedTensor (of FSDP1) with the boxes of its
shards, a tensor of the protocol of torch_checkpointing with its own. torch builds these objects and
needs process groups for it; here only what they say is kept (torch/distributed/tensor/_api.py,
_dtensor_spec.py and _shard/sharded_tensor/api.py of torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch.distributed.tensor as torch_tensor

from dtckpt.errors import CheckpointError, PlacementError

from ....dtensor.comm.caches import remembered
from ....dtensor.geometry.box import Box, row_major_strides
from ....dtensor.geometry.layout import Layout
from ....dtensor.geometry.mesh import Mesh
from ....dtensor.mesh.torch_layouts import layout_of_spec
from ....dtensor.torch_private import strided_shard
from ...state.limits import MAX_DIMS, shown, size_of
from ..pickles.arrays import NotHeld
from ..pickles.unpickling import (
    PROTOCOL,
    Inert,
    TensorNote,
    attributes_of,
    is_known,
    not_known,
)
from .meshes import MeshObject, mesh_of
from .objects import Object, as_list, list_of_ints


class LaidOut(NamedTuple):
    """A tensor that lies on the ranks of a mesh."""

    layout: Layout
    local: TensorNote
    """What this rank holds."""


class Boxes(NamedTuple):
    """A tensor of which a rank holds some boxes."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, TensorNote], ...]


Note = TensorNote | LaidOut | Boxes
"""What stands for a tensor in a pickle: a plain one, or a rank's part."""
NOTES = (TensorNote, LaidOut, Boxes)


def narrowed(note: TensorNote, box: Box) -> TensorNote:
    """Return the note of a box of a tensor; ValueError where it does not lie in the tensor."""
    if len(box.sizes) != len(note.shape) or not Box.whole(note.shape).contains(box):
        raise ValueError(f"the box {box} does not lie in a tensor of shape {note.shape}")
    start = sum(at * step for at, step in zip(box.offsets, note.strides, strict=True))
    return note._replace(start=note.start + start, shape=box.sizes)


def parts_of(note: Note, rank: int) -> tuple[tuple[Box, TensorNote], ...]:
    """Return the boxes that a rank holds of a tensor, with its elements; none outside of the mesh.

    Raises ValueError where the local tensor is not of the size that the layout says.
    """
    if isinstance(note, TensorNote):
        return ((Box.whole(note.shape), note),)
    if isinstance(note, Boxes):
        return note.parts
    coordinate = note.layout.mesh.coordinate(rank)
    if coordinate is None:
        return ()
    held = note.layout.box(coordinate)
    if held.is_empty:
        return ()
    if note.local.shape != held.sizes:
        raise ValueError(
            f"rank {rank} has a part of shape {note.local.shape}, where {note.layout} says {held}"
        )
    if not note.layout.is_dealt:
        return ((held, note.local),)
    return tuple((box, narrowed(note.local, at)) for box, at in note.layout.parts(coordinate))


def boxes_of(told: Mapping[str, Any], local: TensorNote) -> Boxes:
    """Return the boxes of a tensor that tells them as torch_checkpointing asks; else ValueError."""
    shape = list_of_ints(told[PROTOCOL[0]])
    places = [[list_of_ints(one) for one in as_list(told[name])] for name in PROTOCOL[1:]]
    if len(set(map(len, places))) != 1:
        raise ValueError("offsets and sizes of shards are not equally many")
    parts = [
        (Box(offsets, sizes), narrowed(local, Box(at, sizes)))
        for offsets, at, sizes in zip(*places, strict=True)
    ]
    if any(not Box.whole(shape).contains(box) for box, _ in parts):
        raise ValueError(f"a shard does not lie in a tensor of shape {shape}")
    return Boxes(shape, tuple(parts))


class _Shard(Object): ...


class _StridedShard(Object): ...


class _Replicate(Object): ...


class _Partial(Object): ...


class _GroupState(Object): ...


class _Class:
    """A class of tensors that a pickle names, and that is never made."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a pickle may not set {shown(name)} of a class")


_MOST_CLASSES = 100
"""Of one pickle, which are a kilobyte each."""
_MOST_PARTS = 1 << 16
"""That a split factor may cut a dim into."""


class _Unknown:
    """A class or a function of which nothing is known but the name."""

    name: ClassVar[str] = ""

    def __new__(cls, *_: Any) -> _Unknown:
        raise NotHeld(not_known(cls.name))

    def __setstate__(self, state: Any) -> None:
        raise NotHeld(not_known(self.name))


_TENSOR, _DTENSOR, _SHARDED = map(_Class, ("Tensor", "DTensor", "ShardedTensor"))
_WRAPPER = _Class("_rebuild_wrapper_subclass")


def _of_type(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Return the note of a tensor of a class; ``state`` has its attributes."""
    if kind is _DTENSOR and make is _WRAPPER:
        return _dtensor(attributes_of(state))
    if kind is _SHARDED and make is _WRAPPER:
        return _sharded(state)
    if isinstance(make, Inert):
        note, told = make(*args), attributes_of(state)
        if isinstance(note, TensorNote) and set(PROTOCOL) <= told.keys():
            return boxes_of(told, note)
        if kind is _TENSOR:
            return note
    raise NotHeld(not_known(str(getattr(kind, "name", "a class of tensors"))))


def _dtensor(told: dict[str, Any]) -> Note:
    spec, local = told["_spec"], told["_local_tensor"]
    if not isinstance(local, TensorNote):
        raise TypeError(f"a DTensor of {shown(local)}")
    meta = spec.tensor_meta
    shape = list_of_ints(meta.args[0] if meta.args else meta.shape)
    entries = getattr(spec, "shard_order", None) or ()
    how = _Spec(
        tuple(_Entry(e.args[0], list_of_ints(e.args[1])) for e in entries),
        getattr(spec, "use_strided_shard_as_shard_order", None),
    )
    return laid(local, laid_out(mesh_of(spec.mesh), spec.placements, shape, how))


def laid(local: TensorNote, layout: Layout) -> Note:
    """Return what a rank holds of a tensor of a layout; an empty one is a plain tensor."""
    if 0 in layout.shape:
        return local._replace(shape=layout.shape, strides=row_major_strides(layout.shape))
    return LaidOut(layout, local)


class _Entry(NamedTuple):
    tensor_dim: int
    mesh_dims: tuple[int, ...]


class _Spec(NamedTuple):
    """What a DTensorSpec says of its placements."""

    shard_order: tuple[_Entry, ...] = ()
    use_strided_shard_as_shard_order: bool | None = None


def laid_out(
    mesh: Mesh, placements: Sequence[Any], shape: tuple[int, ...], spec: _Spec | None = None
) -> Layout:
    """Return the layout of placements of a pickle; CheckpointError for what no file can hold."""
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dims")
    return _layout(mesh, tuple(map(_placement, placements)), shape, spec or _Spec())


@remembered(4096)
def _layout(mesh: Mesh, placements: tuple[Any, ...], shape: tuple[int, ...], spec: _Spec) -> Layout:
    try:
        layout = layout_of_spec(mesh, placements, shape, spec)
    except PlacementError as error:
        raise CheckpointError(f"a DTensor of shape {shape} on {mesh}: {error}") from error
    if layout.is_partial:
        raise CheckpointError(f"a DTensor is laid out as {layout}, terms of a sum still to be done")
    return layout


def _placement(told: Any) -> Any:
    if isinstance(told, _Replicate):
        return torch_tensor.Replicate()
    if isinstance(told, _Shard):
        return torch_tensor.Shard(size_of(vars(told)["dim"], "a dim"))
    if isinstance(told, _Partial):
        return torch_tensor.Partial()
    made = strided_shard()
    if isinstance(told, _StridedShard) and made is not None:
        factor = size_of(vars(told)["split_factor"], "a split factor", below=_MOST_PARTS)
        return made(size_of(vars(told)["dim"], "a dim"), split_factor=factor)
    raise ValueError(f"{shown(told)} is no placement")


def replicated() -> Any:
    """Return what a pickle would have for a placement that replicates."""
    return _Replicate()


def sharded(dim: int, split_factor: int | None = None) -> Any:
    """Return what a pickle would have for a placement that shards, perhaps strided."""
    made = _Shard() if split_factor is None else _StridedShard()
    made.__setstate__({"dim": dim, "split_factor": split_factor})
    return made


def _sharded(state: Any) -> Boxes:
    shards, told, *_ = state
    shape = list_of_ints(told.size)
    parts: list[tuple[Box, TensorNote]] = []
    for shard in shards:
        where, local = shard.metadata, shard.tensor
        box = Box(list_of_ints(where.shard_offsets), list_of_ints(where.shard_sizes))
        if not isinstance(local, TensorNote) or local.shape != box.sizes:
            raise ValueError(f"a shard {shown(local)} at {box}")
        parts.append((box, local))
    return Boxes(shape, tuple(parts))


def _attribute(value: Any, name: Any) -> Any:
    if value is _SHARDED and name == "ProcessGroupState":
        return _GroupState
    raise NotHeld(not_known("builtins.getattr"))


_SHARDING = "torch.distributed._shard"
_NAMES: Mapping[str, Any] = {
    "torch._tensor._rebuild_from_type_v2": Inert(_of_type),
    "torch._utils._rebuild_wrapper_subclass": _WRAPPER,
    "torch._tensor.Tensor": _TENSOR,
    "torch.Tensor": _TENSOR,
    "torch.nn.parameter.Parameter": _TENSOR,
    **{
        f"torch.distributed.{module}.DTensor": _DTENSOR
        for module in ("tensor", "tensor._api", "_tensor", "_tensor.api")
    },
    **{
        f"torch.distributed.{module}.{name}": kind
        for module in ("tensor.placement_types", "_tensor.placement_types")
        for name, kind in {
            "Shard": _Shard,
            "_StridedShard": _StridedShard,
            "Replicate": _Replicate,
            "Partial": _Partial,
            "_Partial": _Partial,
            "TensorMeta": Object,
            "DTensorSpec": Object,
        }.items()
    },
    **{
        f"torch.distributed.{module}.{name}": Object
        for module in ("tensor._dtensor_spec", "_tensor._dtensor_spec")
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    },
    "torch.distributed.device_mesh.DeviceMesh": MeshObject,
    "torch.distributed._mesh_layout._MeshLayout": Object,
    "torch.distributed._mesh_layout._FlatLayout": Object,
    f"{_SHARDING}.sharded_tensor.api.ShardedTensor": _SHARDED,
    f"{_SHARDING}.sharded_tensor.shard.Shard": Object,
    f"{_SHARDING}.sharded_tensor.metadata.ShardedTensorMetadata": Object,
    f"{_SHARDING}.sharded_tensor.metadata.TensorProperties": Object,
    f"{_SHARDING}.sharded_tensor.metadata.MEM_FORMAT_ENCODING": Inert(int),
    f"{_SHARDING}.metadata.ShardMetadata": Object,
    f"{_SHARDING}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec": Object,
    f"{_SHARDING}.sharding_spec.api.EnumerableShardingSpec": Object,
    "torch.distributed.remote_device._remote_device": Object,
    "builtins.getattr": Inert(_attribute),
}


class KnownNames:
    """Names of distributed tensors; all others may only be classes of tensors that say their boxes.

    These are of people's own (``CheckpointableTensor`` is a protocol), so none is known by name.
    """

    def __init__(self) -> None:
        self._classes: dict[str, type[_Unknown]] = {}

    def get(self, name: str) -> Any:
        """Return what stands for a name; None where every pickle may have it, or none may."""
        if name in _NAMES or is_known(name):
            return _NAMES.get(name)
        if name not in self._classes and len(self._classes) < _MOST_CLASSES:
            self._classes[name] = type("Unknown", (_Unknown,), {"name": name})
        return self._classes.get(name)
