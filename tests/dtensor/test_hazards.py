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
from dtckpt.errors import PlacementError, UnsupportedOp

from ..ranks import RanksFailed
from .rank_meshes import assert_holds, run_on_mesh, scattered

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

foreach_add: Any = vars(torch)["_foreach_add_"]  # has no public name


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


@pytest.mark.parametrize("dim", [0, 1])
def test_writes_to_views_arrive_or_are_refused(dim: int) -> None:
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.diagonal(),
        lambda x: x.as_strided((2, 2), (4, 1)),
        lambda x: x.unfold(0, 2, 2),
        lambda x: x.view(torch.int32),
        lambda x: x.T.diagonal(0),
        lambda x: x.view(-1),
    ]

    def body(mesh: DeviceMesh) -> None:
        for view in views:
            whole = torch.ones(4, 4)
            x = scattered(whole, mesh, [Shard(dim)])
            before = whole.clone()
            refused = False
            try:
                view(x).zero_()
            except PlacementError:
                refused = True
            view(whole).zero_()
            assert torch.equal(x.full_tensor(), before if refused else whole)

    run_on_mesh((2,), body)


def test_a_view_that_had_to_be_copied_is_not_written() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = DTensor.from_local(torch.zeros(4, 6)[:, :3], mesh, [Replicate()])
        with pytest.raises(PlacementError, match="would not reach"):
            x.view(-1).add_(1)
        y = DTensor.from_local(torch.zeros(4, 3), mesh, [Replicate()])
        y.view(-1).add_(1)
        assert y.sum().item() == 12

    run_on_mesh((1,), body)


def test_ragged_pieces_that_another_axis_cuts_are_joined_and_split() -> None:
    joined, apart = torch.arange(48.0).view(4, 4, 3), torch.arange(48.0).view(16, 3)

    def body(mesh: DeviceMesh) -> None:
        for placements in ((Shard(0), Ragged(0, (1, 3))), (Ragged(0, (1, 3)), Shard(0))):
            assert_holds(scattered(joined, mesh, placements).reshape(16, 3), apart)
        for placements in ((Shard(0), Ragged(0, (4, 12))), (Ragged(0, (0, 16)), Shard(0))):
            assert_holds(scattered(apart, mesh, placements).reshape(4, 4, 3), joined)

    run_on_mesh((2, 2), body)


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


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_shapes_changed_in_place(placement: Any) -> None:
    whole = torch.arange(24.0).view(4, 6)

    def body(mesh: DeviceMesh) -> None:
        x = scattered(whole, mesh, [placement])
        other = x.view_as(x)
        same = x.t_().unsqueeze_(0).transpose_(0, 1).squeeze_(1)
        assert same is x
        assert x.shape == (6, 4)
        assert x.stride() == (1, 6)
        assert_holds(x, whole.t())
        x.mul_(2)
        assert_holds(other, whole * 2)

    run_on_mesh((2,), body)


def test_writes_after_a_shape_change_that_moves_the_tensor_reach_other_views() -> None:
    def body(mesh: DeviceMesh) -> None:
        for name, args in (("squeeze_", (1,)), ("as_strided_", ((2, 3), (1, 2), 1))):
            x, whole = scattered(torch.ones(4, 1, 6), mesh, [Shard(1)]), torch.ones(4, 1, 6)
            other, expected = x.permute(2, 0, 1), whole.permute(2, 0, 1)
            for tensor in (x, whole):
                getattr(tensor, name)(*args)
                tensor.add_(1).mul_(3)
            assert_holds(x, whole)
            assert_holds(other, expected)
            other.add_(1)
            with pytest.raises(PlacementError, match="written since"):
                x.add_(1)

    run_on_mesh((2,), body)


def test_changes_of_storage_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 6), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOp, match="storage"):
            x.resize_(2, 3)
        assert x.full_tensor().shape == (4, 6)

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
    from dtckpt.dtensor.rules.table import RULES

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


