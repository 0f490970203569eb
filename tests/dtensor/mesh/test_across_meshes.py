"""Redistribute from one mesh to another, on ranks that are threads."""

# pyright: reportPrivateUsage=false
# Reads `_spec`, as users of torch do.

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_many,
)
from dtckpt.dtensor.comm.costs import NCCL
from dtckpt.errors import PlacementError
from tests.ranks import RanksFailed, axis_groups, gloo_group, run_ranks

from ..rank_meshes import assert_holds, run_on_mesh, run_on_meshes, scattered
from ..redistribute.test_redistribute import SHAPES, random_placements

# torch's stubs leave out the stores.
_c10d: Any = dist

PAIRS = [
    (4, Mesh((4,)), Mesh((2, 2), ranks=(3, 1, 0, 2))),
    (6, Mesh((2, 3)), Mesh((6,))),
    (4, Mesh((2, 2)), Mesh((3,), ranks=(2, 0, 1))),
    (4, Mesh((2,), ranks=(1, 3)), Mesh((2, 2))),
    (5, Mesh((3,), ranks=(0, 2, 4)), Mesh((2,), ranks=(1, 3))),
    (5, Mesh((2, 2)), Mesh((3,), ranks=(4, 1, 2))),
]


@pytest.mark.parametrize(("size", "source", "target"), PAIRS)
def test_any_layout_to_any_other_of_another_mesh(size: int, source: Mesh, target: Mesh) -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        rng = random.Random(11)
        for shape in SHAPES * 6:
            whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            given = random_placements(rng, here.shape, shape)
            wanted = random_placements(rng, there.shape, shape)
            tensor = scattered(whole, here, given)
            try:
                result = tensor.redistribute(there, wanted)
                assert result.device_mesh is there
                assert_holds(result, whole)
                back = result.redistribute(here, given)
                assert_holds(back, whole)
            except AssertionError as error:
                raise AssertionError(f"{shape}: {given} -> {wanted}: {error}") from error

    run_on_meshes(size, [source, target], body)


def test_gradients_come_back_to_the_mesh_they_are_for() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        whole = torch.arange(12.0).view(4, 3)
        weights = scattered(torch.arange(12.0).view(4, 3) + 1, there, [Shard(1)])
        leaf = scattered(whole, here, [Shard(0)]).requires_grad_()
        (leaf.redistribute(there, [Shard(1)]) * weights).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.device_mesh is here
        assert_holds(leaf.grad, torch.arange(12.0).view(4, 3) + 1)

    run_on_meshes(5, [Mesh((3,), ranks=(0, 1, 2)), Mesh((3,), ranks=(2, 3, 4))], body)


def test_every_dtype_goes_to_another_mesh() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        for dtype in (torch.bool, torch.int16, torch.uint16, torch.float8_e5m2, torch.complex128):
            whole = torch.arange(12, dtype=torch.float32).remainder(2).view(4, 3).to(dtype)
            local = whole[here.get_local_rank() * 2 :][:2] if here.get_coordinate() else None
            nothing = torch.empty(0, dtype=dtype)
            tensor = DTensor.from_local(
                nothing if local is None else local, here, [Shard(0)], shape=(4, 3)
            )
            moved = tensor.redistribute(there, [Replicate()]).to_local()
            assert moved.dtype == dtype
            assert moved.tolist() == (whole.tolist() if there.get_coordinate() else [])

    run_on_meshes(4, [Mesh((2,), ranks=(0, 1)), Mesh((2,), ranks=(2, 3))], body)


def test_a_rank_of_neither_mesh_may_call_too() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> Any:
        tensor = scattered(torch.arange(4.0), here, [Shard(0)])
        return tensor.redistribute(there, [Shard(0)]).to_local().tolist()

    meshes = [Mesh((2,), ranks=(0, 1)), Mesh((2,), ranks=(1, 0))]
    assert run_on_meshes(3, meshes, body) == [[2, 3], [0, 1], []]


def test_meshes_without_a_group_in_common_are_refused_on_every_rank() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        tensor = scattered(torch.arange(4.0), here, [Shard(0)])
        tensor.redistribute(there, [Shard(0)])

    with pytest.raises(RanksFailed) as failed:
        run_on_meshes(5, [Mesh((2,), ranks=(0, 1)), Mesh((2,), ranks=(2, 3))], body)
    assert sorted(failed.value.errors) == [0, 1, 2, 3]
    for error in failed.value.errors.values():  # the group of all 5 is none that they could use
        assert "no process group of the ranks [0, 1, 2, 3] of both meshes" in str(error)
        assert "within= a mesh of exactly these 4 ranks" in str(error)


