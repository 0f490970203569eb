"""Results of operators that run without data: as torch makes them, and without its compiler."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Replicate, Shard
from dtckpt.dtensor.calls import metas
from dtckpt.dtensor.calls.metas import run_without_data
from dtckpt.dtensor.comm.caches import Cache
from tests.python import run_python

from ..rank_meshes import assert_holds, run_on_mesh, scattered

aten: Any = torch.ops.aten

_MODEL = """
import sys
import torch
import torch.distributed as dist
from torch.nn import functional as F
from dtckpt.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
w = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
b = distribute_tensor(torch.ones(4), mesh, [Replicate()]).requires_grad_()
y = F.relu(F.linear(x * 2 + x, w, b)) @ w
(y.view(-1).mean() + y.t().sum()).backward()
x.uniform_().full_tensor()
print("torch._dynamo" in sys.modules)
"""


def test_first_operators_do_not_import_the_compiler() -> None:
    done = run_python("-c", _MODEL, compiler=False, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr


def _layouts(dtype: torch.dtype) -> list[Tensor]:
    def of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    channels_last = of(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [
        of(),
        of(4),
        of(1),
        of(0),
        of(3, 4),
        of(3, 1),
        of(3, 0),
        of(4, 3).t(),
        of(4).expand(3, 4),
        of(3, 1).expand(3, 4),
        of(3, 8)[:, ::2],
        of(2, 3, 4).transpose(0, 2),
        of(1, 4, 1),
        of(2, 3, 4, 5),
        channels_last,
    ]


_UNARY = (aten.relu, aten.exp, aten.neg, aten.abs, aten.isnan, aten.logical_not, aten.exp_)
_BINARY = (aten.add.Tensor, aten.div.Tensor, aten.lt.Tensor, aten.add_.Tensor)
_DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_results_are_those_of_torch(dtype: torch.dtype) -> None:
    for x in _layouts(dtype):
        for op in (getattr(op, "default", op) for op in _UNARY):
            _assert_same(op, x)
        for number in (1, 2.5):
            _assert_same(aten.add.Tensor, x, number)
            _assert_same(aten.pow.Tensor_Scalar, x, number)
        _assert_same(aten.mean.default, x)
        if x.ndim and (x.is_floating_point() or x.is_complex()):
            _assert_same(aten.mean.dim, x, [-1], True)
            _assert_same(aten._log_softmax.default, x, -1, False)
        for other in _DTYPES[:2]:
            for y in _layouts(other):
                for op in _BINARY:
                    _assert_same(op, x, y)


def test_products_with_an_addend_are_those_of_torch() -> None:
    for dtype in (torch.float32, torch.float64):
        for bias in _layouts(dtype):
            _assert_same(
                aten.addmm.default,
                bias,
                torch.empty(3, 2, device="meta"),
                torch.empty(2, 4, device="meta"),
            )


def test_results_are_found_once_for_all_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counted(op: Any, args: Any, kwargs: Any) -> Any:
        asked.append(op)
        return run_without_data(op, args, kwargs)

    monkeypatch.setattr(metas, "_known", Cache("metas", 64))
    monkeypatch.setattr(metas, "run_without_data", counted)

    def body(mesh: DeviceMesh) -> None:
        layouts = ([Shard(0)], [Shard(1)], [Replicate()])
        for whole in (torch.arange(12).view(4, 3), torch.arange(6).view(2, 3)):
            for x in (scattered(whole, mesh, placements) for placements in layouts):
                assert_holds(x / 2, whole / 2)
                assert_holds(x * 1.5, whole * 1.5)
                assert_holds(x * 3, whole * 3)

    run_on_mesh((1,), body)
    assert len(asked) == 6


def test_results_are_those_of_the_default_dtype() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(12).view(4, 3)
        for placements in ([Shard(0)], [Shard(1)]):
            x = scattered(whole, mesh, placements)
            assert (x / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert_holds(x / 2, whole / 2)
            finally:
                torch.set_default_dtype(torch.float32)

    run_on_mesh((1,), body)


def _assert_same(op: Any, *args: Any) -> None:
    try:
        expected = op(*args)
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            run_without_data(op, args, {})
        return
    found = run_without_data(op, args, {})
    described = [(t.shape, t.stride(), t.dtype, t.device) for t in (found, expected)]
    assert described[0] == described[1], (op, args)
    assert (found is args[0]) == (expected is args[0])
