"""The tensors of a manifest: one line of JSON each, and strict reading of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Placement, Ragged, SplitPlacement, parse_placement
from ..state.limits import (
    MAX_DIMS,
    MAX_RANKS,
    check_metadata_bytes,
    check_nesting,
    check_shape,
    list_of,
    metadata_bytes,
    object_of,
    shown,
    size_of,
    text_of,
)
from ..tensors.dtypes import dtype_of_code
from ..tensors.stored_placements import is_in_format, num_ranges, require_storable
from .stored_tensor import StoredTensor

dump = json.JSONEncoder(allow_nan=False).encode  # made once: there is a call for every line

_BOX_BYTES = 1 << 10
_LAYOUT_BYTES = 4 << 10
"""What a box and a layout count for: less memory than that, but time to be checked."""
_RANGE_BYTES = 300
"""What a range of a placement counts for that gives each rank several; measured on CPython 3.11."""


class TensorLines:
    """Writes tensors as JSON, of which there may be very many alike."""

    def __init__(self) -> None:
        self.meshes: dict[Mesh, int] = {}
        self._places: dict[tuple[Mesh, tuple[Placement, ...], bool | None], str] = {}

    def line(self, tensor: StoredTensor) -> str:
        name = dump(tensor.name)
        if tensor.same_as is not None:
            return f'{name}: {{"same_as": {dump(tensor.same_as)}}}'
        start = f'{name}: {{"dtype": "{tensor.dtype.code}", "shape": {list(tensor.shape)}, '
        if tensor.stored_as is not None:
            start += f'"stored_as": {dump(tensor.stored_as)}, '
        if isinstance(tensor.layout, IrregularLayout):
            return f'{start}"boxes": {dump(tensor.layout.to_json()["boxes"])}}}'
        writer = f'"writer": {tensor.writers[0]}'
        if len(tensor.writers) > 1:
            writer = f'"writers": {list(tensor.writers)}, "cut": {tensor.cut}'
        if tensor.order is not None:
            writer += f', "order": {list(tensor.order)}'
        return f"{start}{self._place(tensor.layout, tensor.is_plain)}, {writer}}}"

    def _place(self, layout: Layout, is_plain: bool | None) -> str:
        key = (layout.mesh, layout.placements, is_plain)
        place = self._places.get(key)
        if place is None:
            stored = _in_format(layout)
            mesh = self.meshes.setdefault(layout.mesh, len(self.meshes))
            placements = dump([str(placement) for placement in stored])
            place = f'"mesh": {mesh}, "placements": {placements}'
            if is_plain is not None and all(p.is_replicate() for p in stored):
                place += f', "plain": {dump(is_plain)}'
            self._places[layout.mesh, stored, is_plain] = place
        return place


def _in_format(layout: Layout) -> tuple[Placement, ...]:
    """Return the placements, by their sizes those that the format does not have: files go where
    nobody has their classes."""
    require_storable(layout)
    return tuple(
        Ragged(p.dim, p.sizes_over(layout.shape[p.dim], count))
        if isinstance(p, SplitPlacement) and not is_in_format(p)
        else p
        for p, count in zip(layout.placements, layout.mesh.shape, strict=True)
    )


def meshes_from_json(value: object) -> list[Mesh]:
    """Return the meshes of a manifest; ValueError or TypeError where they are malformed."""
    found: list[Mesh] = []
    for told in list_of(value, "meshes"):
        check_nesting(told, 2, "a mesh")
        mesh = Mesh.from_json(told)
        if mesh.ndim > MAX_DIMS or mesh.size >= MAX_RANKS:
            raise ValueError(f"a mesh of {mesh.ndim} axes has {mesh.size} ranks")
        if mesh.ranks is not None and max(mesh.ranks) >= MAX_RANKS:
            raise ValueError(f"a mesh names rank {max(mesh.ranks)}")
        found.append(mesh)
    return found


def tensors_from_json(value: object, meshes: list[Mesh]) -> dict[str, StoredTensor]:
    """Return the tensors of a manifest by name; ValueError or TypeError where malformed."""
    lines: dict[str, dict[str, Any]] = object_of(value, "tensors")
    reader = _TensorReader(meshes)
    found = {
        name: reader.tensor(name, told) for name, told in lines.items() if "same_as" not in told
    }
    for name, told in lines.items():
        if "same_as" in told:
            other = text_of(told["same_as"], "same_as")
            if other not in found or found[other].same_as is not None:
                raise ValueError(
                    f"tensor {shown(name)} is tied to {shown(other)}, which is not stored itself"
                )
            found[name] = found[other]._replace(name=name, same_as=other)
    own = [tensor.stored_name for tensor in found.values() if tensor.same_as is None]
    if len(set(own)) < len(own):
        raise ValueError("two tensors are stored under one name")
    return {name: found[name] for name in lines}


class _TensorReader:
    """Reads tensors, most of which are stored alike; those share one layout."""

    def __init__(self, meshes: list[Mesh]) -> None:
        self._meshes = meshes
        self._known: dict[tuple[Any, ...], StoredTensor] = {}
        self._most = metadata_bytes()
        self._bytes = 0

    def tensor(self, name: str, value: dict[str, Any]) -> StoredTensor:
        if "stored_as" in value:
            other = text_of(value["stored_as"], "stored_as")
            rest = {key: told for key, told in value.items() if key != "stored_as"}
            _check_name(other)
            return self.tensor(name, rest)._replace(stored_as=other)
        _check_name(name)
        if "boxes" in value:
            return self._irregular(name, value)
        writers = value["writers"] if "writers" in value else (value.get("writer", 0),)
        key = (
            value["dtype"],
            value["mesh"],
            *value["shape"],
            "",
            *value["placements"],
            *writers,
            value.get("cut", 0),
            value.get("plain"),
            *value.get("order", ()),
        )
        like = self._known.get(key)
        if like is None:
            self._count(_LAYOUT_BYTES)
            like = self._known[key] = self._regular(name, value)
        return StoredTensor(name, *like[1:])

    def _count(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        if self._bytes > self._most:
            check_metadata_bytes(self._bytes, "this many layouts and boxes")

    def _irregular(self, name: str, value: dict[str, Any]) -> StoredTensor:
        boxes = list_of(value["boxes"], "boxes")
        shape = _shape(value)
        self._count(len(boxes) * (_BOX_BYTES + 32 * len(shape)))
        layout = IrregularLayout.from_json({"shape": shape, "boxes": boxes})
        if layout.pieces and not min(rank for rank, _ in layout.pieces) >= 0:
            raise ValueError(f"tensor {shown(name)} names a negative rank")
        if layout.pieces and max(rank for rank, _ in layout.pieces) >= MAX_RANKS:
            raise ValueError(f"tensor {shown(name)} names a rank above {MAX_RANKS}")
        layout.validate()
        dtype = dtype_of_code(value["dtype"], f"tensor {shown(name)}")
        return StoredTensor(name=name, dtype=dtype, shape=layout.shape, layout=layout)

    def _regular(self, name: str, value: dict[str, Any]) -> StoredTensor:
        shape = _shape(value)
        placements = tuple(map(parse_placement, value["placements"]))
        if not all(map(is_in_format, placements)):
            raise ValueError(
                f"tensor {shown(name)} lies by {shown(placements)}, not all of the format"
            )
        mesh = self._meshes[size_of(value["mesh"], "mesh", below=len(self._meshes))]
        ranges = itertools.starmap(num_ranges, zip(placements, mesh.shape, strict=True))
        self._count(sum(ranges) * _RANGE_BYTES)
        layout = Layout(mesh, placements, shape)
        if layout.is_partial:
            raise ValueError(f"tensor {shown(name)} cannot be laid out as {layout}")
        writers, cut = _writers_from_json(name, value, layout)
        return StoredTensor(
            name=name,
            dtype=dtype_of_code(value["dtype"], f"tensor {shown(name)}"),
            shape=shape,
            layout=layout,
            writers=writers,
            cut=cut,
            is_plain=_plain_from_json(name, value.get("plain"), layout),
            order=_order_from_json(name, value.get("order"), shape),
        )


def _plain_from_json(name: str, value: object, layout: Layout) -> bool | None:
    """Return whether a tensor was a plain one: none that ranks have parts of."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"plain of {shown(name)} is {shown(value)}, expected true or false")
    return value if all(p.is_replicate() for p in layout.placements) else False


