"""Redistribute against the NumPy oracle, on ranks that are threads."""

# pyright: reportPrivateUsage=false
# Reads `_spec`, as users of torch do.

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtckpt.dtensor import (
    CostModel,
    DeviceMesh,
    DTensor,
    Partial,
    Ragged,
    Replicate,
    Shard,
    redistribute_many,
)
from dtckpt.dtensor.comm import transports
from dtckpt.dtensor.comm.costs import GLOO, NCCL
from dtckpt.dtensor.geometry.placement import REDUCE_OPS, Placement
from dtckpt.dtensor.redistribute import plan_redistribute
from dtckpt.errors import PlacementError
from tests.ranks import RanksFailed

from ..rank_meshes import assert_holds, run_on_mesh, scattered


def random_placements(
    rng: random.Random, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Placements of every kind that fit; Partial ones commute."""
    reduce_op = rng.choice(REDUCE_OPS)
    found: list[Placement] = []
    for _ in mesh_shape:
        kind = rng.choice(["shard", "shard", "replicate", "partial"])
        if kind == "shard" and shape:
            found.append(Shard(rng.randrange(len(shape))))
        else:
            found.append(Partial(reduce_op) if kind == "partial" else Replicate())
    for dim, size in enumerate(shape):
        axes = [axis for axis, p in enumerate(found) if p.is_shard(dim)]
        if axes and rng.random() < 0.3:
            axis = axes.pop(rng.randrange(len(axes)))
            cuts = sorted(rng.randint(0, size) for _ in range(mesh_shape[axis] - 1))
            bounds = [0, *cuts, size]
            found[axis] = Ragged(dim, tuple(b - a for a, b in itertools.pairwise(bounds)))
        if rng.random() < 0.4:
            rng.shuffle(axes)
            for order, axis in enumerate(axes):
                found[axis] = Shard(dim, order)
    return tuple(found)


SHAPES = [(5, 7), (8, 4), (1, 3), (3,), (), (0, 4), (2, 5, 3)]


@pytest.mark.parametrize(
    ("mesh_shape", "costs", "round_bytes"),
    [
        ((4,), GLOO, 16 << 20),
        ((2, 2), GLOO, 16 << 20),
        ((2, 1, 2), GLOO, 64),
        ((4,), NCCL, 16 << 20),
        ((2, 2), NCCL, 64),
        ((2, 2), replace(NCCL, ranks_per_host=2, host_link_gb_s=0.001), 16 << 20),
    ],
)
def test_any_layout_to_any_other(
    mesh_shape: tuple[int, ...],
    costs: CostModel,
    round_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct_bytes = 3 * round_bytes if costs is GLOO else None
    costs = replace(costs, round_bytes=round_bytes, direct_bytes=direct_bytes)
    by_terms = direct_bytes is not None  # else reduce by the backend
    transport = replace(transports.GLOO, costs=costs, exchanges_terms=by_terms)
    monkeypatch.setattr(transports, "GLOO", transport)

    def body(mesh: DeviceMesh) -> int:
        mesh.costs = costs
        rng = random.Random(7)
        moved = 0
        for shape in SHAPES * 10:
            whole = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            source = random_placements(rng, mesh.shape, shape)
            target = random_placements(rng, mesh.shape, shape)
            tensor = scattered(whole, mesh, source)
            before = tensor.to_local().clone()
            result = tensor.redistribute(placements=target)
            try:
                assert_holds(result, whole)
                assert torch.equal(tensor.to_local(), before)
            except AssertionError as error:
                raise AssertionError(f"{shape}: {source} -> {target}: {error}") from error
            moved += result.placements != tensor.placements
        return moved

    assert min(run_on_mesh(mesh_shape, body)) > 40


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
)
def test_every_dtype_moves_and_reduces(dtype: torch.dtype) -> None:
    def body(mesh: DeviceMesh) -> None:
        bits = torch.arange(12, dtype=torch.float32).remainder(2).view(3, 4)
        whole = bits.to(dtype)
        local = whole[: 2 if mesh.get_local_rank() == 0 else 1]
        if mesh.get_local_rank() == 1:
            local = whole[2:]
        tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=(3, 4))
        across = tensor.redistribute(placements=[Shard(1)])
        half = slice(0, 2) if mesh.get_local_rank() == 0 else slice(2, 4)
        assert _same(across.to_local(), whole[:, half])
        assert _same(tensor.full_tensor(), whole)
        term = whole if mesh.get_local_rank() == 0 else torch.zeros_like(whole)
        partial = DTensor.from_local(term, mesh, [Partial()])
        assert _same(partial.full_tensor(), whole)
        assert _same(partial.redistribute(placements=[Shard(1)]).to_local(), whole[:, half])

    run_on_mesh((2,), body)


ALL_DTYPES = sorted(
    {
        found
        for found in vars(torch).values()
        if isinstance(found, torch.dtype) and not str(found).startswith("torch.q")
    },
    key=str,
)
"""But those of quantized tensors, whose scales no layout describes; torch gives them up."""


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
def test_every_dtype_of_torch_moves_alone_together_and_later() -> None:
    def body(mesh: DeviceMesh) -> int:
        for dtype in ALL_DTYPES:
            raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
            bits = raw % 2 if dtype == torch.bool else raw
            whole = bits.view(dtype).view(4, 6)
            here = mesh.get_local_rank()
            rows = DTensor.from_local(whole[2 * here :][:2], mesh, [Shard(0)], shape=(4, 6))
            columns = rows.redistribute(placements=[Shard(1)])
            later = rows.redistribute(placements=[Shard(1)], async_op=True)
            both = redistribute_many([rows, columns], placements=[Replicate()])
            for made in (columns.full_tensor(), later.full_tensor(), *(t.to_local() for t in both)):
                assert made.dtype == dtype
                assert torch.equal(made.contiguous().view(-1).view(torch.uint8), bits)
        return len(ALL_DTYPES)

    assert min(run_on_mesh((2,), body)) > 35


def test_awaited_tensors_may_be_swapped() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(4.0)
        for turned in (False, True):
            awaited = scattered(whole, mesh, [Shard(0)]).redistribute(async_op=True)
            zeros = scattered(whole * 0, mesh, [Shard(0)])
            pair = (zeros, awaited) if turned else (awaited, zeros)
            torch.utils.swap_tensors(*pair)
            assert_holds(zeros, whole)
            assert_holds(awaited, whole * 0)
            assert type(zeros) is type(awaited) is DTensor
            assert (zeros.placements, awaited.placements) == ((Replicate(),), (Shard(0),))

    run_on_mesh((2,), body)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.tolist() == b.tolist()


def test_local_results_share_no_memory() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(8.0).view(4, 2)
        replicated = scattered(whole, mesh, [Replicate()])
        part = replicated.redistribute(placements=[Shard(0)])
        assert part.to_local().untyped_storage().nbytes() == 16
        part.to_local().zero_()
        assert_holds(replicated, whole)
        spread = replicated.redistribute(placements=[Partial("max")])
        spread.to_local().zero_()
        assert_holds(replicated, whole)

    run_on_mesh((2,), body)


def test_simple_transitions_take_one_cheap_step() -> None:
    cases: list[tuple[tuple[Placement, ...], tuple[Placement, ...], str]] = [
        ((Shard(0), Replicate()), (Replicate(), Replicate()), "exchange over 2 ranks"),
        ((Shard(0), Shard(1)), (Shard(0), Shard(0)), "exchange over 2 ranks"),
        ((Shard(0), Shard(1)), (Shard(1), Shard(0)), "exchange over 4 ranks"),
        ((Replicate(), Shard(0)), (Shard(1), Shard(0)), "local slice"),
        ((Partial(), Shard(1)), (Replicate(), Shard(1)), "all-reduce(sum) over 2"),
        ((Partial("max"), Shard(1)), (Shard(0), Shard(1)), "reduce-scatter(max) over 2"),
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), "nothing"),
    ]

    def body(mesh: DeviceMesh) -> list[str]:
        whole = torch.zeros(4, 4)
        plans: list[str] = []
        for source, target, _ in cases:
            tensor = scattered(whole, mesh, source)
            plan = plan_redistribute(tensor._spec, tensor._spec.with_placements(target))
            assert plan is plan_redistribute(tensor._spec, tensor._spec.with_placements(target))
            plans.append(str(plan))
        return plans

    plans = run_on_mesh((2, 2), body)[1]
    for plan, (_, _, expected) in zip(plans, cases, strict=True):
        assert plan.startswith(expected)
        assert ";" not in plan


def test_gradients_come_back_in_the_source_placements() -> None:
    placements: list[Any] = [Shard(0), Shard(1), Replicate(), Partial(), Ragged(0, (1, 4))]

    def body(mesh: DeviceMesh) -> None:
        weights = torch.arange(15.0).view(5, 3)
        for source, target in itertools.product(placements, repeat=2):
            tensor = scattered(torch.ones(5, 3), mesh, [source]).detach().requires_grad_()
            moved = tensor.redistribute(placements=[target])
            scale = scattered(weights, mesh, [Replicate()])
            (moved * scale).sum().backward()
            grad = tensor.grad
            assert grad is not None
            assert_holds(grad, weights)
            expected = Replicate() if source.is_partial() else source
            assert grad._spec.placements == (expected,), (source, target, grad._spec)

    run_on_mesh((2,), body)


def test_dtype_options() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0)]).detach().requires_grad_()
        low = tensor.redistribute(
            placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
        assert low.dtype == torch.bfloat16
        low.sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert_holds(tensor.grad, torch.ones(4, 2))

    run_on_mesh((2,), body)


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0)])
        tensor.redistribute(placements=[Shard(2)])

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((2,), body)
    texts = {str(error) for error in failed.value.errors.values()}
    assert len(failed.value.errors) == 2
    assert len(texts) == 1
    assert "names dim 2" in texts.pop()


def test_reductions_that_do_not_commute_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        with pytest.raises(PlacementError, match="do not commute"):
            DTensor.from_local(torch.ones(2), mesh, [Partial("sum"), Partial("max")])

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("target", [Replicate(), Shard(0)])
def test_not_a_number_survives_maxima(target: Placement) -> None:
    def body(mesh: DeviceMesh) -> None:
        nan = float("nan")
        values = [nan, 1.0] if mesh.get_rank() == 0 else [2.0, nan]
        for op in ("max", "min"):
            tensor = DTensor.from_local(torch.tensor(values), mesh, [Partial(op)])
            assert tensor.redistribute(placements=[target]).full_tensor().isnan().all()

    run_on_mesh((2,), body)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_terms_made_of_strided_values_are_contiguous(op: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        turned = torch.arange(12.0).view(3, 4).t()
        spread = DTensor.from_local(turned, mesh, [Replicate()]).redistribute(
            placements=[Partial(op)]
        )
        assert spread.to_local().is_contiguous()
        assert spread.stride() == (3, 1)
        assert_holds(spread.view(-1), turned.reshape(-1))

    run_on_mesh((2,), body)
