"""Calls of kinds that were seen before: they do what the first call did, and only then."""

# pyright: reportPrivateUsage=false
# Reads the private constructor and `_spec`.

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard
from dtckpt.dtensor.calls.fastest import direct
from dtckpt.dtensor.comm.caches import BoundedDict
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.dtensor.mesh.spec import spec_of
from dtckpt.dtensor.tensor import wrapper as wrappers

from ..rank_meshes import assert_holds, run_on_mesh, scattered

aten = torch.ops.aten


def test_calls_are_told_apart() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(12.0).view(4, 3)
        for _ in range(3):
            x = scattered(whole, mesh, [Shard(0)])
            assert_holds(x + 1, whole + 1)
            assert_holds(x + True, whole + True)
            assert_holds(x.to(torch.int64) + 1.5, whole.to(torch.int64) + 1.5)
            assert_holds(x.to(torch.int64) + 1, whole.to(torch.int64) + 1)
            assert_holds(x.unsqueeze(0), whole.unsqueeze(0))
            assert_holds(x.unsqueeze(1), whole.unsqueeze(1))
            assert_holds(x.sum(0), whole.sum(0))
            assert_holds(x.sum(0, keepdim=True), whole.sum(0, keepdim=True))
            assert_holds(x.clamp(1, 4), whole.clamp(1, 4))
            assert_holds(x.clamp(None, 4), whole.clamp(None, 4))
            assert_holds(x.view(-1), whole.view(-1))
            assert_holds(x.view(2, -1), whole.view(2, -1))
            assert_holds(x + scattered(whole, mesh, [Replicate()]), whole + whole)
            assert_holds(torch.add(x, x, alpha=2), whole * 3)

    run_on_mesh((2,), body)


def test_tensors_in_lists_count_by_what_they_are() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole, rows = torch.arange(12.0).view(4, 3), torch.tensor([2, 0])
        x, index = (scattered(t, mesh, [Replicate()]) for t in (whole, rows))
        for _ in range(3):
            found = aten.index.Tensor(x, [None, index])
            assert type(found.to_local()) is Tensor
            assert_holds(found, whole[:, rows])

    run_on_mesh((2,), body)


def test_views_in_name_only_are_written_every_time() -> None:
    def body(mesh: DeviceMesh) -> None:
        for _ in range(3):
            x = scattered(torch.zeros(4, 2), mesh, [Shard(0)])
            x.t()[0].add_(1)
            assert_holds(x, torch.tensor([[1.0, 0.0]] * 4))
            x[1].add_(3)
            torch._foreach_add_([x, x[1]], 3)  # pyright: ignore[reportPrivateImportUsage]
            expected = torch.tensor([[4.0, 3.0]] * 4)
            expected[1] += 6
            assert_holds(x, expected)

    run_on_mesh((2,), body)


def test_default_dtype_is_part_of_a_kind() -> None:
    def body(mesh: DeviceMesh) -> list[torch.dtype]:
        x = scattered(torch.arange(4), mesh, [Shard(0)])
        return [(x / 2).dtype for _ in range(2)]

    try:
        assert run_on_mesh((1,), body) == [[torch.float32] * 2]
        torch.set_default_dtype(torch.float64)
        assert run_on_mesh((1,), body) == [[torch.float64] * 2]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_numbers_for_lists_are_exact(dtype: torch.dtype) -> None:
    def body(mesh: DeviceMesh) -> None:
        wholes = [torch.linspace(-3, 7, 40).to(dtype), torch.linspace(1, 2, 9).to(dtype)]
        ours = [scattered(whole, mesh, [Shard(0)]) for whole in wholes]
        for _ in range(2):
            for name in ("add_", "mul_", "div_"):
                for number in (0.3, 3, [0.7, 0.7], [0.1, 7]):
                    run = getattr(torch, f"_foreach_{name}")
                    run(wholes, number)
                    run(ours, number)
        for mine, whole in zip(ours, wholes, strict=True):
            assert_holds(mine, whole, rtol=0, atol=0)

    run_on_mesh((2,), body)


