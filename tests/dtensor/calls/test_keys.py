"""Keys of calls: equal where the calls may share what was found out, and nowhere else."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from itertools import combinations
from typing import Any

import pytest
import torch

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard, register_sharding
from dtckpt.dtensor.calls import planning
from dtckpt.dtensor.calls.binding import Bound, bind
from dtckpt.dtensor.calls.call import Call
from dtckpt.dtensor.calls.keys import Key, key_of
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.dtensor.ops.engine.table import RULES

from ..rank_meshes import assert_holds, run_on_mesh, scattered

aten = torch.ops.aten

_make_plan = planning._make_plan


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
            (aten.norm.Scalar, x, True),
            (aten.norm.Scalar, x, 0.0),
            (aten.norm.Scalar, x, -0.0),
            (aten.norm.Scalar, x, 0),
            (aten.norm.Scalar, x, False),
            (aten.constant_pad_nd.default, x, [1, 1], 0.0),
            (aten.constant_pad_nd.default, x, [1, 1], -0.0),
            (aten.constant_pad_nd.default, x, [1, 1], 0),
            (aten.floor_divide.default, x, 2),
            (aten.floor_divide.default, x, 2.0),
            (aten.floor_divide.default, x, True),
            (aten.native_layer_norm.default, x, [4], None, None, 1e-5),
            (aten.native_layer_norm.default, x, [4, 4], None, None, 1e-5),
            (aten.native_dropout.default, x, 0.0, True),
            (aten.native_dropout.default, x, -0.0, True),
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


def test_numbers_that_are_not_equal_to_themselves_have_one_key() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 4), mesh, [Shard(0)])
        first, second = float("nan"), float("inf") * 0
        op = aten.constant_pad_nd.default
        assert key(op, x, [1, 1], first) == key(op, x, [1, 1], second)
        assert key(op, x, [1, 1], complex(0.0, -0.0)) != key(op, x, [1, 1], 0j)

    run_on_mesh((1,), body)


def test_numbers_that_no_rule_reads_count_by_their_type() -> None:
    def body(mesh: DeviceMesh) -> None:
        x, y = (scattered(torch.ones(4, 4), mesh, [p]) for p in (Shard(0), Replicate()))
        calls: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
            (aten.floor_divide.default, (x, 2), (x, 3)),
            (aten.native_layer_norm.default, (x, [4], None, None, 1e-5), (x, [4], None, None, 0.1)),
            (
                aten.native_group_norm.default,
                (x, None, None, 4, 4, 1, 2, 1e-5),
                (x, None, None, 4, 4, 1, 2, 0.1),
            ),
            (aten.huber_loss.default, (x, y, 1, 1.0), (x, y, 1, 0.5)),
            (aten.index_fill.int_Scalar, (x, 0, y, 1.0), (x, 0, y, -0.0)),
            (aten.full_like.default, (x, 1), (x, 7)),
        ]
        for op, left, right in calls:
            assert key(op, *left) == key(op, *right)
        for names in ({"alpha": 2.0}, {"beta": 0.5}):
            other = {name: value + 1 for name, value in names.items()}
            assert key(aten.addmm.default, x, x, y, **names) == key(
                aten.addmm.default, x, x, y, **other
            )
            whole = {name: int(value) for name, value in other.items()}
            assert key(aten.addmm.default, x, x, y, **names) != key(
                aten.addmm.default, x, x, y, **whole
            )

    run_on_mesh((2,), body)


def test_rules_of_users_know_all_numbers() -> None:
    op = aten.hardshrink.default
    seen: list[Any] = []

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 4), mesh, [Shard(0)])
        assert key(op, x, 0.5) == key(op, x, 0.25)

        @register_sharding(op)
        def rule(tensor: Any, lambd: Any = 0.5) -> Any:
            del tensor
            seen.append(lambd)
            return [([Shard(0)], [Shard(0), None])]

        try:
            assert key(op, x, 0.5) != key(op, x, 0.25)
            for number in (0.5, 0.25, 2.0, 0.5):
                assert_holds(op(x, number), op(torch.ones(4, 4), number))
        finally:
            RULES.pop(op)
            RULES.by_users.discard(op)
            for call in RULES.on_change:
                call()

    run_on_mesh((1,), body)
    assert [number for number in seen if number in (0.5, 0.25, 2.0)] == [0.5, 0.25, 2.0]


def test_a_warm_call_with_another_number_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def counted(bound: Bound) -> Any:
        planned.append(bound.call.op)
        return _make_plan(bound)

    monkeypatch.setattr(planning, "_make_plan", counted)

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.arange(16).view(4, 4), mesh, [Shard(0)])
        f, w = x.to(torch.float32), scattered(torch.ones(4, 4), mesh, [Replicate()])
        whole, ones = torch.arange(16.0).view(4, 4), torch.ones(4, 4)
        runs: list[Any] = [
            lambda x, f, w, n: x // n,  # pyright: ignore
            lambda x, f, w, n: torch.addmm(w, f, w, alpha=n, beta=n),  # pyright: ignore
            lambda x, f, w, n: torch.nn.functional.layer_norm(f, (4,), eps=n / 7),  # pyright: ignore
            lambda x, f, w, n: torch.nn.functional.smooth_l1_loss(f, w, beta=n / 7),  # pyright: ignore
            lambda x, f, w, n: f.index_fill(1, torch.tensor([0]), n),  # pyright: ignore
        ]
        for run in runs:
            for number in (2, 3, 5, 2.5, 0.75):
                if number == 3:
                    planned.clear()
                elif number == 2.5:
                    assert planned == []
                torch.testing.assert_close(
                    run(x, f, w, number).full_tensor(), run(whole.long(), whole, ones, number)
                )

    run_on_mesh((1,), body)


@pytest.mark.parametrize("first", [2, 2.0, True])
@pytest.mark.parametrize("second", [2, 2.0, True])
@pytest.mark.parametrize("name", ["floor_divide", "add", "pow", "remainder", "true_divide", "//"])
def test_numbers_of_another_type_give_results_of_theirs(name: str, first: Any, second: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        run = operator.floordiv if name == "//" else getattr(torch, name)
        for dtype in (torch.int32, torch.float32, torch.uint8):
            whole = torch.arange(12).view(3, 4).to(dtype)
            x = scattered(whole, mesh, [Shard(0)])
            for number in (first, second, first):
                try:
                    expected = run(whole, number)
                except RuntimeError as error:
                    with pytest.raises(type(error)):
                        run(x, number)
                    continue
                found = run(x, number)
                assert_holds(found, expected)
                assert torch.equal(found.full_tensor(), expected)

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