def test_a_row_of_a_mesh_is_no_mesh_for_the_other_rows() -> None:
    def body(mesh: DeviceMesh) -> None:
        row = mesh["axis1"]
        tensor = distribute_tensor(torch.arange(4.0), row, [Shard(0)])
        with pytest.raises(PlacementError, match="a part of"):
            tensor.redistribute(mesh, [Shard(0), Replicate()])
        with pytest.raises(PlacementError, match="a part of"):
            tensor.redistribute(mesh["axis0"], [Shard(0)])

    run_on_mesh((2, 2), body)


def test_a_mesh_of_the_same_ranks_in_another_order() -> None:
    def body(mesh: DeviceMesh) -> None:
        flipped = mesh["axis1", "axis0"]
        whole = torch.arange(24.0).view(4, 6)
        tensor = scattered(whole, mesh, [Shard(0), Partial()])
        result = tensor.redistribute(flipped, [Shard(1), Replicate()])
        assert result.device_mesh is flipped
        assert_holds(result, whole)

    run_on_mesh((2, 3), body)


def test_a_gather_there_needs_no_groups_that_others_know_nothing_of() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        here.costs = there.costs = replace(NCCL, ranks_per_host=4, host_link_gb_s=1e-5)
        whole = torch.arange(64.0).view(8, 8)
        tensor = scattered(whole, here, [Shard(0)])
        assert not there.can_group((0, 1))
        assert_holds(tensor.redistribute(there), whole)

    run_on_meshes(8, [Mesh((4,)), Mesh((2, 2), ranks=(4, 5, 6, 7))], body)


def test_what_cannot_be_reduced_is_refused_on_every_rank() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        size = 0 if here.get_coordinate() is None else 4
        local = torch.arange(size)
        tensor = DTensor.from_local(local, here, [Partial("avg")], shape=(4,))
        with pytest.raises(PlacementError, match="floating point"):
            tensor.redistribute(there)

    run_on_meshes(4, [Mesh((2,), ranks=(0, 1)), Mesh((2,), ranks=(2, 3))], body)


@pytest.mark.parametrize("source", [Shard(0), Replicate(), Partial()])
def test_to_the_memory_of_another_device_on_the_same_ranks(source: Placement) -> None:
    def body(mesh: DeviceMesh) -> None:
        other = DeviceMesh("meta", mesh.layout_mesh, groups=mesh.get_all_groups())
        tensor = scattered(torch.arange(8.0).view(4, 2), mesh, [source])
        for target in (Shard(0), Shard(1), Replicate(), Partial()):
            alone = tensor.redistribute(other, [target])
            awaited = tensor.redistribute(other, [target], async_op=True)
            (packed,) = redistribute_many([tensor], other, [target])
            for result in (alone, awaited, packed):
                assert result.device_mesh is other
                assert result.device.type == result.to_local().device.type == "meta"
                assert tuple(result.to_local().shape) == result._spec.local_shape

    run_on_mesh((2,), body)


def test_all_ranks_count_the_same_steps_whatever_groups_they_were_given() -> None:
    store = _c10d.HashStore()

    def body(rank: int, world: Any) -> None:
        root = DeviceMesh("cpu", Mesh((6,)), groups=[world])
        mesh = Mesh((2, 2))
        given: dict[str, Any] = {}
        if rank < 4:
            given["groups"] = axis_groups(_c10d.PrefixStore("axes", store), mesh, rank)
            given["world_group"] = gloo_group(_c10d.PrefixStore("all", store), rank, 4)
        here = DeviceMesh("cpu", mesh, rank=rank, within=root, **given)
        there = DeviceMesh("cpu", Mesh((2,), ranks=(4, 5)), rank=rank, within=root)
        assert here.can_group((0, 1)) == (rank < 4)
        wholes = [torch.arange(8.0).view(4, 2), torch.arange(6.0)]
        tensors = [
            scattered(wholes[0], here, [Partial(), Partial()]),
            scattered(wholes[1], here, [Shard(0), Partial()]),
        ]
        for result, whole in zip(
            redistribute_many(tensors, there, [Shard(0)]), wholes, strict=True
        ):
            assert_holds(result, whole)

    run_ranks(6, body)


def test_what_is_awaited_goes_the_same_way_on_all_ranks() -> None:

    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        small = replace(NCCL, round_bytes=200, direct_bytes=32)
        here.costs = replace(small, ranks_per_host=2, host_link_gb_s=1e-5)
        whole = torch.arange(64.0).view(8, 8)
        tensor = scattered(whole, here, [Shard(0)])
        assert_holds(tensor.redistribute(there, async_op=True), whole)

    run_on_meshes(4, [Mesh((2,)), Mesh((2,), ranks=(2, 3))], body)
