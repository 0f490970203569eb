"""Saves and loads of DTensors by real groups of ranks, each rank a thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as dcp
import dtckpt.dtensor as dt
from dtckpt.checkpoint.tensors.dtypes import BY_TORCH_NAME
from dtckpt.dtensor import (
    Box,
    DeviceMesh,
    DTensor,
    Layout,
    Mesh,
    Partial,
    Ragged,
    Replicate,
    Shard,
    random,
)
from dtckpt.errors import LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ...dtensor.oracle import local_array
from ...dtensor.rank_meshes import rank_mesh
from ...dtensor.strategies import layouts, meshes, shapes
from ...ranks import RanksFailed, run_ranks

# torch's stubs leave out the stores.
_c10d: Any = dist

small_meshes = meshes(max_axes=3, max_size=8)
dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64"])


def whole_tensor(shape: tuple[int, ...], name: str) -> torch.Tensor:
    """A tensor with different values in a dtype."""
    numel = int(np.prod(shape))
    return (torch.arange(numel) % 251).to(torch.float32).reshape(shape).to(getattr(torch, name))


def items(tensor: torch.Tensor) -> Any:
    """The elements as unsigned ints."""
    size = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].itemsize
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.view(ints).numpy()


def held(layout: Layout, rank: int) -> Box | None:
    """What a rank holds of a layout."""
    coordinate = layout.mesh.coordinate(rank)
    return None if coordinate is None else layout.box(coordinate)


def distributed(layout: Layout, rank: int, whole: torch.Tensor | None, dtype: str) -> DTensor:
    """The tensor as one rank holds it; zeros without ``whole``."""
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    box = layout.box(coordinate)
    local = torch.zeros(box.sizes, dtype=getattr(torch, dtype))
    if whole is not None:
        local = whole[box.slices].clone()
    mesh = DeviceMesh("cpu", layout.mesh, rank=rank)
    return DTensor.from_local(local, mesh, layout.placements, shape=layout.shape)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(shapes(), min_size=1, max_size=3), dtypes, small_meshes, small_meshes)
def test_any_layout_to_any_other(
    data: st.DataObject, all_shapes: list[tuple[int, ...]], dtype: str, old: Mesh, new: Mesh
) -> None:
    wholes = {f"t{i}": whole_tensor(shape, dtype) for i, shape in enumerate(all_shapes)}
    before = {n: data.draw(layouts(mesh=old, shape=tuple(t.shape))) for n, t in wholes.items()}
    after = {n: data.draw(layouts(mesh=new, shape=tuple(t.shape))) for n, t in wholes.items()}
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        state = {n: distributed(layout, rank, wholes[n], dtype) for n, layout in before.items()}
        dcp.save({"model": state, "plain": torch.ones(3)}, store, process_group=group)

    def load(rank: int, group: Any) -> dict[str, Any]:
        state = {n: distributed(layout, rank, None, dtype) for n, layout in after.items()}
        plain = torch.zeros(3)
        report = dcp.load({"model": state, "plain": plain}, store, process_group=group)
        moved = {n for n in wholes if held(before[n], rank) != held(after[n], rank)}
        assert set(report.resharded) == {f"model/{n}" for n in moved}
        assert plain.tolist() == [1, 1, 1]
        return {n: items(t.to_local()) for n, t in state.items()}

    run_ranks(old.size, save)
    for rank, loaded in enumerate(run_ranks(new.size, load)):
        coordinate = new.coordinate(rank)
        assert coordinate is not None
        for name, layout in after.items():
            expected = local_array(layout, coordinate, items(wholes[name]))
            assert np.array_equal(loaded[name], expected)


def test_a_mesh_over_some_of_the_ranks() -> None:
    """Two stages on two ranks each; the group of all four saves them together."""
    store = MemoryStore()
    whole = whole_tensor((5, 4), "float32")

    def layout(rank: int) -> Layout:
        return Layout(Mesh((2,), ("tp",), (0, 1) if rank < 2 else (2, 3)), (Shard(0),), (5, 4))

    def save(rank: int, group: Any) -> None:
        name = f"stage{rank // 2}"
        state = {name: distributed(layout(rank), rank, whole * (1 + rank // 2), "float32")}
        dcp.save(state, store, process_group=group)

    run_ranks(4, save)
    checkpoint = dcp.open(store)
    assert torch.equal(checkpoint["stage0"][...], whole)
    assert torch.equal(checkpoint["stage1"][2:], 2 * whole[2:])


@pytest.mark.parametrize("agree", [True, False])
def test_sibling_meshes_hold_copies_if_their_bytes_agree(agree: bool) -> None:
    """Only the data axis shards a norm's weight: each line of that axis is a mesh with a copy."""
    whole = whole_tensor((5,), "float32")
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        layout = Layout(Mesh((2,), ("dp",), (rank % 2, rank % 2 + 2)), (Shard(0),), (5,))
        value = whole if agree or rank % 2 == 0 else whole + 1
        dcp.save({"w": distributed(layout, rank, value, "float32")}, store, process_group=group)

    if agree:
        run_ranks(4, save)
        assert torch.equal(dcp.open(store)["w"][...], whole)
        return
    with pytest.raises(RanksFailed, match="different values on rank 0 and rank 1"):
        run_ranks(4, save)
    assert list(store.list()) == []


