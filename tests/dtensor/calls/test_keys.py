"""Keys of calls: equal where the calls may share what was found out, and nowhere else."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard
from dtckpt.dtensor.calls.binding import bind
from dtckpt.dtensor.calls.call import Call
from dtckpt.dtensor.calls.keys import Key, key_of
from dtckpt.dtensor.dtensor import DTensor

from ..rank_meshes import run_on_mesh, scattered

aten = torch.ops.aten


def key(op: Any, *args: Any, **kwargs: Any) -> Key:
    return key_of(DTensor, op, args, kwargs)[0]


def test_calls_that_differ_have_other_keys() -> None:
    def body(mesh: DeviceMesh) -> None:
        x, r, p = (
            scattered(torch.ones(4, 4), mesh, [m]) for m in (Shard(0), Replicate(), Partial())
        )
        narrow = scattered(torch.ones(4, 4, dtype=torch.float64), mesh, [Shard(0)])
        calls = [
            (aten.neg.default, x),
            (aten.neg.default, r),
            (aten.neg.default, p),
            (aten.neg.default, narrow),
            (aten.exp.default, x),
            (aten.add.Tensor, x, r),
            (aten.add.Tensor, r, x),
            (aten.add.Tensor, x, 1),
            (aten.add.Tensor, x, 1.0),
            (aten.add.Tensor, x, True),
            (aten.norm.Scalar, x, 1),
            (aten.norm.Scalar, x, 2),
            (aten.norm.Scalar, x, 1.0),
            (aten.sum.dim_IntList, x, [0]),
            (aten.sum.dim_IntList, x, [1]),
            (aten.sum.dim_IntList, x, [0], True),
            (aten.sum.dim_IntList, x, None),
            (aten.index.Tensor, x, [None, r]),
            (aten.index.Tensor, x, [r, None]),
            (aten.index.Tensor, x, [r]),
            (aten._foreach_add.List, [x], [r]),
            (aten._foreach_add.List, [x, x], [r, r]),
            (aten._foreach_add.ScalarList, [x, x], [1, 2.0]),
            (aten._foreach_add.ScalarList, [x, x], [1.0, 2]),
        ]
        for left, right in combinations(calls, 2):
            assert key(*left) != key(*right)
        assert key(aten.sum.default, x, dtype=torch.int64) != key(aten.sum.default, x)
        assert key(aten.add.Tensor, x, r, alpha=2) != key(aten.add.Tensor, x, r, alpha=2.0)

    run_on_mesh((2,), body)


def test_values_do_not_count_where_elements_are_alone() -> None:
    def body(mesh: DeviceMesh) -> None:
        x, y = (scattered(torch.full((4, 4), v), mesh, [Shard(0)]) for v in (1.0, 2.0))
        assert key(aten.add.Tensor, x, 1.5) == key(aten.add.Tensor, y, 2.5)
        assert key(aten.add.Tensor, x, y, alpha=2) == key(aten.add.Tensor, y, x, alpha=3)
        numbers = [0.5, 1.0]
        assert key(aten._foreach_mul.ScalarList, [x, y], numbers) == key(
            aten._foreach_mul.ScalarList, [y, x], numbers[::-1]
        )

    run_on_mesh((2,), body)


def test_the_default_dtype_counts() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4), mesh, [Shard(0)])
        before = key(aten.div.Tensor, x, 2)
        torch.set_default_dtype(torch.float64)
        try:
            assert key(aten.div.Tensor, x, 2) != before
        finally:
            torch.set_default_dtype(torch.float32)

    run_on_mesh((1,), body)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten._foreach_add.List, aten.index.Tensor])
def test_plans_and_quick_calls_have_one_key(op: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        x, y = (scattered(torch.ones(4, dtype=torch.int64), mesh, [Replicate()]) for _ in range(2))
        args: tuple[Any, ...] = (x, y)
        if op is not aten.add.Tensor:
            args = (x, [y]) if op is aten.index.Tensor else ([x, y], [y, x])
        call = Call(DTensor, op, args, {})
        assert bind(call).key == key(op, *args)
        plain = torch.zeros(4, dtype=torch.int64)
        if op is aten.add.Tensor:
            assert bind(Call(DTensor, op, (x, plain), {})).key != key(op, *args)

    run_on_mesh((1,), body)
