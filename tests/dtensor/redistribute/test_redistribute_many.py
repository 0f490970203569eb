"""Many tensors in few collectives, and results that are waited for later."""

# pyright: reportPrivateUsage=false
# Looks at the class of an awaited tensor.

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    redistribute_many,
)
from dtckpt.dtensor.comm.costs import GLOO
from dtckpt.errors import PlacementError

from ..rank_meshes import assert_holds, collectives, run_on_mesh, run_on_meshes, scattered
from .test_redistribute import SHAPES, random_placements

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.uint8]


def some_tensors(rng: random.Random, mesh: DeviceMesh, count: int) -> list[tuple[Any, Any, Any]]:
    """Whole, tensor and wanted placements."""
    found: list[tuple[Any, Any, Any]] = []
    for _ in range(count):
        shape = rng.choice(SHAPES)
        dtype = rng.choice(DTYPES)
        numel = torch.Size(shape).numel()
        source = random_placements(rng, mesh.shape, shape)
        if any(p.is_partial() for p in source):
            dtype = torch.float64  # terms of others would round
        whole = torch.arange(1, 1 + numel, dtype=torch.float64).to(dtype).view(shape)
        bits = whole.view(torch.int16) if dtype == torch.bfloat16 else whole  # for numpy
        tensor = scattered(bits, mesh, source)
        if bits is not whole:
            local = tensor.to_local().view(torch.bfloat16)
            tensor = DTensor.from_local(local, mesh, source, shape=shape)
        found.append((whole, tensor, random_placements(rng, mesh.shape, shape)))
    return found


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("round_bytes", [48, 16 << 20])
def test_many_are_as_each_alone(mesh_shape: tuple[int, ...], round_bytes: int) -> None:
    def body(mesh: DeviceMesh) -> None:
        mesh.costs = replace(GLOO, round_bytes=round_bytes)
        rng = random.Random(5)
        for _ in range(12):
            cases = some_tensors(rng, mesh, 9)
            results = redistribute_many(
                [t for _, t, _ in cases], placements=[w for _, _, w in cases]
            )
            for (_, tensor, wanted), result in zip(cases, results, strict=True):
                alone = tensor.redistribute(placements=wanted)
                assert result.placements == alone.placements
                assert result.dtype == tensor.dtype
                assert torch.equal(result.to_local(), alone.to_local())
                apart = {result.to_local().data_ptr()} - {0}
                assert tensor.to_local().data_ptr() not in apart

    run_on_mesh(mesh_shape, body)


def test_one_collective_for_all_that_goes_between_the_same_ranks() -> None:
    def body(mesh: DeviceMesh) -> list[str]:
        tensors = [scattered(torch.ones(8, 4, dtype=d), mesh, [Shard(0)]) for d in DTYPES[:2]]
        tensors += [
            scattered(torch.ones(3), mesh, [Shard(0)]),
            scattered(torch.ones(2), mesh, [Partial()]),
        ]
        with collectives() as seen:
            redistribute_many(tensors, placements=[Replicate()])
        return [collective.kind for collective in seen]

    # The sum of the last one is an exchange of its own, of terms.
    assert run_on_mesh((4,), body)[0] == ["all_to_all", "all_to_all"]


def test_gradients_of_many() -> None:
    def body(mesh: DeviceMesh) -> None:
        wholes = [torch.arange(6.0).view(3, 2), torch.arange(4.0), torch.arange(8.0).view(2, 4)]
        leaves = [scattered(w, mesh, [Shard(0)]).requires_grad_() for w in wholes]
        first, second, _ = redistribute_many(leaves, placements=[Replicate()])
        ((first * 2).sum() + (second * second).sum()).backward()
        assert leaves[0].grad is not None
        assert leaves[1].grad is not None
        assert leaves[2].grad is None
        assert_holds(leaves[0].grad, torch.full((3, 2), 2.0))
        assert_holds(leaves[1].grad, 2 * wholes[1])
        assert leaves[0].grad.placements == (Shard(0),)

    run_on_mesh((2,), body)


def test_many_go_to_another_mesh() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        wholes = [torch.arange(6.0).view(3, 2), torch.arange(4), torch.arange(8.0).view(2, 4)]
        tensors = [scattered(w, here, [Shard(0)]) for w in wholes]
        for result, whole in zip(redistribute_many(tensors, there), wholes, strict=True):
            assert_holds(result, whole)

    run_on_meshes(5, [Mesh((3,), ranks=(0, 2, 4)), Mesh((2,), ranks=(1, 3))], body)