def _order_from_json(name: str, value: object, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order of the dims in memory; None for row-major."""
    if value is None:
        return None
    order = tuple(size_of(dim, "a dim of an order") for dim in list_of(value, "order"))
    if sorted(order) != [*range(len(shape))]:
        raise ValueError(f"order of {shown(name)} is {shown(order)}, expected all of its dims")
    return order


def _check_name(name: str) -> None:
    if "[" in name:
        raise ValueError(f"{shown(name)} is no name of a tensor, since it has a [ in it")


def _shape(value: dict[str, Any]) -> tuple[int, ...]:
    sizes = list_of(value["shape"], "shape")
    shape = tuple(size_of(size, "a size of a tensor") for size in sizes)
    check_shape(shape, "a tensor")
    return shape


def _writers_from_json(
    name: str, value: dict[str, Any], layout: Layout
) -> tuple[tuple[int, ...], int]:
    told = list_of(value.get("writers", [value.get("writer", 0)]), "writers")
    replicas = layout.num_replicas
    writers = tuple(size_of(n, f"a writer of {shown(name)}", below=replicas) for n in told)
    if not writers:
        raise ValueError(f"tensor {shown(name)} has no writer")
    if len(writers) == 1:
        return writers, 0
    cut = size_of(value.get("cut", 0), f"cut of {shown(name)}", below=len(layout.shape))
    if len(writers) > layout.shape[cut]:
        raise ValueError(
            f"tensor {shown(name)} of shape {layout.shape} is cut into {len(writers)} slices "
            f"along dim {cut}"
        )
    return writers, cut
