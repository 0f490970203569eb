"""The class itself: ways in and out, copies and refusals."""

# pyright: reportPrivateUsage=false
# Reads `_spec`, as users of torch do.

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.errors import PlacementError
from tests.ranks import RanksFailed

from .rank_meshes import assert_holds, run_on_mesh, scattered


def test_from_local_sums_the_sizes_of_uneven_parts() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(10.0).view(5, 2)
        rank = mesh.get_rank()
        part = whole[2 * rank : 2 * rank + 2]
        tensor = DTensor.from_local(part, mesh, [Shard(0)])
        assert_holds(tensor, whole)
        assert tensor.to_local().data_ptr() == part.data_ptr() or part.numel() == 0
        column = part.t().contiguous().t()
        assert DTensor.from_local(column, mesh, [Shard(0)]).stride() == (1, 5)
        assert DTensor.from_local(column, mesh, [Shard(0)], shape=(5, 2)).stride() == (2, 1)
        given = DTensor.from_local(column, mesh, [Shard(0)], shape=(5, 2), stride=(1, 5))
        assert given.stride() == (1, 5)

    run_on_mesh((3,), body)


@pytest.mark.parametrize(
    ("rows", "kwargs", "message"),
    [
        ((1, 2, 3), {}, "Ragged"),
        ((2, 2, 2), {"placements": [Shard(0), Shard(0)]}, "must have the same length"),
        ((2, 2, 2), {"placements": [Shard(1, 1)]}, "orders 0 to 0"),
        ((2, 2, 2), {"shape": (7, 2)}, "local shapes do not fit"),
        ((2, 2, 1), {"placements": [Replicate()], "run_check": True}, "local shapes do not fit"),
    ],
)
def test_from_local_refuses_what_does_not_fit_on_every_rank(
    rows: tuple[int, ...], kwargs: dict[str, Any], message: str
) -> None:
    def body(mesh: DeviceMesh) -> None:
        local = torch.zeros(rows[mesh.get_rank()], 2)
        arguments: dict[str, Any] = {"placements": [Shard(0)], **kwargs}
        DTensor.from_local(local, mesh, **arguments)

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((3,), body)
    assert len(failed.value.errors) == 3
    for error in failed.value.errors.values():
        assert isinstance(error, PlacementError)
        assert message in str(error)


def test_run_check_gives_replicas_the_values_of_the_first_rank() -> None:
    def body(mesh: DeviceMesh) -> None:
        row, column = mesh.get_coordinate() or (0, 0)
        local = torch.full((3,), float(10 * row + column), requires_grad=True)
        made = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=True)
        assert made.to_local().tolist() == local.tolist() == [float(10 * row)] * 3
        made.sum().backward()
        assert local.grad is not None
        local = torch.full((3,), float(10 * row + column))
        made = DTensor.from_local(local, mesh, [Replicate(), Replicate()], run_check=True)
        assert made.to_local().tolist() == [0.0] * 3
        partial = DTensor.from_local(torch.full((1,), float(row)), mesh, [Partial(), Shard(0)])
        assert partial.full_tensor().tolist() == [1.0, 1.0]

    run_on_mesh((2, 2), body)


def differing(mesh: DeviceMesh, of_first: torch.Tensor, of_others: torch.Tensor) -> torch.Tensor:
    return of_first if mesh.get_rank() == 0 else of_others


@pytest.mark.parametrize(
    ("of_first", "of_others"),
    [
        (torch.zeros(4, 4), torch.ones(4, 4).t()),
        (torch.zeros(4, 4), torch.ones(4, 4, requires_grad=True)),
        (torch.zeros(4, 4), TwoTensor(torch.ones(4, 4), torch.ones(4, 4))),
        (torch.zeros(4, 4), torch.ones(4, 4, dtype=torch.float64)),
        (torch.zeros(4, 4), torch.ones(4, 3)),
    ],
    ids=["strides", "requires_grad", "class", "dtype", "shape"],
)
def test_run_check_refuses_locals_that_differ_in_more_than_values(
    of_first: torch.Tensor, of_others: torch.Tensor
) -> None:
    before = of_others.detach().clone()

    def body(mesh: DeviceMesh) -> None:
        local = differing(mesh, of_first, of_others)
        with pytest.raises(ValueError, match=r"differ|do not fit"):
            DTensor.from_local(local, mesh, [Replicate()], run_check=True)

    run_on_mesh((2,), body)
    assert of_others.equal(before)


def test_ragged_parts() -> None:
    def body(mesh: DeviceMesh) -> None:
        sizes = (1, 0, 4)
        local = torch.full((sizes[mesh.get_rank()], 2), float(mesh.get_rank()))
        tensor = DTensor.from_local(local, mesh, [Ragged(0, sizes)])
        assert tensor.full_tensor()[:, 0].tolist() == [0, 2, 2, 2, 2]

    run_on_mesh((3,), body)


@pytest.mark.parametrize("source", [0, 1, None])
def test_distribute_tensor(source: int | None) -> None:
    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        is_source = source is None or mesh.get_coordinate() == (source, source)
        whole = torch.arange(15.0).view(5, 3)
        mine = whole.clone() if is_source else torch.full_like(whole, -1)
        for placements in [
            (Shard(0), Shard(1)),
            (Shard(0, 1), Shard(0, 0)),
            (Replicate(), Replicate()),
            (Partial(), Shard(0)),
        ]:
            mine.requires_grad_(True)
            tensor = distribute_tensor(mine, mesh, placements, src_data_rank=source)
            assert tensor.requires_grad
            assert_holds(tensor.detach(), whole)
            tensor._local_tensor.detach().zero_()
            mine.requires_grad_(False)
            assert mine[0, 1].item() == (1 if is_source else -1), rank

    run_on_mesh((2, 2), body)