def test_a_rank_of_the_mesh_that_does_not_bring_its_part() -> None:
    layout = Layout(Mesh((3,), ("dp",)), (Shard(0),), (6,))
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        state = {"w": distributed(layout, rank, torch.ones(6), "float32")} if rank < 2 else {}
        dcp.save(state, store, process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, save)
    for error in failure.value.errors.values():
        assert isinstance(error, LayoutMismatch)
        assert "rank 2 did not bring it" in str(error)


def test_partial_tensors_are_refused() -> None:
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(Unsavable, match="Redistribute it to Shard or Replicate"):
        dcp.save({"w": tensor}, MemoryStore())


def test_replicas_write_each_byte_once() -> None:
    """HSDP: two replicas of four shards; every rank writes about an eighth of the bytes."""
    layout = Layout(Mesh((2, 4), ("replicate", "shard")), (Replicate(), Shard(0)), (256, 64))
    store = MemoryStore()

    def save(rank: int, group: Any) -> dcp.SaveReport:
        state = {
            f"w{i}": distributed(layout, rank, torch.full((256, 64), float(i)), "float32")
            for i in range(8)
        }
        return dcp.save(state, store, process_group=group)

    reports = run_ranks(8, save)
    total = 8 * 256 * 64 * 4
    assert reports[0].total_bytes == total
    overhead = 4096 + 4 * 16  # the header, and the digests of four chunks
    assert max(report.written_bytes for report in reports) <= total / 8 + overhead


def test_ragged_experts_to_even_shards() -> None:
    whole = whole_tensor((10, 3), "bfloat16")
    ragged = Layout(Mesh((4,), ("ep",)), (Ragged(0, (1, 4, 0, 5)),), (10, 3))
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        dcp.save({"w": distributed(ragged, rank, whole, "bfloat16")}, store, process_group=group)

    run_ranks(4, save)
    even = Layout(Mesh((3,)), (Shard(1),), (10, 3))
    into = distributed(even, 1, None, "bfloat16")
    dcp.load({"w": into}, store)
    assert torch.equal(into.to_local(), whole[:, 1:2])


