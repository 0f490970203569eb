"""What reductions over parts get wrong when they are done naively, and what they move."""

# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, strict
from dtckpt.errors import PlacementError

from ..rank_meshes import assert_holds, collectives, run_on_mesh, scattered

aten = torch.ops.aten


def test_half_precision_sums_neither_overflow_nor_round_on_the_way() -> None:
    def body(mesh: DeviceMesh) -> None:
        large = torch.tensor([40000.0, 30000.0, -40000.0, -20000.0], dtype=torch.float16)
        x = scattered(large, mesh, [Shard(0)])
        assert x.sum().item() == 10000
        assert x.sum(0, keepdim=True).full_tensor().item() == 10000  # pyright: ignore
        assert x.nansum().item() == 10000
        assert scattered(large.abs(), mesh, [Shard(0)]).mean().item() == 32496
        small = torch.tensor([256.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
        assert (
            scattered(small.float(), mesh, [Shard(0)]).bfloat16().sum().item()
            == small.sum().item()
            == 258
        )
        fine = torch.tensor([300.0, 300.0, 300.0, 304.0], dtype=torch.bfloat16)
        assert (
            scattered(fine.float(), mesh, [Shard(0)]).bfloat16().mean().item() == fine.mean().item()
        )
        thin = torch.tensor([300.0, 300.0, 0.01, 0.01], dtype=torch.float16)
        assert scattered(thin, mesh, [Shard(0)]).prod().item() == 9
        loss = F.mse_loss(x, torch.zeros_like(x))
        assert loss.isinf().item() == F.mse_loss(large, torch.zeros(4).half()).isinf().item()

    run_on_mesh((2,), body)


@pytest.mark.parametrize("size", [8, 1 << 18])  # as terms, and by the backend
def test_averages_of_half_precision_do_not_overflow(size: int) -> None:
    def body(mesh: DeviceMesh) -> None:
        high = torch.full((size,), 60000.0, dtype=torch.float16)
        averaged = DTensor.from_local(high, mesh, [Partial("avg")])
        for placement in (Replicate(), Shard(0)):
            made = averaged.redistribute(placements=[placement])
            assert made.to_local().unique().tolist() == [60000]

    run_on_mesh((4,), body)


def test_terms_are_not_rounded() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.tensor([256.0, 1.0, 1.0, 1.0]), mesh, [Shard(0)])
        total = x.sum()
        assert total.placements == (Partial(),)
        assert total.bfloat16().item() == torch.tensor(259.0).bfloat16().item()
        assert not total.bfloat16().global_layout.is_partial  # pyright: ignore
        assert total.double().placements == (Partial(),)  # pyright: ignore
        top = x.amax()
        assert top.bfloat16().placements == (Partial("max"),)  # pyright: ignore

    run_on_mesh((4,), body)


def test_what_does_not_commute_with_a_reduction_is_done_after_it() -> None:
    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_local_rank(0)
        terms = torch.tensor([100, -1], dtype=torch.int8) if rank == 0 else torch.tensor([100, 0])
        wrapped = DTensor.from_local(terms.to(torch.int8), mesh, [Partial()])
        assert wrapped.sum().item() == -57
        below = DTensor.from_local(terms.to(torch.int8), mesh, [Partial("max")])
        assert below[1:].any().item() is False
        assert below.amax().placements == (Partial("max"),)  # pyright: ignore
        signs = DTensor.from_local(torch.tensor([1.0, -1.0]) * (2 * rank - 1), mesh, [Partial()])
        assert signs.count_nonzero().item() == 0
        assert signs.abs().sum().item() == 0

    run_on_mesh((2,), body)


def test_terms_in_another_dtype() -> None:
    small = torch.tensor([[44, 7], [200, 255]], dtype=torch.uint8)
    halves = torch.tensor([[1.0, 2.0], [-3.0, 4.0]])
    on_small: list[Callable[[Any], Tensor]] = [
        lambda x: x * 1.5,
        lambda x: x / 2,
        lambda x: x + halves.new_ones(()),
        lambda x: x.cumsum(0),
        lambda x: torch.where(x > 50, x, x / 2),
    ]
    on_halves: list[Callable[[Any], Tensor]] = [
        lambda x: x.sum(dtype=torch.int64),
        lambda x: x.sum(0, dtype=torch.int64),
        lambda x: x.cumsum(1, dtype=torch.int64),
    ]

    def body(mesh: DeviceMesh) -> None:
        terms = torch.full_like(small, 200) if mesh.get_local_rank(0) else small - 200
        wrapped = DTensor.from_local(terms, mesh, [Partial()])
        for function in on_small:
            assert_holds(function(wrapped), function(small))
        halved = DTensor.from_local(halves / 2, mesh, [Partial()])
        for function in on_halves:
            assert_holds(function(halved), function(halves))
        factors = halves / 2 if mesh.get_local_rank(0) else torch.full_like(halves, 2)
        product: Any = DTensor.from_local(factors, mesh, [Partial("product")])
        assert_holds(product.prod(0, dtype=torch.int64), torch.tensor([-3, 8]))
        assert product.prod(0).placements == (Partial("product"),)
        top: Any = DTensor.from_local(halves, mesh, [Partial("max")])
        assert_holds(top.to(torch.complex64), halves.to(torch.complex64))
        bytes_of = torch.zeros(3, dtype=torch.uint8)
        for op, mine, whole in (("max", [256, 1], [256, 1]), ("min", [300, -1], [250, -1])):
            other = torch.tensor([5, 1] if op == "max" else [250, 7])
            given = torch.tensor(mine) if mesh.get_local_rank(0) else other
            source: Any = DTensor.from_local(given, mesh, [Partial(op)])
            into: Any = DTensor.from_local(bytes_of, mesh, [Partial(op)])
            expected = bytes_of.slice_scatter(torch.tensor(whole), 0, 0, 2)
            assert_holds(into.slice_scatter(source, 0, 0, 2), expected)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("largest", [True, False])
def test_the_first_of_equals_and_what_is_no_number_are_found_first(largest: bool) -> None:
    nan = float("nan")
    rows = torch.tensor([[1.0, 1, 0, 1], [0, 0, 0, 0], [0, nan, 1, nan], [2, -2, 2, -2]])

    def body(mesh: DeviceMesh) -> None:
        x = scattered(rows, mesh, [Shard(1)])
        kind = torch.max if largest else torch.min
        place = torch.argmax if largest else torch.argmin
        with strict():
            assert_holds(kind(x, 1).indices, kind(rows, 1).indices)
            assert place(x[0]).item() == place(rows[0]).item()
            assert place(x[3:]).item() == place(rows[3:]).item()
            assert place(x).item() == place(rows).item()

    run_on_mesh((3,), body)


def test_dims_that_are_not_there_are_refused_on_every_rank() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 2), mesh, [Shard(0)])
        calls: list[Callable[[], object]] = [
            lambda: torch.argmax(x, 2),
            lambda: x.var(-3),
            lambda: x.softmax(2),
            lambda: torch.logsumexp(x, (0, 5)),
            lambda: x.cumsum(3),
            lambda: torch.linalg.vector_norm(x, dim=4),
        ]
        for call in calls:
            with pytest.raises(IndexError):
                call()

    run_on_mesh((2,), body)