def test_many_refuses_alike_before_anything_moves() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensors = [scattered(torch.ones(4), mesh, [Shard(0)])] * 2
        with pytest.raises(PlacementError, match="names dim 3"):
            redistribute_many(tensors, placements=[[Replicate()], [Shard(3)]])
        plain: Any = torch.ones(4)
        with pytest.raises(PlacementError, match="takes DTensors of dtckpt, got Tensor"):
            redistribute_many([plain], placements=[Replicate()])
        with pytest.raises(PlacementError, match="as many placements"):
            redistribute_many(tensors, placements=[[Replicate()]])
        assert redistribute_many([]) == []

    run_on_mesh((2,), body)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_awaited_results_are_as_others(mesh_shape: tuple[int, ...]) -> None:
    def body(mesh: DeviceMesh) -> int:
        rng = random.Random(6)
        num_awaited = 0
        for _ in range(60):
            shape = rng.choice(SHAPES)
            whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            tensor = scattered(whole, mesh, random_placements(rng, mesh.shape, shape))
            wanted = random_placements(rng, mesh.shape, shape)
            result = tensor.redistribute(placements=wanted, async_op=True)
            num_awaited += type(result) is not DTensor
            double = result + result if rng.random() < 0.5 else torch.add(tensor, result)
            assert type(result) is DTensor
            assert type(double) is DTensor
            assert_holds(result, whole)
            assert_holds(double, whole + whole)
        return num_awaited

    assert min(run_on_mesh(mesh_shape, body)) > 20


def test_awaited_results_have_gradients_and_may_be_dropped() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(8.0).view(4, 2)
        leaf = scattered(whole, mesh, [Shard(0)]).requires_grad_()
        results = [leaf.redistribute(placements=[Shard(1)], async_op=True) for _ in range(3)]
        del results[1]
        (results[0] * 3).sum().backward()
        assert leaf.grad is not None
        assert_holds(leaf.grad, torch.full((4, 2), 3.0))
        late = results[1].detach()
        assert_holds(late, whole)
        assert type(results[1]) is DTensor

    run_on_mesh((2,), body)


def test_awaited_results_in_lists_and_as_local_tensors() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(8.0).view(4, 2)
        tensor = scattered(whole, mesh, [Shard(0)])

        def later() -> DTensor:
            return tensor.redistribute(placements=[Shard(1)], async_op=True)

        assert_holds(torch.cat([later(), later()]), torch.cat([whole, whole]))
        assert tuple(later().to_local().shape) == (4, 1)
        assert later().shape == whole.shape
        for summed in torch.ops.aten._foreach_add.Scalar([later(), later()], 1.0):
            assert_holds(summed, whole + 1)
        mine = later()
        mine += 1
        assert_holds(mine, whole + 1)
        assert torch.equal(later().full_tensor(), whole)
        assert "AwaitedDTensor" not in repr(later())

    run_on_mesh((2,), body)


def test_tensors_with_terms_and_others_go_to_another_mesh_together() -> None:
    def body(here: DeviceMesh, there: DeviceMesh) -> None:
        wholes = [torch.arange(8.0).view(4, 2), torch.arange(6.0) + 5]
        tensors = [scattered(wholes[0], here, [Partial()]), scattered(wholes[1], here, [Shard(0)])]
        for result, whole in zip(redistribute_many(tensors, there), wholes, strict=True):
            assert_holds(result, whole)

    run_on_meshes(4, [Mesh((2,), ranks=(0, 1)), Mesh((2,), ranks=(2, 3))], body)


def test_only_results_of_what_needs_gradients_have_them() -> None:
    def body(mesh: DeviceMesh) -> None:
        plain = scattered(torch.arange(4.0), mesh, [Shard(0)])
        leaf = plain.clone().requires_grad_()
        results = redistribute_many([plain, leaf, plain])
        assert [result.requires_grad for result in results] == [False, True, False]

    run_on_mesh((2,), body)


@pytest.mark.parametrize("target", [Replicate(), Shard(0)])
def test_a_tensor_may_be_written_before_its_awaited_result_is_needed(target: Placement) -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(32.0).view(8, 4)
        for source in (Shard(0), Shard(1), Partial(), Replicate()):
            tensor = scattered(whole, mesh, [source])
            result = tensor.redistribute(placements=[target], async_op=True)
            tensor.zero_()
            assert_holds(result, 0 * whole if source == target else whole)

    run_on_mesh((2,), body)


def test_data_that_an_awaited_result_is_given_stays() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(8.0).view(4, 2)
        tensor = scattered(whole, mesh, [Shard(0)])
        result = tensor.redistribute(placements=[Shard(1)], async_op=True)
        result.data = tensor + 1
        assert type(result) is DTensor
        assert_holds(result, whole + 1)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("begins_inside", [True, False])
def test_awaited_results_and_inference_mode(dtype: torch.dtype, begins_inside: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        local = torch.full((4, 1), 1.0 + mesh.get_local_rank()).to(dtype)
        tensor = DTensor.from_local(local, mesh, [Shard(1)], shape=(4, 2))
        with torch.inference_mode(begins_inside):
            result = tensor.redistribute(async_op=True)
        with torch.inference_mode(not begins_inside):
            assert result.to_local().tolist() == [[1, 2]] * 4
        assert result.to_local().is_inference() == begins_inside

    run_on_mesh((2,), body)


def test_several_threads_may_wait_for_one_result() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(32.0).view(8, 4)
        tensor = scattered(whole, mesh, [Shard(1)])
        for _ in range(20):
            result = tensor.redistribute(async_op=True)
            gate = threading.Barrier(4)

            def read(_: int, result: DTensor = result, gate: threading.Barrier = gate) -> Any:
                gate.wait()
                more: Any = result + 1
                return more.to_local()

            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(read, range(4)))
            assert all(torch.equal(local, whole + 1) for local in found)
            assert type(result) is DTensor

    run_on_mesh((2,), body)
