"""Factories: values, layouts, signatures and errors."""

# pyright: reportUnknownLambdaType=false
# One line per call that is refused.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtckpt.dtensor as dt
from dtckpt.dtensor import DeviceMesh, DTensor, Layout, Partial, Ragged, Replicate, Shard, random
from dtckpt.errors import PlacementError

from .rank_meshes import assert_holds, run_on_mesh


def layouts(mesh: DeviceMesh) -> list[Any]:
    """Layouts of a tensor of shape (5, 3): uneven, empty, ragged, replicas, and terms."""
    rest = [Replicate()] * (mesh.ndim - 1)
    found: list[Any] = [None, [Shard(0), *rest], [Shard(-1), *rest], [Shard(0)] * mesh.ndim]
    found.append([Ragged(0, (0,) * (mesh.shape[0] - 1) + (5,)), *rest])
    found += [[Partial(op), *rest] for op in ("sum", "avg", "product", "max", "min")]
    return found


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_constants(shape: tuple[int, ...]) -> None:
    def body(mesh: DeviceMesh) -> None:
        for placements in layouts(mesh):
            given: dict[str, Any] = {"device_mesh": mesh, "placements": placements}
            assert_holds(dt.zeros(5, 3, **given), torch.zeros(5, 3))
            assert_holds(dt.ones((5, 3), **given), torch.ones(5, 3))
            assert_holds(dt.full((5, 3), 2.5, **given), torch.full((5, 3), 2.5))
            made = dt.empty([5, 3], dtype=torch.float64, requires_grad=True, **given)
            assert made.dtype == torch.float64
            assert made.requires_grad
            assert made.is_leaf
            wanted = Layout(
                mesh.layout_mesh, tuple(placements or [Replicate()] * mesh.ndim), (5, 3)
            )
            assert made.global_layout == wanted
        for size in ((), ((),), (0,), (0, 4), (7,), (torch.Size([2, 3]),)):
            made = dt.ones(*size, device_mesh=mesh, dtype=torch.int32)
            assert_holds(made, torch.ones(*(size or ((),)), dtype=torch.int32))  # pyright: ignore[reportArgumentType, reportCallIssue]
        assert dt.full((), True, device_mesh=mesh).dtype == torch.bool
        assert_holds(dt.full(3, 7, device_mesh=mesh), torch.full((3,), 7))
        assert dt.full((2,), 1j, device_mesh=mesh).dtype == torch.complex64
        with mesh:
            assert dt.zeros(4, placements=[Shard(0)] * mesh.ndim).device_mesh is mesh

    run_on_mesh(shape, body)


SEQUENCES: list[Callable[..., torch.Tensor]] = [
    lambda made, **given: made.linspace(-2, 5, 7, **given),
    lambda made, **given: made.linspace(0, 1, 7, dtype=torch.float16, **given),
    lambda made, **given: made.linspace(0, 10, 7, dtype=torch.int64, **given),
    lambda made, **given: made.linspace(1j, 2, 7, **given),
    lambda made, **given: made.linspace(0, 1, 1, requires_grad=True, **given),
    lambda made, **given: made.linspace(0, 1, 0, **given),
    lambda made, **given: made.linspace(torch.tensor(0.5), 3, 7, **given),
    lambda made, **given: made.logspace(-1, 2, 7, **given),
    lambda made, **given: made.logspace(0, 2, 7, 2, dtype=torch.float64, **given),
]


@pytest.mark.parametrize("number", range(len(SEQUENCES)))
def test_sequences_have_the_bits_of_one_device(number: int) -> None:
    call = SEQUENCES[number]
    expected = call(torch)

    def body(mesh: DeviceMesh) -> None:
        for placements in ([Replicate()], [Shard(0)], [Partial()], [Partial("max")]):
            if expected.is_complex() and placements == [Partial("max")]:
                continue
            made: Any = call(dt, device_mesh=mesh, placements=placements)
            assert made.placements == tuple(placements)
            assert (made.dtype, made.requires_grad) == (expected.dtype, expected.requires_grad)
            assert made.full_tensor().equal(expected.detach())

    run_on_mesh((3,), body)


def test_bounds_of_sequences_may_be_distributed() -> None:
    def body(mesh: DeviceMesh) -> None:
        three = DTensor.from_local(torch.tensor(1.5), mesh, [Partial()])
        made = dt.linspace(0, three, 4, device_mesh=mesh, placements=[Shard(0)])
        assert made.full_tensor().tolist() == [0, 1, 2, 3]
        with pytest.raises(PlacementError, match="no dims, got 1"):
            dt.logspace(0, torch.ones(1), 3, device_mesh=mesh)

    run_on_mesh((2,), body)


