"""Which bytes of a chunk hold a wanted box: every element once, and no block in vain."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.checkpoint.reading import limits
from dtckpt.checkpoint.reading.cuts import Geometry
from dtckpt.checkpoint.state.limits import MIN_BLOCK_BYTES
from dtckpt.dtensor import Box
from dtckpt.storage import FaultyStore, MemoryStore

Array = np.ndarray[Any, Any]


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """A wanted box and a chunk of one tensor, which may or may not meet."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))

    def box() -> Box:
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    size = draw(st.sampled_from([1, 2, 8]))
    blocks = draw(st.integers(1, 70))
    return Geometry(chunk=box(), wanted=box(), itemsize=size, block_bytes=blocks, staged_bytes=300)


def copied(geometry: Geometry, *, runs: bool) -> tuple[Array, set[int]]:
    """Copy what the cuts say; return the wanted box, and the blocks that were read."""
    size, block = geometry.itemsize, geometry.block_bytes
    chunk_bytes = geometry.chunk.numel * size
    source = np.arange(1, geometry.chunk.numel + 1, dtype=f"u{size}").reshape(-1).view("u1")
    wanted = np.zeros(geometry.wanted.sizes, dtype=f"u{size}")
    flat = wanted.reshape(-1).view("u1")
    count = np.zeros(geometry.wanted.sizes, dtype=int)
    counted = count.reshape(-1)
    blocks: set[int] = set()
    for cut in geometry.cuts(runs=runs):
        assert 0 <= cut.low <= cut.start < cut.end <= cut.high <= chunk_bytes
        assert cut.low % block == 0
        assert cut.high % block == 0 or cut.high == chunk_bytes
        blocks |= set(range(cut.low // block, -(-cut.high // block)))
        if cut.target is None:
            items = np.ndarray(
                cut.part.sizes, f"u{size}", source.data, offset=cut.start, strides=cut.strides
            )
            wanted[cut.part.slices] = items
            count[cut.part.slices] += 1
        else:
            assert runs
            length = cut.end - cut.start
            flat[cut.target : cut.target + length] = source[cut.start : cut.end]
            for byte in range(cut.target, cut.target + length):
                counted[byte // size] += byte % size == 0
    common = geometry.chunk.intersect(geometry.wanted)
    expected = np.zeros(geometry.wanted.sizes, dtype=int)
    if common is not None:
        expected[common.relative_to(geometry.wanted).slices] = 1
    assert np.array_equal(count, expected), "every element is copied once, and no other"
    return wanted, blocks


@settings(max_examples=300, deadline=None)
@given(geometries(), st.booleans(), st.sampled_from([1, 40, limits.IN_PLACE_BYTES]))
def test_cuts_copy_the_common_elements_and_read_their_blocks_only(
    geometry: Geometry, runs: bool, in_place_bytes: int
) -> None:
    chunk, size = geometry.chunk, geometry.itemsize
    numbers = np.arange(1, chunk.numel + 1, dtype=f"u{size}").reshape(chunk.sizes)
    expected = np.zeros(geometry.wanted.sizes, dtype=f"u{size}")
    needed: set[int] = set()
    common = chunk.intersect(geometry.wanted)
    if common is not None:
        in_chunk = numbers[common.relative_to(chunk).slices]
        expected[common.relative_to(geometry.wanted).slices] = in_chunk
        positions = np.arange(chunk.numel).reshape(chunk.sizes)
        for first in positions[common.relative_to(chunk).slices].reshape(-1) * size:
            last = first + size - 1
            needed |= set(range(first // geometry.block_bytes, last // geometry.block_bytes + 1))
    with mock.patch.multiple(limits, IN_PLACE_BYTES=in_place_bytes, READ_BYTES=300, STEP_BYTES=1):
        wanted, blocks = copied(geometry, runs=runs)
    assert np.array_equal(wanted, expected)
    assert blocks == needed


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), max_size=4), st.sampled_from([1, 4]))
def test_elements_in_another_order_are_copied_alike(
    data: st.DataObject, shape: list[int], size: int
) -> None:
    """Any view of memory: transposed, with gaps, repeated."""
    strides = tuple(data.draw(st.integers(0, 40)) * size for _ in shape)
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)]
    wanted = Box(tuple(starts), tuple(sizes))
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + size
    memory = np.random.default_rng(0).integers(0, 256, reach, dtype=np.uint8)
    stored = np.ndarray(shape, f"u{size}", memory.data, strides=strides)
    geometry = Geometry(
        chunk=Box.whole(tuple(shape)),
        wanted=wanted,
        itemsize=size,
        block_bytes=1,
        staged_bytes=200,
        strides=strides,
    )
    found = np.zeros(sizes, f"u{size}")
    with mock.patch.multiple(limits, READ_BYTES=200, STEP_BYTES=data.draw(st.integers(1, 99))):
        for cut in geometry.cuts(runs=True):
            assert 0 <= cut.low == cut.start < cut.end == cut.high <= reach
            assert cut.target is None
            assert cut.end - cut.start <= 200
            found[cut.part.slices] += np.ndarray(
                cut.part.sizes, f"u{size}", memory.data, offset=cut.start, strides=cut.strides
            )
    assert np.array_equal(found, stored[wanted.slices]), "every element once"


