"""Functions of plain tensors over distributed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch import Tensor

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Placement,
    PlacementError,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.experimental import local_map
from tests.dtensor.rank_meshes import assert_holds, run_on_mesh, run_on_meshes, scattered
from tests.processes import run_processes

ROWS, COLUMNS = [Shard(0)], [Shard(1)]


def whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_products_of_parts_are_terms() -> None:
    a, b = whole(5, 7), whole(7, 3, seed=1)

    def body(mesh: DeviceMesh) -> None:
        product = local_map(torch.mm, [Partial()], (COLUMNS, ROWS))
        assert_holds(product(scattered(a, mesh, COLUMNS), scattered(b, mesh, ROWS)), a @ b)

    run_on_mesh((3,), body)


def test_placements_are_counted_by_arguments_or_by_tensors() -> None:
    a, b = whole(4, 6), whole(6, 4, seed=1)

    def product(group: Any, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        terms = torch.mm(x, y) * scale
        dist.all_reduce(terms, group=group)
        return terms

    def body(mesh: DeviceMesh) -> None:
        x, y = scattered(a, mesh, COLUMNS), scattered(b, mesh, ROWS)
        group = mesh.get_group()
        for places in ((COLUMNS, ROWS), (None, COLUMNS, ROWS, None)):
            reduced = local_map(product, [Replicate()], places, device_mesh=mesh)
            assert_holds(reduced(group, x, y, scale=2.0), 2 * (a @ b))
        with pytest.raises(PlacementError, match=r"has 3 entries for 4 arguments, 2 of them tens"):
            local_map(product, [Replicate()], (COLUMNS, ROWS, None))(group, x, y, scale=1.0)
        with pytest.raises(PlacementError, match=r"in_placements\[3\] .* type float"):
            local_map(product, None, (None, None, None, ROWS))(group, x, y, scale=1.0)

    run_on_mesh((2,), body)


def test_results_may_be_several_and_nested() -> None:
    a = whole(7, 4)

    def several(x: Tensor) -> Any:
        return {"rows": x * 2, "more": [x.sum(0), len(x), (None, x.amax(0, keepdim=True))]}

    def body(mesh: DeviceMesh) -> None:
        places = ([Ragged(0)], [Partial()], None, None, ROWS)
        found = local_map(several, places)(scattered(a, mesh, [Ragged(0, (2, 5))]))
        here = mesh.get_local_rank()
        assert found["rows"].placements == (Ragged(0, (2, 5)),)
        assert_holds(found["rows"], a * 2)
        summed, count, (nothing, tops) = found["more"]
        assert_holds(summed, a.sum(0))
        assert (count, nothing) == ((2, 5)[here], None)
        assert_holds(tops, torch.stack([a[:2].amax(0), a[2:].amax(0)]))

    run_on_mesh((2,), body)


def test_arguments_are_redistributed_together_if_asked() -> None:
    a, b = whole(5, 6), whole(6, 4, seed=1)

    def body(mesh: DeviceMesh) -> None:
        x, y = distribute_tensor(a, mesh, ROWS), distribute_tensor(b, mesh, COLUMNS)
        product = local_map(torch.mm, [Partial()], (COLUMNS, ROWS))
        with CommDebugMode() as comm, pytest.raises(PlacementError, match=r"DTensor 0 has place"):
            product(x, y)
        assert comm.get_total_counts() == 0
        moving = local_map(torch.mm, [Partial()], (COLUMNS, ROWS), redistribute_inputs=True)
        with CommDebugMode() as comm:
            found = moving(x, y)
        assert comm.get_total_counts() == 1
        assert_holds(found, a @ b)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("hinted", [False, True])
def test_gradients_come_back_as_they_are_said_to_lie(hinted: bool) -> None:
    a, b = whole(6, 4), whole(4, 5, seed=1)

    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(a, mesh, ROWS).requires_grad_()
        y = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
        grads = (ROWS, [Partial()]) if hinted else None
        found = local_map(torch.mm, ROWS, (ROWS, [Replicate()]), grads)(x, y)
        found.square().sum().backward()
        p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
        (p @ q).square().sum().backward()
        assert isinstance(x.grad, DTensor)
        assert p.grad is not None
        assert q.grad is not None
        assert_holds(x.grad, p.grad)
        assert isinstance(y.grad, DTensor)
        same = torch.allclose(y.grad.full_tensor(), q.grad)
        assert same is hinted

    run_on_mesh((3,), body)


def test_a_decorator_and_calls_without_dtensors() -> None:
    @local_map(out_placements=ROWS, in_placements=(ROWS,))
    def doubled(x: Tensor) -> Tensor:
        """Twice."""
        return x * 2

    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")
    assert type(doubled(torch.ones(2))) is Tensor

    def body(mesh: DeviceMesh) -> None:
        assert_holds(doubled(distribute_tensor(torch.ones(5), mesh, ROWS)), torch.full((5,), 2.0))

    run_on_mesh((2,), body)


def test_dtensors_lie_on_one_mesh_or_results_on_one_that_is_told() -> None:
    def body(first: DeviceMesh, second: DeviceMesh) -> None:
        x, y = (scattered(whole(4, 4), m, [Replicate()] * m.ndim) for m in (first, second))
        add = local_map(torch.add, [Replicate()])
        with pytest.raises(PlacementError, match="or say device_mesh="):
            add(x, y)
        assert_holds(add(x, 1), whole(4, 4) + 1)
        cut = [Shard(0)], [Shard(0), Shard(0)]
        x, y = (scattered(whole(4, 4), m, p) for m, p in zip((first, second), cut, strict=True))
        rows = local_map(torch.add, cut[1], cut, None, second, redistribute_inputs=True)
        for given in (x, x.redistribute()):
            made = rows(given, y)
            assert made.device_mesh is second
            assert_holds(made, 2 * whole(4, 4))

    run_on_meshes(4, [Mesh((4,)), Mesh((2, 2))], body)


def test_ranks_outside_of_the_mesh_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = DTensor.from_local(
            torch.ones(2) if mesh.get_coordinate() else torch.ones(0), mesh, ROWS, shape=(4,)
        )
        negate = local_map(torch.neg, ROWS)
        if mesh.get_coordinate() is None:
            with pytest.raises(PlacementError, match="rank 2 is not in mesh"):
                negate(x)
        else:
            assert_holds(negate(x), -torch.ones(4))

    run_on_meshes(3, [Mesh((2,))], body)


def test_placements_and_results_go_together() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(torch.ones(4), mesh, ROWS)
        with pytest.raises(PlacementError, match="for 1 results, but there are 2"):
            local_map(torch.sort, ROWS)(x)
        with pytest.raises(PlacementError, match="result 0 of type int is no tensor"):
            local_map(len, ROWS)(x)
        with pytest.raises(PlacementError, match="has 1 dims"):
            local_map(torch.neg, [Replicate(), Shard(0)])(x)
        assert local_map(len)(x) == 2
        plain = local_map(torch.neg)(x)
        assert type(plain) is Tensor

    run_on_mesh((2,), body)


def test_torchs_placements_are_taken_and_its_tensors_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        theirs = [torch_tensor.Shard(0)]
        x = distribute_tensor(torch.ones(4), mesh, ROWS)
        found = local_map(torch.neg, theirs, (theirs,))(x)
        assert isinstance(found.placements[0], Placement)
        assert_holds(found, -torch.ones(4))

    run_on_mesh((2,), body)


def test_examples_of_torchs_documentation() -> None:
    run_processes("tests.dtensor.parallel.page_ranks", 2)


def test_results_that_differ_are_found_when_asked_for() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(torch.arange(6.0), mesh, ROWS)
        total = local_map(torch.sum, [Replicate()])
        assert total(x).placements == (Replicate(),), "believed"
        with pytest.raises(PlacementError, match="differ"):
            local_map(torch.sum, [Replicate()], run_check=True)(x)
        same = local_map(torch.zeros_like, [Replicate()], run_check=True)(x)
        assert_holds(same, torch.zeros(3))

    run_on_mesh((2,), body)