def test_random_numbers_are_those_of_one_device() -> None:
    def body(mesh: DeviceMesh) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for placements in layouts(mesh):
            random.manual_seed(9, mesh)
            given: dict[str, Any] = {"device_mesh": mesh, "placements": placements}
            made = [
                dt.rand(5, 3, **given),
                dt.randn((5, 3), **given),
                dt.rand(5, 3, dtype=torch.float64, **given),
                dt.randint(-7, 90, (5, 3), dtype=torch.float32, **given),
            ]
            if placements is None or not isinstance(placements[0], Partial):
                made.append(dt.randn(5, 3, dtype=torch.complex64, **given))
            wholes = [m.full_tensor() for m in made]
            found = found or wholes
            for a, b in zip(wholes, found, strict=False):
                torch.testing.assert_close(a, b)
            like = torch.empty(5, 3)
            random.manual_seed(9, mesh)
            in_place: Any = DTensor.from_local(like, mesh).uniform_()
            assert torch.equal(in_place.full_tensor(), found[0])
        assert dt.randn(3, device_mesh=mesh, requires_grad=True).requires_grad
        return found

    wanted: list[torch.Tensor] | None = None
    for shape in ((1,), (3,), (2, 2)):
        for found in run_on_mesh(shape, body):
            wanted = wanted or found
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_integers() -> None:
    def body(mesh: DeviceMesh) -> None:
        made = dt.randint(3, (1000,), device_mesh=mesh, placements=[Shard(0)])
        assert made.dtype == torch.int64
        assert made.full_tensor().unique().tolist() == [0, 1, 2]
        bytes_ = dt.randint(250, 256, 1000, dtype=torch.uint8, device_mesh=mesh).full_tensor()
        assert bytes_.unique().tolist() == list(range(250, 256))

    run_on_mesh((2,), body)


def test_orders_are_those_of_one_device() -> None:
    def body(mesh: DeviceMesh) -> list[list[int]]:
        found: list[list[int]] = []
        rest = [Replicate()] * (mesh.ndim - 1)
        ragged = Ragged(0, (0,) * (mesh.shape[0] - 1) + (50,))
        for placement in (Replicate(), Shard(0), ragged, Partial(), Partial("max")):
            random.manual_seed(9, mesh)
            made = dt.randperm(50, device_mesh=mesh, placements=[placement, *rest])
            assert made.dtype == torch.int64
            found.append(made.full_tensor().tolist())
            found.append(dt.randperm(50, device_mesh=mesh).full_tensor().tolist())
        assert found[0::2] == [found[0]] * 5
        assert found[1::2] == [found[1]] * 5
        assert found[0] != found[1]
        assert sorted(found[0]) == sorted(found[1]) == list(range(50))
        for count in (0, 1):
            few = dt.randperm(count, dtype=torch.float32, device_mesh=mesh)
            assert few.full_tensor().tolist() == [0.0] * count
        return found

    results = [found for shape in ((1,), (3,), (2, 2)) for found in run_on_mesh(shape, body)]
    assert all(found == results[0] for found in results)


def test_orders_are_even() -> None:
    def body(mesh: DeviceMesh) -> list[list[int]]:
        return [dt.randperm(4, device_mesh=mesh).full_tensor().tolist() for _ in range(4800)]

    counts: dict[tuple[int, ...], int] = {}
    for order in run_on_mesh((1,), body)[0]:
        counts[tuple(order)] = counts.get(tuple(order), 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 55  # 23 degrees


REFUSED: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda mesh: dt.zeros(2, device_mesh=mesh, placements=[]), PlacementError, "same length"),
    (lambda mesh: dt.ones(2, device_mesh=mesh, placements=[Shard(1)]), PlacementError, "dim 1"),
    (
        lambda mesh: dt.empty(2, device_mesh=mesh, layout=torch.sparse_coo),
        PlacementError,
        "only torch.strided",
    ),
    (lambda mesh: dt.zeros(-1, device_mesh=mesh), PlacementError, "shape"),
    (lambda mesh: dt.zeros(2.5, device_mesh=mesh), PlacementError, "ints"),  # pyright: ignore[reportArgumentType]
    (lambda mesh: dt.zeros((2,), (3,), device_mesh=mesh), PlacementError, "ints"),
    (lambda mesh: dt.rand(2, dtype=torch.int64, device_mesh=mesh), NotImplementedError, "Long"),
    (lambda mesh: dt.randn(2, dtype=torch.bool, device_mesh=mesh), Exception, "Bool"),
    (lambda _: dt.zeros(2), PlacementError, "no mesh"),
    (lambda mesh: dt.randint(5, 5, (2,), device_mesh=mesh), RuntimeError, "from"),
    (lambda mesh: dt.randint(5, device_mesh=mesh), TypeError, "size"),
    (lambda mesh: dt.randperm(-1, device_mesh=mesh), PlacementError, "shape"),
    (lambda mesh: dt.randperm(300, dtype=torch.uint8, device_mesh=mesh), PlacementError, "wider"),
    (lambda mesh: dt.randperm(2050, dtype=torch.half, device_mesh=mesh), PlacementError, "wider"),
    (lambda mesh: dt.randperm(258, dtype=torch.bfloat16, device_mesh=mesh), PlacementError, "wide"),
    (lambda mesh: dt.randperm(2, dtype=torch.bool, device_mesh=mesh), PlacementError, "bool"),
    (lambda mesh: dt.randperm(2, dtype=torch.cfloat, device_mesh=mesh), PlacementError, "complex"),
]


def test_what_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        for call, kind, text in REFUSED:
            with pytest.raises(kind, match=text):
                call(mesh)

    run_on_mesh((2,), body)
