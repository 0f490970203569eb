"""What must not spoil random numbers: modes, transforms, threads, many parameters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtckpt.dtensor import DeviceMesh, Replicate, randint, randn, random, randperm
from dtckpt.dtensor import torch_private as private
from dtckpt.dtensor.mesh.spec import spec_of
from dtckpt.dtensor.random import kept, samplers
from dtckpt.dtensor.random.draws import draws_of
from dtckpt.dtensor.random.filling import drawer


def one_rank() -> DeviceMesh:
    return DeviceMesh("cpu", [0], rank=0)


def numbers(mesh: DeviceMesh, bound: int) -> list[list[float]]:
    """What a few draws give, those whose plans are kept among them."""
    random.manual_seed(1, mesh)
    made = [
        randint(bound, (4,), device_mesh=mesh),
        randn(4, device_mesh=mesh).log_normal_(),
        randn(5, 3, device_mesh=mesh, dtype=torch.float64).cauchy_(),
        randperm(6, device_mesh=mesh),
        torch.poisson(torch.full_like(randn(7, device_mesh=mesh), 9.0)),
    ]
    return [tensor.to_local().flatten().tolist() for tensor in made]  # pyright: ignore[reportAttributeAccessIssue]


def forget_all() -> None:
    """Let go of what earlier tests have made, as at the start of a process."""
    for function in (kept.constant,):
        function.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    kept._kept.__init__()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def afresh() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("permissive", [False, True])
def test_a_fake_mode_leaves_nothing_behind(permissive: bool) -> None:
    mesh = one_rank()
    with FakeTensorMode(allow_non_fake_inputs=permissive):
        random.manual_seed(1, mesh)
        fakes = [
            randint(777, (4,), device_mesh=mesh),
            randn(4, device_mesh=mesh).log_normal_(),
            randn(5, 3, device_mesh=mesh, dtype=torch.float64).cauchy_(),
            randperm(6, device_mesh=mesh),
        ]
    assert all(private.has_no_values(fake.to_local()) for fake in fakes)  # pyright: ignore[reportAttributeAccessIssue]
    assert random.get_rng_state(mesh)["offset"] == 0, "what has no values draws none"
    found = numbers(mesh, 777)
    assert found[0] == [575, 537, 215, 54]
    assert found == numbers(one_rank(), 777)


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_a_transform_leaves_nothing_behind(transform: Callable[..., Callable[..., Tensor]]) -> None:
    mesh, out = one_rank(), torch.empty(4)
    draw = drawer(spec_of(mesh, (Replicate(),), (4,), None, torch.float32), samplers.cauchy())

    def within(x: Tensor) -> Tensor:
        draw(torch.empty(4))
        return (x * 2).sum()

    with suppress(RuntimeError):  # torch refuses writes to what a transform has not made
        transform(within)(torch.ones(3))
    random.manual_seed(1, mesh)
    draw(out)
    random.manual_seed(1, fresh := one_rank())
    again = torch.empty(4)
    drawer(spec_of(fresh, (Replicate(),), (4,), None, torch.float32), samplers.cauchy())(again)
    assert torch.equal(out, again)
    assert numbers(mesh, 777)[0] == [575, 537, 215, 54]


@pytest.mark.usefixtures("afresh")
def test_inference_leaves_nothing_behind() -> None:
    mesh = one_rank()
    with torch.inference_mode():
        first = numbers(mesh, 777)
    assert numbers(mesh, 777) == first == numbers(one_rank(), 777)


def test_constants_are_bounded() -> None:
    mesh = one_rank()
    for bound in range(1000, 2200):
        randint(bound, (4,), device_mesh=mesh)
    info = kept.constant.cache_info()  # pyright: ignore[reportFunctionMemberAccess]
    assert info.currsize <= info.maxsize == 1024


def test_without_a_way_out_of_modes_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = numbers(one_rank(), 777)
    monkeypatch.setattr(private, "_OUTSIDE", (None,))
    monkeypatch.setattr(kept, "_kept", kept._KeptScratch())  # pyright: ignore[reportPrivateUsage]
    made: list[int] = []

    @kept.kept(4)
    def table(size: int) -> Tensor:
        made.append(size)
        return torch.ones(size)

    assert table(3).shape == table(3).shape == (3,)
    assert made == [3, 3]
    assert numbers(one_rank(), 777) == wanted
    assert not kept._kept.by_shape  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("size", [1024, 2048])
def test_threads_on_one_mesh_draw_numbers_of_the_stream(size: int) -> None:
    mesh, count = one_rank(), 100
    draw = drawer(spec_of(mesh, (Replicate(),), (size,), None, torch.float32), samplers.normal())
    draws = draws_of(mesh)

    def drawn() -> bytes:
        draw(out := torch.empty(size))
        return out.numpy().tobytes()

    draws.restart(1, 0)
    stream = [drawn() for _ in range(2 * count)]
    draws.restart(1, 0)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.extend([drawn() for _ in range(count)]))
        for _ in range(2)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(found) == sorted(stream), "every draw once, and none of no draw"