def test_views_that_were_redistributed_are_neither_written_nor_read_when_stale() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.zeros(2, 4), mesh, [Shard(1)])
        view = x.view(-1)
        with pytest.raises(PlacementError, match="would not reach"):
            x[:, 0].add_(1)
        part = view[:3]
        assert type(copy.deepcopy(view)) is type(view + 1) is DTensor
        assert_holds(part + 1, torch.ones(3))
        x.add_(1)
        for read in (lambda: view + 1, view.full_tensor, view.to_local, lambda: part * 2):
            with pytest.raises(PlacementError, match="written since; view it again"):
                read()
        assert_holds(x.view(-1), torch.ones(8))

    run_on_mesh((2,), body)


def test_all_ways_of_writing_are_noticed_by_copied_views_and_by_autograd() -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    writes: list[Callable[[Any], Any]] = [
        lambda x: foreach_add([x], 1),
        lambda x: vars(torch)["_foreach_zero_"]([x]),
        lambda x: vars(torch)["_fused_sgd_"]([x], [x.clone()], [], **settings, **flags),
        lambda x: x.to_local().add_(1),
    ]

    def body(mesh: DeviceMesh) -> None:
        for _ in range(2):
            for write in writes:
                x = scattered(torch.ones(2, 4), mesh, [Shard(1)])
                view = x.view(-1)
                assert_holds(view.detach() + 1, torch.full((8,), 2.0))
                write(x)
                with pytest.raises(PlacementError, match="written since"):
                    view.detach().add(1)
        leaf = scattered(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        y = leaf * 1
        loss = (y * y).sum()
        with torch.no_grad():
            foreach_add([y], 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_on_mesh((2,), body)


def test_a_written_tensor_changes_its_shape_in_place() -> None:
    def body(mesh: DeviceMesh) -> None:
        for _ in range(2):
            x = scattered(torch.arange(4.0).view(1, 4), mesh, [Shard(0)])
            x.add_(1).squeeze_(0).mul_(2)
            assert_holds(x, torch.arange(1.0, 5) * 2)

    run_on_mesh((2,), body)


def test_copies_of_copied_views_are_not_tied_to_the_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.zeros(2, 4), mesh, [Shard(1)])
        flat = x.view(-1)
        deep, shallow = copy.deepcopy(flat), copy.copy(flat)
        torch.add(deep, 1, out=deep)
        assert_holds(x, torch.zeros(2, 4))
        with pytest.raises(PlacementError, match="would not reach"):
            shallow.add_(1)
        flat.data = scattered(torch.ones(3), mesh, [Shard(0)])
        flat.add_(1)
        assert_holds(flat, torch.full((3,), 2.0))
        assert_holds(x, torch.zeros(2, 4))
        x.add_(1)
        with pytest.raises(PlacementError, match="written since"):
            shallow.add(1)

    run_on_mesh((2,), body)


def test_parts_are_computed_with_in_place() -> None:
    """The part is written, and then assigned to its own place."""

    def body(mesh: DeviceMesh) -> None:
        x, whole = scattered(torch.ones(6, 3), mesh, [Shard(0)]), torch.ones(6, 3)
        for tensor in (x, whole):
            tensor[0:5:2, -1] -= 3
            tensor[:, 1] *= 2
        assert_holds(x, whole)

    run_on_mesh((2,), body)


def test_ranks_without_elements_view_them_as_complex() -> None:
    def body(mesh: DeviceMesh) -> None:
        x, whole = scattered(torch.ones(1, 6), mesh, [Shard(0)]), torch.ones(1, 6)
        for tensor in (x, whole):
            torch.view_as_complex(tensor[:, 2:4]).mul_(2)
        assert_holds(x, whole)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_places_in_memory_are_those_of_the_tensor(placement: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(30.0).view(6, 5)
        part = scattered(whole, mesh, [placement])[:, 3:]
        assert_holds(part.as_strided((6,), (5,)), whole[:, 3].clone())
        with pytest.raises(PlacementError, match="not all its own"):
            part.as_strided((3, 2), (2, 2))
        column = scattered(whole[:, :1], mesh, [placement]).expand(6, 5)
        assert_holds(column.as_strided((3, 2), (2, 1)), whole[:, 0].clone().view(3, 2))

    run_on_mesh((2,), body)


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_views_start_at_no_rank_s_own_offset(placement: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        x, whole = scattered(torch.zeros(8, 4), mesh, [placement]), torch.zeros(8, 4)
        for _ in range(2):
            part, rest = x.split(4)[1], whole.split(4)[1]
            assert part.storage_offset() == x[2:].storage_offset() == 0
            if placement.is_replicate():
                part.fill_diagonal_(7)
                rest.fill_diagonal_(7)
            assert_holds(x, whole)

    run_on_mesh((2,), body)


def test_writes_to_pieces_of_ragged_ones() -> None:
    def body(mesh: DeviceMesh) -> None:
        places = [Shard(0), Ragged(0, (2, 1))]
        x, whole = scattered(torch.ones(3, 5), mesh, places), torch.ones(3, 5)
        x.copy_(scattered(whole * 3, mesh, places)).add_(scattered(whole, mesh, [Shard(1)] * 2))
        assert_holds(x, whole * 4)
        assert x.placements == (Shard(0), Ragged(0, (2, 1)))

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()])
def test_writes_to_views_that_were_redistributed_reach_the_tensor(placement: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(25.0).view(5, 5)
        x = scattered(whole, mesh, [placement])
        for tensor in (x, whole):
            flat = tensor.view(-1)
            flat.add_(1).mul_(2)
            flat.sub_(flat)
            tensor.diagonal().fill_(4)
            tensor.diagonal(1).add_(7)
            flat = tensor.view(25)
            torch.add(flat, 1, out=flat)
        assert x.placements == (placement,)
        assert_holds(x, whole)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_gradients_of_writes_to_views_that_were_redistributed(placement: Any) -> None:
    whole = torch.randn(5, 5)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.view(-1).mul_(3)
        y.diagonal().mul_(x.diagonal())
        y = y.sum(1, keepdim=True)
        y.squeeze_(1).mul_(3)
        return (y * y).sum()

    def body(mesh: DeviceMesh) -> None:
        x = scattered(whole, mesh, [placement]).requires_grad_()
        same = whole.clone().requires_grad_()
        for tensor in (x, same):
            loss(tensor).backward()
        assert same.grad is not None
        assert_holds(x.grad, same.grad, atol=1e-3, rtol=1e-4)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_out_tensors_that_torch_reshapes_while_it_writes(placement: Any) -> None:
    a, b, c = torch.randn(3, 5, 5), torch.randn(1, 5, 5), torch.randn(3, 7)

    def body(mesh: DeviceMesh) -> None:
        def check(run: Any, *given: torch.Tensor, out: torch.Tensor) -> None:
            at = [placement if placement.is_replicate() or out.ndim > 1 else Shard(0)]
            result = scattered(out, mesh, at)
            run(*(scattered(g, mesh, [Replicate()]) for g in given), out=result)
            assert_holds(result, run(*given))

        check(torch.kron, b[0], c, out=torch.zeros(15, 35))
        check(torch.matmul, a, b, out=torch.zeros(3, 5, 5))
        check(torch.matmul, a[0, 0], b[0], out=torch.zeros(5))
        check(torch.linalg.solve, b[0], a[0, 0], out=torch.zeros(5))

    run_on_mesh((2,), body)


@pytest.mark.parametrize("placement", [Partial(), Partial("max"), Shard(0)])
def test_writes_that_need_other_placements_reach_earlier_views(placement: Any) -> None:
    """The values go back to where the tensor lies; it would leave its views if it moved."""

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.arange(6.0).view(3, 2), mesh, [placement])
        view, base = x.t(), x
        base.add_(1).cumsum_(0).clamp_(max=9)
        expected = (torch.arange(6.0).view(3, 2) + 1).cumsum(0).clamp(max=9)
        assert base.placements == (placement,)
        assert_holds(base, expected)
        assert_holds(view, expected.t())
        view.sub_(2)
        assert_holds(base, expected - 2)
        foreach_add([x, scattered(torch.ones(2), mesh, [Shard(0)])], 2)
        assert_holds(view, expected.t())

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

    assert "takes leaf tensors" in same_error((2,), body)


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
