"""Any layout to any other, against NumPy, without processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.dtensor import Box, IrregularLayout, Layout, Mesh, Replicate, Shard

from ..dtensor.oracle import local_array
from ..dtensor.strategies import layouts, meshes, shapes
from .simulate import Given, items, load_box, save_all

small_meshes = meshes(max_axes=3, max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.data(), shapes(), st.sampled_from(sorted(DTYPES)), small_meshes, small_meshes)
def test_every_rank_of_the_new_layout_gets_its_elements(
    data: st.DataObject, shape: tuple[int, ...], code: str, old_mesh: Mesh, new_mesh: Mesh
) -> None:
    old = data.draw(layouts(mesh=old_mesh, shape=shape))
    new = data.draw(layouts(mesh=new_mesh, shape=shape))
    whole = items(shape, code)
    store, _ = save_all({"x": Given(whole, code, old)}, old_mesh.all_ranks())
    for coordinate in new_mesh.coordinates():
        loaded = load_box(store, "x", new.box(coordinate))
        assert np.array_equal(loaded, local_array(new, coordinate, whole))


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes(max_dims=2), small_meshes)
def test_irregular_to_regular_and_back(
    data: st.DataObject, shape: tuple[int, ...], mesh: Mesh
) -> None:
    regular = data.draw(layouts(mesh=mesh, shape=shape))
    pieces = [(mesh.rank(c), regular.box(c)) for c in mesh.coordinates()]
    irregular = IrregularLayout(shape, tuple(pieces))
    whole = items(shape, "F32")
    store, _ = save_all({"x": Given(whole, "F32", irregular)}, mesh.all_ranks())
    for coordinate in mesh.coordinates():
        box = regular.box(coordinate)
        assert np.array_equal(load_box(store, "x", box), whole[box.slices])


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes(max_size=40), st.integers(16, 300))
def test_any_box_with_any_block_size(
    data: st.DataObject, shape: tuple[int, ...], block_bytes: int
) -> None:
    layout = data.draw(layouts(mesh=Mesh((2, 2)), shape=shape))
    whole = items(shape, "F32")
    store, _ = save_all({"x": Given(whole, "F32", layout)}, range(4), block_bytes=4 * block_bytes)
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    assert np.array_equal(load_box(store, "x", box), whole[box.slices])


def test_replicas_share_the_writing() -> None:
    mesh = Mesh((4, 2), ("replicate", "shard"))
    layout = Layout(mesh, (Replicate(), Shard(0)), (64, 8))
    given = {f"layer{i}": Given(items((64, 8), "F32", i), "F32", layout) for i in range(12)}
    _, files = save_all(given, range(8))
    sizes = [record.size for record in files]
    assert len(sizes) == 8, "every replica writes a part"
    assert max(sizes) <= 1.01 * min(sizes), "of equal size"
    written = sum(record.size - record.header_bytes for record in files)
    assert written < 12 * 64 * 8 * 4 * 1.3, "and nothing is written twice"


def test_a_column_slice_of_row_shards_skips_what_it_does_not_need() -> None:
    rows = Layout(Mesh((2,)), (Shard(0),), (64, 1 << 14))
    whole = items(rows.shape, "F32")
    store, _ = save_all({"x": Given(whole, "F32", rows)}, range(2), block_bytes=1 << 12)
    box = Box((0, 1024), (64, 1024))
    assert np.array_equal(load_box(store, "x", box), whole[box.slices])


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_wide_items_are_aligned_in_files_of_mixed_dtypes(code: str) -> None:
    layout = Layout(Mesh((2,)), (Shard(0),), (7, 3))
    given = {
        f"{i}-{other}": Given(items((7, 3), other, i), other, layout)
        for i, other in enumerate([code, "U8", "F64", code, "BF16"])
    }
    store, _ = save_all(given, range(2))
    for name, tensor in given.items():
        assert np.array_equal(load_box(store, name, Box.whole((7, 3))), tensor.array)