def test_distribute_tensor_refuses() -> None:
    def body(mesh: DeviceMesh) -> None:
        leaf = torch.ones(4, requires_grad=True)
        with pytest.raises(PlacementError, match="leaf"):
            distribute_tensor(leaf * 2, mesh)
        with pytest.raises(PlacementError, match="src_data_rank=2"):
            distribute_tensor(leaf, mesh, src_data_rank=2)
        tensor = distribute_tensor(leaf, mesh, [Shard(0)])
        assert distribute_tensor(tensor, mesh, [Shard(0)]) is tensor
        with pytest.raises(PlacementError, match="which redistribute does"):
            distribute_tensor(tensor, mesh, [Replicate()])
        with mesh:
            assert distribute_tensor(torch.ones(2)).device_mesh is mesh
        with pytest.raises(PlacementError, match="with mesh:"):
            distribute_tensor(torch.ones(2))

    run_on_mesh((2,), body)


def test_distribute_tensor_compares_what_ranks_pass_before_anything_else() -> None:
    def body(mesh: DeviceMesh) -> None:
        here = mesh.get_local_rank()
        deep = torch.ones(*[1] * 16, 2 + here)
        for mine in (torch.ones([4] * (2 - here)), torch.ones(4 + here, 4), deep):
            with pytest.raises(PlacementError, match="another shape"):
                distribute_tensor(mine, mesh, [Shard(1)])
        with pytest.raises(PlacementError, match="another shape"):
            distribute_tensor(torch.ones(4 + here), mesh, [Ragged(0, (1, 3))])
        with pytest.raises(PlacementError, match="placements"):
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(here)])
        with pytest.raises(PlacementError, match="placements"):
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(3 * here)])
        assert distribute_tensor(torch.ones(deep.ndim), mesh, [Shard(0)]).sum().item() == deep.ndim

    run_on_mesh((2,), body)


def test_a_given_shape_that_is_wrong_on_one_rank_is_told_to_all_where_they_compare() -> None:
    def body(mesh: DeviceMesh) -> str:
        here = mesh.get_rank()
        local = torch.ones(2 + here, 3)
        if here == 0:
            DTensor.from_local(local, mesh, [Shard(0)], shape=(4, 3))
        else:
            with pytest.raises(PlacementError, match=r"Only this rank knows.*run_check=True"):
                DTensor.from_local(local, mesh, [Shard(0)], shape=(4, 3))
        with pytest.raises(PlacementError) as met:
            DTensor.from_local(local, mesh, [Shard(0)], shape=(4, 3), run_check=True)
        return str(met.value)

    texts = run_on_mesh((2,), body)
    assert texts[0] == texts[1]
    assert "got (3, 3) at (1,)" in texts[0]


def test_what_is_no_tensor_of_one_rank_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        nested: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(PlacementError, match="got the DTensor"):
            DTensor.from_local(nested, mesh, [Shard(0)])
        numbers: Any = [1, 2]
        with pytest.raises(PlacementError, match=r"takes a torch\.Tensor, got list"):
            DTensor.from_local(numbers, mesh)
        with pytest.raises(PlacementError, match=r"takes a torch\.Tensor, got list"):
            distribute_tensor(numbers, mesh)

    run_on_mesh((1,), body)


def test_a_rank_outside_of_the_mesh_has_no_values() -> None:
    mesh = DeviceMesh("cpu", [0, 1], rank=2)
    tensor = distribute_tensor(torch.ones(4), mesh)
    assert tensor.full_tensor().shape == (0,)
    for read in (tensor.tolist, tensor.numpy):
        with pytest.raises(PlacementError, match="rank 2, which is not in mesh"):
            read()


def test_gradients_through_local_tensors() -> None:
    def body(mesh: DeviceMesh) -> None:
        local = torch.ones(2, 3, requires_grad=True)
        tensor = DTensor.from_local(local, mesh, [Shard(0)])
        assert tensor.requires_grad
        weights = scattered(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
        (tensor * weights).full_tensor().sum().backward()
        assert local.grad is not None
        assert torch.equal(local.grad, weights.to_local())
        partial = torch.ones(2, requires_grad=True)
        DTensor.from_local(partial, mesh, [Partial()]).full_tensor().sum().backward()
        assert partial.grad is not None
        assert partial.grad.tolist() == [1, 1]
        leaf = scattered(torch.ones(4), mesh, [Replicate()]).detach().requires_grad_()
        part = leaf.to_local(grad_placements=[Partial()])
        (part * (mesh.get_rank() + 1)).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad._spec.placements == (Replicate(),)  # as the leaf
        assert leaf.grad.full_tensor().tolist() == [3] * 4

    run_on_mesh((2,), body)


def test_copies_parameters_and_text() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        parameter = nn.Parameter(tensor)
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        parameter.sum().backward()
        again = copy.deepcopy(parameter)
        assert isinstance(again, nn.Parameter)
        assert again.requires_grad
        assert again.grad is not None
        with torch.no_grad():
            again.zero_()
        assert_holds(parameter.detach(), torch.arange(4.0))
        assert "placements=(S(0))" in repr(parameter)
        assert isinstance(parameter.detach(), DTensor)
        assert not parameter.detach().requires_grad
        with pytest.raises(PlacementError, match="full_tensor"):
            tensor.tolist()
        with pytest.raises(PlacementError, match="full_tensor"):
            tensor.numpy()
        whole = tensor.redistribute(placements=[Replicate()])
        assert whole.tolist() == [0, 1, 2, 3]
        assert whole.numpy().sum() == 6
        assert tensor.global_layout.shape == (4,)
        assert torch.equal(tensor, tensor.clone())
        assert not torch.equal(tensor, tensor + 1)

    run_on_mesh((2,), body)