@pytest.mark.parametrize(
    "number", [1j, [1j, 1j], 0.0, [0.0, -0.0], [-0.0, -0.0], [2.0, 2.0], float("nan"), 1e300]
)
@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_unusual_numbers_for_lists_are_exact_too(name: str, number: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        wholes = [torch.tensor([-3.0, 0.0, 7.0]), torch.tensor([1.0, -0.0])]
        ours = [scattered(whole, mesh, [Shard(0)]) for whole in wholes]
        run = getattr(torch, f"_foreach_{name}")
        for _ in range(3):
            for mine, whole in zip(run(ours, number), run(wholes, number), strict=True):
                assert_holds(mine, whole, rtol=0, atol=0, equal_nan=True)
                if not whole.is_complex():  # zeros are equal whatever their sign
                    assert_holds(mine.signbit(), whole.signbit())

    run_on_mesh((2,), body)


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_equal_numbers_are_told_from_others(name: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        wholes = [[torch.linspace(1, k + 2, 7), torch.linspace(2, k + 3, 3)] for k in range(3)]
        ours = [[scattered(whole, mesh, [Shard(0)]) for whole in given] for given in wholes]
        for numbers in ([0.3, 0.3], [0.1, 0.7], [0.3, 0.3], [0.0, -0.0], [5, 5]):
            for suffix in ("", "_"):
                run = getattr(torch, f"_foreach_{name}{suffix}")
                made, expected = run(*ours, numbers), run(*wholes, numbers)
                for mine, whole in zip(made or ours[0], expected or wholes[0], strict=True):
                    assert_holds(mine, whole, rtol=0, atol=0)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("make", [wrappers.make_publicly, wrappers.new_wrapper])
def test_both_constructors_make_the_same(make: object) -> None:
    def body(mesh: DeviceMesh) -> None:
        like = scattered(torch.arange(6.0).view(3, 2).t(), mesh, [Shard(1)])
        made = make(DTensor, like._local_tensor, like._spec, False)  # pyright: ignore
        assert type(made) is DTensor
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
        assert made.device == like.device
        assert not made.requires_grad
        assert made._local_tensor is like._local_tensor
        assert made._spec is like._spec
        assert_holds(made + made, like.full_tensor() * 2)
        number = torch.complex(like._local_tensor, like._local_tensor).conj()
        for local in (number, number.imag):  # by a bit, and at an offset, in place of values
            spec = spec_of(mesh, like.placements, like.shape, None, local.dtype)
            lazy = make(DTensor, local, spec, False)  # pyright: ignore
            assert (lazy.is_conj(), lazy.is_neg()) == (local.is_conj(), local.is_neg())
            assert lazy.storage_offset() == 0
            doubled: Any = lazy + lazy
            assert torch.equal(doubled._local_tensor, local + local)

    run_on_mesh((2,), body)


def test_direct_callables_are_the_operator() -> None:
    x = torch.ones(2, 2)
    assert direct(aten.mm.default, (x, x)) is Tensor.mm
    for op, args in ((aten.add.Scalar, (x, 1.0)), (aten.max.dim, (x, 1))):
        found = direct(op, args)
        assert found not in (Tensor.add, Tensor.max, torch.add, torch.max)
        assert type(found(*args)) is type(op(*args))


def test_partial_terms_are_not_taken_for_whole() -> None:
    def body(mesh: DeviceMesh) -> None:
        for placement in (Replicate(), Partial(), Replicate(), Partial()):
            x = scattered(torch.ones(3), mesh, [placement])
            assert_holds(x + 1, torch.full((3,), 2.0))
            assert_holds(x * x, torch.ones(3))

    run_on_mesh((2,), body)


def test_memory_may_be_written_while_it_is_written() -> None:
    memory: BoundedDict[Any, str] = BoundedDict(4)

    class Key:
        """Does what a signal handler or a finalizer may: another call in the midst of one."""

        def __hash__(self) -> int:
            if memory.get(0) is None:
                memory.put(0, "within")
            return 1

    thread = threading.Thread(target=memory.put, args=(Key(), "around"), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert sorted(memory.values()) == ["around", "within"]


def test_memory_is_bounded() -> None:
    memory: BoundedDict[int, int] = BoundedDict(4)
    for number in range(100):
        memory.put(number, number)
        assert len(memory) <= 4
    assert memory[99] == 99
