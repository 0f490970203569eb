"""Parts of a dim that are sharded each by itself, from and to any layout, against NumPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from dtckpt.dtensor import DeviceMesh, Layout, Mesh
from dtckpt.dtensor.mesh.torch_layouts import layout_from_torch
from dtckpt.dtensor.torch_private import strided_shard
from dtckpt.storage import Store

from ..dtensor.oracle import Array, local_array
from ..dtensor.strategies import layouts, meshes, shapes
from .simulate import Given, items, load_box, save_all

Strided: Any = strided_shard()
small_meshes = meshes(max_axes=3, max_size=8)


def load_local(store: Store, layout: Layout, coordinate: tuple[int, ...]) -> Array:
    """Read all boxes that a coordinate holds into its local array."""
    local = np.zeros(layout.box(coordinate).sizes, dtype="u4")
    for held, place in layout.parts(coordinate):
        local[place.slices] = load_box(store, "x", held)
    return local


@settings(max_examples=80, deadline=None)
@given(st.data(), shapes(max_size=13), small_meshes, small_meshes)
def test_any_parts_to_any_others(
    data: st.DataObject, shape: tuple[int, ...], old_mesh: Mesh, new_mesh: Mesh
) -> None:
    old = data.draw(layouts(mesh=old_mesh, shape=shape, with_packed=True))
    new = data.draw(layouts(mesh=new_mesh, shape=shape, with_packed=True))
    whole = items(shape, "F32")
    store, _ = save_all({"x": Given(whole, "F32", old)}, old_mesh.all_ranks())
    for coordinate in new_mesh.coordinates():
        wanted = local_array(new, coordinate, whole)
        assert np.array_equal(load_local(store, new, coordinate), wanted)


def held_by_torch(
    whole: Array, mesh: Mesh, coordinate: tuple[int, ...], placements: list[Any]
) -> Array:
    """What torch's placements say, read from left to right."""
    for count, here, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if not isinstance(placement, TorchReplicate):
            parts = chunks(whole, placement.dim, getattr(placement, "split_factor", 1))
            shares = [chunks(part, placement.dim, count)[here] for part in parts]
            whole = np.concatenate(shares, axis=placement.dim)
    return whole


def chunks(array: Array, dim: int, count: int) -> list[Array]:
    """Even chunks, the last ones smaller or empty."""
    size = array.shape[dim]
    step = max(1, -(-size // count))
    return np.split(array, [min(i * step, size) for i in range(1, count)], axis=dim)


@st.composite
def split_factors(draw: st.DrawFn, mesh: Mesh, ndim: int) -> list[Any]:
    """Placements of torch; of the axes that cut a dim the first may have any split factor."""
    dims = [draw(st.none() | st.integers(0, ndim - 1)) for _ in mesh.shape]
    placements: list[Any] = [TorchReplicate() if d is None else TorchShard(d) for d in dims]
    for dim in {d for d in dims if d is not None}:
        factor = draw(st.integers(1, 9))
        placements[dims.index(dim)] = Strided(dim, split_factor=factor)
    return placements


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(0, 17), min_size=1, max_size=3), small_meshes, small_meshes)
def test_any_split_factors_of_torch_to_any_others(
    data: st.DataObject, sizes: list[int], old_mesh: Mesh, new_mesh: Mesh
) -> None:
    def laid_out(mesh: Mesh) -> tuple[Layout, list[Any]]:
        placements = data.draw(split_factors(mesh, len(sizes)))
        tensor: Any = SimpleNamespace(
            device_mesh=DeviceMesh("cpu", mesh, rank=0),
            placements=tuple(placements),
            shape=tuple(sizes),
            _spec=SimpleNamespace(use_strided_shard_as_shard_order=False, shard_order=()),
        )
        return layout_from_torch(tensor), placements

    old, given_old = laid_out(old_mesh)
    new, given_new = laid_out(new_mesh)
    whole = items(sizes, "F32")
    for coordinate in old_mesh.coordinates():
        wanted = held_by_torch(whole, old_mesh, coordinate, given_old)
        assert np.array_equal(local_array(old, coordinate, whole), wanted)
    store, _ = save_all({"x": Given(whole, "F32", old)}, old_mesh.all_ranks())
    for coordinate in new_mesh.coordinates():
        wanted = held_by_torch(whole, new_mesh, coordinate, given_new)
        assert np.array_equal(load_local(store, new, coordinate), wanted)