class Packed:
    """A foreign tensor type that only speaks torch's checkpoint protocol."""

    def __init__(self, shape: tuple[int, ...], parts: dict[tuple[int, ...], torch.Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.parts = parts
        self.dtype = torch.float32

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape)
            for offset, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.parts[tuple(index.offset)]


def test_tensors_that_only_tell_their_chunks() -> None:
    whole = whole_tensor((6, 4), "float32")
    boxes = [[(0, 0), (4, 2)], [(0, 2)]]
    sizes: dict[tuple[int, ...], tuple[int, int]] = {(0, 0): (4, 2), (4, 2): (2, 2), (0, 2): (4, 2)}
    boxes[1].append((4, 0))
    sizes[(4, 0)] = (2, 2)

    def packed(rank: int, fill: bool) -> Packed:
        parts: dict[tuple[int, ...], torch.Tensor] = {}
        for offset in boxes[rank]:
            rows, cols = sizes[offset]
            part = whole[offset[0] : offset[0] + rows, offset[1] : offset[1] + cols]
            parts[offset] = part.clone() if fill else torch.zeros_like(part)
        return Packed((6, 4), parts)

    store = MemoryStore()
    run_ranks(2, lambda r, g: dcp.save({"w": packed(r, fill=True)}, store, process_group=g))
    assert torch.equal(dcp.open(store)["w"][...], whole)

    def load(rank: int, group: Any) -> None:
        into = packed(rank, fill=False)
        dcp.load({"w": into}, store, process_group=group)
        for offset, part in packed(rank, fill=True).parts.items():
            assert torch.equal(into.parts[offset], part)

    run_ranks(2, load)
    dropped = {**sizes}
    del dropped[(4, 0)]
    boxes[1].remove((4, 0))
    with pytest.raises(RanksFailed, match="20 of the 24 elements"):
        run_ranks(
            2,
            lambda r, g: dcp.save(
                {"w": packed(r, fill=True)}, store.substore("holes"), process_group=g
            ),
        )


def test_copies_of_single_boxes_are_compared() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        parts = {(0,): torch.full((2,), float(rank))}
        if rank == 0:
            parts[(2,)] = torch.zeros(2)
        dcp.save({"w": Packed((4,), parts)}, store, process_group=group)  # pyright: ignore

    with pytest.raises(RanksFailed, match=r"\[0:2\] has different values on rank 0 and rank 1"):
        run_ranks(2, save)


@pytest.mark.parametrize("seed", [3, -3, 2**64 - 5])
def test_random_numbers_continue_on_another_mesh(seed: int) -> None:
    def draw(mesh: DeviceMesh, placements: list[Any]) -> list[torch.Tensor]:
        made = dt.rand(5, 3, device_mesh=mesh, placements=placements)
        noise = F.dropout(made.normal_(), 0.5)
        order = dt.randperm(9, device_mesh=mesh)
        return [t.full_tensor() for t in (made, noise, order)]  # pyright: ignore[reportAttributeAccessIssue]

    store = MemoryStore()

    def first(mesh: DeviceMesh, group: Any) -> list[torch.Tensor]:
        random.manual_seed(seed, mesh)
        draw(mesh, [Shard(0)])
        state = {"rng": random.get_rng_state(mesh), "w": torch.ones(2)}
        dcp.save(state, store, process_group=group)
        return draw(mesh, [Shard(0)])

    def on_mesh(shape: tuple[int, ...], body: Callable[[DeviceMesh, Any], Any]) -> list[Any]:
        ends: object = _c10d.HashStore()
        count = math.prod(shape)
        return run_ranks(count, lambda rank, g: body(rank_mesh(ends, shape, rank, g), g))

    wanted = on_mesh((4,), first)[0]

    def then(mesh: DeviceMesh, group: Any) -> None:
        random.manual_seed(1, mesh)
        state = {"rng": random.get_rng_state(mesh), "w": torch.zeros(2)}
        dcp.load(state, store, process_group=group)
        assert state["rng"] == {"seed": seed % 2**64, "offset": 4}
        random.set_rng_state(state["rng"], mesh)  # pyright: ignore[reportArgumentType]
        found = draw(mesh, [Shard(1), *[Replicate()] * (mesh.ndim - 1)])
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)

    for shape in ((1,), (2,), (3,), (2, 2)):
        on_mesh(shape, then)
