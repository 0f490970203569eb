"""Calls that once gave wrong values, lost writes, or left ranks waiting for each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
    register_sharding,
)
from dtckpt.errors import PlacementError

from ...ranks import RanksFailed
from ..rank_meshes import assert_holds, run_on_mesh, scattered

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def same_error(shape: tuple[int, ...], body: Any, kind: type[Exception] = PlacementError) -> str:
    """Run ranks that must all raise, and return what they say."""
    with pytest.raises(RanksFailed) as failure:
        run_on_mesh(shape, body)
    errors = failure.value.errors
    size = 1
    for n in shape:
        size *= n
    assert len(errors) == size
    assert {type(error) for error in errors.values()} == {kind}
    return str(next(iter(errors.values())))


def test_products_in_place_reach_a_tensor_that_is_cut_otherwise() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 3)

    def ragged(mesh: DeviceMesh) -> None:
        out = scattered(torch.zeros(4, 3), mesh, [Ragged(0, (1, 3))])
        out.addmm_(scattered(a, mesh, [Shard(0)]), scattered(b, mesh, [Replicate()]))
        torch.testing.assert_close(out.full_tensor(), a @ b)
        assert out.placements == (Ragged(0, (1, 3)),)

    def ordered(mesh: DeviceMesh) -> None:
        out = scattered(torch.zeros(4, 3), mesh, [Shard(0), Shard(0)])
        left = scattered(a, mesh, [Shard(0, 1), Shard(0, 0)])
        out.addmm_(left, scattered(b, mesh, [Replicate()] * 2))
        torch.testing.assert_close(out.full_tensor(), a @ b)

    run_on_mesh((2,), ragged)
    run_on_mesh((2, 2), ordered)


def test_ragged_pieces_that_another_axis_cuts_are_joined_and_split() -> None:
    joined, apart = torch.arange(48.0).view(4, 4, 3), torch.arange(48.0).view(16, 3)

    def body(mesh: DeviceMesh) -> None:
        for placements in ((Shard(0), Ragged(0, (1, 3))), (Ragged(0, (1, 3)), Shard(0))):
            assert_holds(scattered(joined, mesh, placements).reshape(16, 3), apart)
        for placements in ((Shard(0), Ragged(0, (4, 12))), (Ragged(0, (0, 16)), Shard(0))):
            assert_holds(scattered(apart, mesh, placements).reshape(4, 4, 3), joined)
        uneven = scattered(torch.arange(15.0).view(3, 5), mesh, (Ragged(0, (3, 0)), Shard(0)))
        assert_holds(uneven.reshape(5, 3), torch.arange(15.0).view(5, 3))

    run_on_mesh((2, 2), body)


def test_norms_of_lists_of_terms_of_ordered_shards() -> None:
    whole = torch.arange(12.0).view(6, 2)

    def body(mesh: DeviceMesh) -> None:
        terms = scattered(whole, mesh, [Shard(0, 1), Shard(0, 0), Partial()])
        (norm,) = torch.ops.aten._foreach_norm.Scalar([terms])
        assert_holds(norm, torch.linalg.vector_norm(whole))

    run_on_mesh((2, 1, 2), body)


def test_copies_by_another_shape_take_any_strides() -> None:
    whole = torch.arange(12.0).view(3, 4)

    def body(mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Shard(1), Partial()):
            turned = scattered(whole, mesh, [placement]).t()
            assert_holds(torch.view_copy(turned, (2, 6)), whole.t().reshape(2, 6))  # pyright: ignore

    run_on_mesh((2,), body)


def test_numbers_in_groups_of_locals_with_gaps() -> None:
    whole = torch.arange(10.0).view(5, 2)

    def body(mesh: DeviceMesh) -> None:
        here = slice(0, 3) if mesh.get_local_rank(0) == 0 else slice(3, 5)
        local = torch.cat([whole, whole], 1)[here, 1:3].flip(1)  # one rank alone has gaps
        wide = torch.zeros(3, 5)[: local.shape[0], 1:3].copy_(local)
        x: Any = DTensor.from_local(wide if here.start == 0 else local, mesh, [Shard(0)])
        expected = torch.cat([whole, whole], 1)[:, 1:3].flip(1)
        assert_holds(torch.view_as_complex(x), torch.view_as_complex(expected))
        assert_holds(x.view(torch.int64), expected.view(torch.int64))
        assert_holds(x.view(torch.int16), expected.view(torch.int16))

    run_on_mesh((2,), body)


def test_gradients_have_memory_of_their_own() -> None:
    def body(mesh: DeviceMesh) -> None:
        a = scattered(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        c = scattered(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        (a.to_local() + c.to_local()).sum().backward()
        (a * 10).sum().backward()
        assert a.grad is not None
        assert c.grad is not None
        assert a.grad.full_tensor().tolist() == [11.0] * 4  # pyright: ignore
        assert c.grad.full_tensor().tolist() == [1.0] * 4  # pyright: ignore
        c.grad.mul_(2)
        c.to_local().sum().backward()
        assert c.grad.full_tensor().tolist() == [3.0] * 4  # pyright: ignore

    run_on_mesh((2,), body)


def test_a_redistribute_that_changes_nothing_is_a_view_to_autograd() -> None:
    def body(mesh: DeviceMesh) -> None:
        leaf = scattered(torch.full((4,), 2.0), mesh, [Shard(0)]).requires_grad_()
        x = leaf * 1
        same = x.redistribute(placements=[Shard(0)])
        loss = (x * x).sum()
        same.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_on_mesh((2,), body)


def test_half_precision_does_not_overflow_on_the_way() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.full((8,), 300.0, dtype=torch.float16), mesh, [Shard(0)])
        assert torch.linalg.vector_norm(x).item() == 848.5
        many = scattered(torch.ones(300_000, dtype=torch.float16), mesh, [Shard(0)])
        assert many.mean().item() == 1.0

    run_on_mesh((2,), body)


@pytest.mark.parametrize("target", [Replicate(), Shard(0)])
def test_every_dtype_is_reduced_as_on_one_device(target: Any) -> None:
    big = 2**63 + 5
    through = {torch.complex32: torch.complex64, torch.float8_e4m3fn: torch.float32}
    cases: list[tuple[str, Any, torch.dtype, Any]] = [
        ("sum", [1.5 + 2j, 1.5 + 2j], torch.complex32, 3 + 4j),
        ("product", [1 + 1j, 1 + 1j], torch.complex64, 2j),
        ("max", [big, 1], torch.uint64, big),
        ("min", [big, 1], torch.uint64, 1),
        ("sum", [big, 1], torch.uint64, big + 1),
        ("max", [3, 7], torch.uint16, 7),
        ("max", [0.5, 2.0], torch.float8_e4m3fn, 2.0),
        ("sum", [True, True], torch.bool, True),
    ]

    def body(mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for op, terms, dtype, expected in cases:
            local = torch.tensor([terms[coordinate[0]]] * 4, dtype=through.get(dtype, dtype))
            x = DTensor.from_local(local.to(dtype), mesh, [Partial(op)])
            got = x.redistribute(placements=[target]).to_local()
            wide = got.to(torch.complex64) if dtype == torch.complex32 else got
            assert wide[0].item() == expected, (op, dtype, wide)

    run_on_mesh((2,), body)


def test_a_casting_copy_does_not_round_terms() -> None:
    def body(mesh: DeviceMesh) -> None:
        source = DTensor.from_local(torch.tensor([0.5]), mesh, [Partial()])
        target = DTensor.from_local(torch.tensor([0]), mesh, [Partial()])
        target.copy_(source)
        assert target.full_tensor().tolist() == [1]

    run_on_mesh((2,), body)


def test_embedding_gradients_scaled_by_frequency() -> None:
    index = torch.tensor([1, 1, 1, 2])
    weight = torch.ones(5, 1)
    expected = weight.clone().requires_grad_()
    torch.nn.functional.embedding(index, expected, scale_grad_by_freq=True).sum().backward()

    def body(mesh: DeviceMesh) -> None:
        w = scattered(weight, mesh, [Replicate()]).requires_grad_()
        at = scattered(index, mesh, [Shard(0)])
        torch.nn.functional.embedding(at, w, scale_grad_by_freq=True).sum().backward()
        assert w.grad is not None
        assert torch.equal(w.grad.full_tensor(), expected.grad)  # pyright: ignore

    run_on_mesh((2,), body)


def test_decompositions_give_distributed_tensors() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        padded = torch.nn.functional.pad(x, (1, 1))
        assert isinstance(padded, DTensor)
        expected = torch.nn.functional.pad(torch.arange(8.0).view(4, 2), (1, 1))
        assert torch.equal(padded.full_tensor(), expected)

    run_on_mesh((2,), body)


def test_the_default_dtype_is_part_of_what_a_plan_is_for() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.arange(4), mesh, [Shard(0)])
        assert (x / 3).dtype == (x / 3).to_local().dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (x / 3).dtype == (x / 3).to_local().dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    run_on_mesh((1,), body)


def test_a_rule_counts_from_when_it_is_registered() -> None:
    from dtckpt.dtensor.ops.engine.table import RULES

    op = torch.ops.aten.tril.default
    before = RULES.get(op)

    def only_columns(*_: Any) -> Any:
        return [([Shard(1)], [Shard(1), None])]

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 4), mesh, [Shard(1)])
        tril: Any = torch.tril
        _ = tril(x)
        register_sharding(op)(only_columns)
        assert tril(x).placements == (Shard(1),)

    try:
        run_on_mesh((1,), body)
    finally:
        RULES.by_users.discard(op)
        RULES.generation += 1
        if before is None:
            del RULES[op]
        else:
            RULES[op] = before


def test_meta_tensors_beside_the_source_of_the_values() -> None:
    def body(mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        real = coordinate == (0,)
        whole = torch.arange(6.0) if real else torch.empty(6, device="meta")
        x = distribute_tensor(whole, mesh, [Shard(0)])
        assert x.full_tensor().tolist() == [0, 1, 2, 3, 4, 5]

    run_on_mesh((2,), body)


@pytest.mark.parametrize(
    "other", [torch.ones(6, dtype=torch.float64), torch.ones(3), torch.ones(6, 1)]
)
def test_ranks_that_distribute_different_tensors_all_raise(other: torch.Tensor) -> None:
    def body(mesh: DeviceMesh) -> None:
        here = mesh.get_coordinate()
        distribute_tensor(torch.ones(6) if here == (0,) else other, mesh, [Replicate()])

    assert "another shape or dtype" in same_error((2,), body)


def test_torch_stages_our_tensors_for_asynchronous_saves() -> None:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.arange(4.0), mesh, [Shard(0)])
        staged: Any = StateDictStager(pin_memory=False, share_memory=False).stage({"w": x})
        copied: Any = staged["w"]
        x.zero_()
        assert isinstance(copied, DTensor)
        assert copied.full_tensor().tolist() == [0, 1, 2, 3]

    run_on_mesh((2,), body)


def test_shallow_copies() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.arange(4.0), mesh, [Shard(0)])
        y = copy.copy(x)
        y.add_(1)
        assert x.full_tensor().tolist() == [1, 2, 3, 4]

    run_on_mesh((2,), body)


def test_a_pending_sum_of_bools_means_or_everywhere() -> None:
    def body(mesh: DeviceMesh) -> None:
        x: Any = DTensor.from_local(torch.tensor([True, False]), mesh, [Partial("sum")])
        assert x.full_tensor().tolist() == [True, False]
        assert x.float().full_tensor().tolist() == [1, 0]
        ones: Any = DTensor.from_local(torch.ones(2), mesh, [Partial("sum")])
        assert (x + ones).full_tensor().tolist() == [3, 2]
        joined: Any = torch.cat([ones, x])
        assert joined.full_tensor().tolist() == [2, 2, 1, 0]
        assert x.sum().item() == 1

    run_on_mesh((2,), body)


def test_partial_targets_must_commute_with_what_is_pending() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = DTensor.from_local(torch.ones(2), mesh, [Partial("sum"), Replicate()])
        with pytest.raises(PlacementError, match="commute"):
            x.redistribute(placements=[Partial("sum"), Partial("max")])

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("reduce_op", ["max", "min", "product"])
def test_no_operator_makes_what_waits_for_two_reductions(reduce_op: str) -> None:
    one, two = torch.arange(8.0).view(4, 2) + 1, torch.arange(8.0).view(4, 2) * 2 - 7
    where = torch.tensor([[2, 0]])
    picking: list[Callable[[Any], Any]] = [
        lambda x: x[1],
        lambda x: x.gather(0, where),
        lambda x: torch.nn.functional.embedding(where, x),
    ]
    joining: list[Callable[[Any, Any], Any]] = [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.slice_scatter(y[:2], 0, 1, 3),
        lambda x, y: x.scatter(0, where, y),
        lambda x, y: x.index_copy(0, where[0], y[:2]),
        lambda x, y: x.index_put((where[0],), y[:2]),
    ]

    def body(mesh: DeviceMesh) -> None:
        cut = scattered(one, mesh, [Partial(reduce_op), Shard(0)])
        for function in picking:
            assert_holds(function(cut), function(one))
        first = scattered(one, mesh, [Partial("sum"), Replicate()])
        second = scattered(two, mesh, [Replicate(), Partial(reduce_op)])
        for function in joining:
            assert_holds(function(first, second), function(one, two))

    run_on_mesh((2, 2), body)


def test_a_tensor_that_is_no_leaf_on_one_rank_is_refused_on_all() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = torch.ones(4, requires_grad=True)
        distribute_tensor(tensor * 2 if mesh.get_coordinate() == (1,) else tensor, mesh, [Shard(0)])

    assert "has to distribute leaf tensors" in same_error((2,), body)


def test_locals_of_different_dtypes_are_refused_on_all_ranks() -> None:
    def body(mesh: DeviceMesh) -> None:
        dtype = torch.float32 if mesh.get_coordinate() == (0,) else torch.float64
        DTensor.from_local(torch.ones(4, dtype=dtype), mesh, [Replicate()], run_check=True)

    assert "different dtypes" in same_error((2,), body)


def test_ranks_outside_of_the_mesh_are_told_so() -> None:
    outside = DeviceMesh("cpu", [0, 1], rank=5)
    with pytest.raises(PlacementError, match="not in mesh"):
        DTensor.from_local(torch.ones(0), outside, [Shard(0)])
    tensor = DTensor.from_local(torch.ones(0), outside, [Shard(0)], shape=(4,))
    assert tensor.shape == (4,)
    with pytest.raises(PlacementError, match="no values on this rank"):
        tensor.sum().item()
    assert torch.linalg.matrix_exp(tensor.view(2, 2)).shape == (2, 2)
    with pytest.raises(PlacementError, match="depends on values"):
        tensor.nonzero()