def test_a_whole_chunk_goes_straight_in_large_parts() -> None:
    whole = Box.whole((1000, 10_001))
    geometry = Geometry(
        chunk=whole, wanted=whole, itemsize=4, block_bytes=1 << 20, staged_bytes=limits.READ_BYTES
    )
    parts = list(geometry.cuts(runs=True))
    assert all(cut.is_in_place for cut in parts)
    assert len(parts) == -(-whole.numel * 4 // limits.READ_BYTES)
    assert all(a.end == b.start for a, b in pairwise(parts))


def test_only_the_edges_of_rows_pass_through_a_buffer() -> None:
    """Rows that start and end within a block: the blocks between go straight."""
    chunk = Box.whole((100, 1 << 14))
    wanted = Box((3, 0), (90, 1 << 14))
    geometry = Geometry(
        chunk=chunk, wanted=wanted, itemsize=4, block_bytes=1 << 20, staged_bytes=limits.READ_BYTES
    )
    in_place = [cut.is_in_place for cut in geometry.cuts(runs=True)]
    assert in_place == [False, True, False]
    buffered = sum(cut.end - cut.start for cut in geometry.cuts(runs=True) if not cut.is_in_place)
    assert buffered < 2 << 20


def test_small_runs_are_copied() -> None:
    whole = Box.whole((limits.IN_PLACE_BYTES - 1,))
    geometry = Geometry(
        chunk=whole, wanted=whole, itemsize=1, block_bytes=1 << 10, staged_bytes=limits.READ_BYTES
    )
    (cut,) = geometry.cuts(runs=True)
    assert not cut.is_in_place


def test_what_is_not_memory_comes_in_bounded_parts() -> None:
    whole = Box.whole((64, 1 << 18))
    geometry = Geometry(
        chunk=whole, wanted=whole, itemsize=4, block_bytes=1 << 20, staged_bytes=limits.READ_BYTES
    )
    parts = list(geometry.cuts(runs=False))
    assert sum(cut.part.numel for cut in parts) == whole.numel
    assert all(cut.high - cut.low <= limits.READ_BYTES for cut in parts)
    assert len(parts) <= 8


def test_columns_of_long_rows_come_without_the_rest_of_the_rows() -> None:
    chunk = Box.whole((8, 1 << 21))
    wanted = Box((0, 1 << 19), (8, 1 << 18))
    geometry = Geometry(
        chunk=chunk, wanted=wanted, itemsize=4, block_bytes=1 << 20, staged_bytes=limits.READ_BYTES
    )
    parts = list(geometry.cuts(runs=True))
    assert sum(cut.high - cut.low for cut in parts) == 8 * (1 << 20)
    assert all(cut.is_in_place for cut in parts), "and each row's part is a run"


@pytest.mark.parametrize("block_bytes", [MIN_BLOCK_BYTES, 4 << 10, 1 << 20, 8 << 20, 16 << 20])
def test_columns_come_in_few_parts_whatever_the_length_of_blocks(block_bytes: int) -> None:
    """Blocks may be as long as a read, or shorter than a row's gap to the next."""
    for rows, row in ((1024, 1024), (1 << 14, 1 << 9)):
        chunk, wanted = Box.whole((rows, row)), Box((0, 0), (rows, row // 4))
        geometry = Geometry(
            chunk=chunk,
            wanted=wanted,
            itemsize=4,
            block_bytes=block_bytes,
            staged_bytes=limits.READ_BYTES,
        )
        parts = list(geometry.cuts(runs=True))
        assert sum(cut.part.numel for cut in parts) == wanted.numel
        assert len(parts) <= 8
        assert max(cut.high - cut.low for cut in parts) <= limits.READ_BYTES + 2 * block_bytes


def test_strided_elements_come_in_parts_that_a_cache_holds() -> None:
    chunk, wanted = Box.whole((1 << 12, 1 << 11)), Box((0, 0), (1 << 12, 1 << 10))
    local, remote = MemoryStore(), FaultyStore(MemoryStore())
    remote.url = "s3://bucket"
    for store, block_bytes, most in (
        (local, 1, limits.STAGED_BYTES),
        (local, 1 << 20, limits.READ_BYTES),
        (remote, 1, limits.READ_BYTES),
    ):
        geometry = Geometry(
            chunk=chunk,
            wanted=wanted,
            itemsize=4,
            block_bytes=block_bytes,
            staged_bytes=limits.staged_bytes(store, block_bytes),
        )
        sizes = [cut.high - cut.low for cut in geometry.cuts(runs=True)]
        assert most // 2 <= max(sizes) <= most
