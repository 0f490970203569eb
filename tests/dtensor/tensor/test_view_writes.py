"""Views and writes: every write reaches what shares the memory on one device, or is refused."""

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
)
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.errors import PlacementError, UnsupportedOp

from ..rank_meshes import assert_holds, run_on_mesh, scattered

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

foreach_add: Any = vars(torch)["_foreach_add_"]  # has no public name


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
    cut = [Shard(1), Shard(1)]

    def body(mesh: DeviceMesh) -> None:
        for name, args in (("squeeze_", (1,)), ("as_strided_", ((2, 3), (1, 2), 1))):
            x, whole = scattered(torch.ones(4, 1, 6), mesh, cut), torch.ones(4, 1, 6)
            other, expected = x.permute(2, 0, 1), whole.permute(2, 0, 1)
            for tensor in (x, whole):
                getattr(tensor, name)(*args)
                tensor.add_(1).mul_(3)
            assert_holds(x, whole)
            assert_holds(other, expected)
            for tensor in (other, expected):
                tensor.add_(1)
            for tensor in (x, whole):
                tensor.add_(1)
            assert_holds(x, whole)
            assert_holds(other, expected)

    run_on_mesh((2, 2), body)


def test_changes_of_storage_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 6), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOp, match="storage"):
            x.resize_(2, 3)
        assert x.full_tensor().shape == (4, 6)

    run_on_mesh((2,), body)


def test_views_that_were_redistributed_follow_the_tensor() -> None:
    """All ranks run an operator, which copies the values anew; ``to_local`` may be one rank's."""

    def body(mesh: DeviceMesh) -> None:
        x, whole = scattered(torch.zeros(2, 4), mesh, [Shard(1)]), torch.zeros(2, 4)
        view, flat = x.view(-1), whole.view(-1)
        for tensor in (x, whole):
            tensor[:, 0].add_(1)
        part = view[:3]
        assert type(copy.deepcopy(view)) is type(view + 1) is DTensor
        assert_holds(part + 1, flat[:3] + 1)
        for tensor in (x, whole):
            tensor.add_(1)
        for stale in (view, part):
            with pytest.raises(PlacementError, match="written since; view it again"):
                stale.to_local()
        assert_holds(part * 2, flat[:3] * 2)
        assert torch.equal(view.full_tensor(), flat)
        assert_holds(view, flat)

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
                    view.to_local()
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


def test_deep_copies_of_copied_views_are_not_tied_to_the_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.zeros(2, 4), mesh, [Shard(1)])
        flat = x.view(-1)
        deep, shallow = copy.deepcopy(flat), copy.copy(flat)
        torch.add(deep, 1, out=deep)
        assert_holds(x, torch.zeros(2, 4))
        shallow.add_(1)
        assert_holds(x, torch.ones(2, 4))
        flat.data = scattered(torch.ones(3), mesh, [Shard(0)])
        flat.add_(1)
        assert_holds(flat, torch.full((3,), 2.0))
        x.add_(1)
        assert_holds(x, torch.full((2, 4), 2.0))
        assert torch.equal(shallow.full_tensor(), torch.full((8,), 2.0))

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


def test_rows_of_sharded_parameters_are_initialised() -> None:
    def body(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            module = torch.nn.Embedding(5, 3, padding_idx=1)
        fully_shard(module, mesh=mesh)
        module.to_empty(device="cpu")
        module.reset_parameters()
        weight: Any = module.weight
        assert not weight.full_tensor()[1].any()
        with torch.no_grad():
            weight.fill_(2)
        weight.data[1].zero_()  # as transformers does it
        torch.nn.init.constant_(weight.data[3], 4)
        with torch.no_grad():
            weight[4] += 1
            weight[0].copy_(torch.arange(3.0))
        rows = torch.tensor([[0.0, 1, 2], [0] * 3, [2] * 3, [4] * 3, [3] * 3])
        assert_holds(weight.detach(), rows)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            weight[2].zero_()

    run_on_mesh((2,), body)


def test_data_is_written_past_autograd_and_seen_by_views() -> None:
    def body(mesh: DeviceMesh) -> None:
        x, whole = scattered(torch.ones(2, 4), mesh, [Shard(1)]), torch.ones(2, 4)
        data, flat = x.data, x.view(-1)
        data.add_(1)
        assert_holds(flat + 0, whole.view(-1) + 1)
        flat.data[2:].mul_(3)
        expected = torch.tensor([[2.0, 2, 6, 6], [6] * 4])
        assert_holds(x, expected)
        x.data = scattered(whole * 5, mesh, [Shard(0)])
        x.add_(1)
        flat.zero_()  # of the memory that x had
        assert_holds(x, whole * 6)
        assert_holds(data, whole * 0)
        leaf = scattered(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        loss = (leaf * leaf).sum()
        leaf.data.mul_(3)
        loss.backward()  # as torch: what is written through data is not noticed
        assert_holds(leaf.grad, torch.full((4,), 6.0))

    run_on_mesh((2,), body)