@pytest.mark.parametrize("axes", [(4,), (2, 2)])
def test_reductions_over_a_sharded_dim_do_not_gather_it(axes: tuple[int, ...]) -> None:
    size = 4096
    values = torch.randn(2, size)
    target = torch.tensor([5, size - 1])

    def body(mesh: DeviceMesh) -> None:
        cut = [Shard(1)] * len(axes)
        x = scattered(values, mesh, cut).requires_grad_()
        t = scattered(target, mesh, [Replicate()] * len(axes))
        with strict():
            made = [
                x.var(1), x.std(), x.logsumexp(1), x.argmax(1), x.max(1).values, x.argmin(),
                x.norm(dim=1), x.softmax(1), F.layer_norm(x, (size,)), x.cumsum(1), x.aminmax()[0],
                F.cross_entropy(x, t), F.batch_norm(x.t(), None, None, training=True),
            ]  # fmt: skip
            F.cross_entropy(x, t).backward()
            x.softmax(1).square().sum().backward()
        assert made[7].placements == made[8].placements == made[9].placements  # pyright: ignore

    with collectives(of_all_ranks=True) as seen:
        run_on_mesh(axes, body)
    largest = max(max(c.sent_bytes, c.received_bytes) for c in seen)
    assert 0 < largest <= 8 * values.itemsize * 4


def test_statistics_of_batch_norm_are_those_of_all_ranks() -> None:
    whole = torch.arange(20.0).view(5, 4).square()

    def body(mesh: DeviceMesh) -> None:
        x = scattered(whole, mesh, [Shard(0)])
        stats = [torch.zeros(4), torch.ones(4), torch.zeros(4), torch.ones(4)]
        ours = [scattered(s, mesh, [Replicate()]) for s in stats]
        found = aten.cudnn_batch_norm(x, ours[0], ours[1], ours[2], ours[3], True, 0.1, 1e-5)
        expected = F.batch_norm(whole, stats[2], stats[3], *stats[:2], training=True)
        assert_holds(found[0], expected, rtol=1e-4, atol=1e-4)
        assert_holds(ours[2], stats[2])
        assert_holds(ours[3], stats[3], rtol=1e-4, atol=1e-4)
        grads = aten.cudnn_batch_norm_backward(
            x, x, ours[1], ours[2], ours[3], found[1], found[2], 1e-5, found[3]
        )
        leaf = whole.clone().requires_grad_()
        F.batch_norm(leaf, None, None, torch.ones(4), training=True).backward(whole)
        assert leaf.grad is not None
        assert_holds(grads[0], leaf.grad, rtol=1e-2, atol=1e-2)

    run_on_mesh((4,), body)


def test_results_are_written_to_tensors_of_their_shape_only() -> None:
    whole = torch.tensor([1.0, -2.0, 3.0, 0.0, 2.0])

    def body(mesh: DeviceMesh) -> None:
        x, out = scattered(whole, mesh, [Shard(0)]), scattered(whole, mesh, [Replicate()])
        torch.msort(x, out=out)
        assert_holds(out, whole.msort())
        with pytest.raises(PlacementError, match=r"shape \[5\].*\[2, 5\]"):
            torch.add(x, x, out=scattered(torch.zeros(2, 5), mesh, [Shard(1)]))

    run_on_mesh((2,), body)
