"""A mesh of one rank, or an axis of one: nothing is sent, and nothing copied before it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_many,
)
from dtckpt.dtensor.calls import plan
from dtckpt.dtensor.redistribute import redistribute_locals
from dtckpt.errors import PlacementError

from .rank_meshes import collectives, run_on_mesh

aten: Any = torch.ops.aten

PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(1),
    Ragged(0, (4,)),
    Partial(),
    Partial("avg"),
    Partial("max"),
]


def alone(shape: tuple[int, ...] = (1,)) -> DeviceMesh:
    """Return a mesh of this process only, which has no group and nobody to make one."""
    return DeviceMesh("cpu", Mesh(shape), rank=0)


class Ran(TorchDispatchMode):
    """Lists the operators that run on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not any(issubclass(kind, DTensor) for kind in types):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
@pytest.mark.parametrize("target", PLACEMENTS, ids=str)
def test_redistribute_on_one_rank_only_copies(source: Placement, target: Placement) -> None:
    values = torch.arange(16.0).view(4, 4)
    tensor = DTensor.from_local(values.clone(), alone(), [source], shape=(4, 4))
    with Ran() as ran:
        moved = tensor.redistribute(placements=[target])
    assert set(ran.names) <= {"aten::clone", "aten::alias"}, ran.names
    assert moved.placements == (target,)
    assert torch.equal(moved.to_local(), values)
    if source != target:
        moved.add_(1)
        assert torch.equal(tensor.to_local(), values)
        tensor.mul_(2)
        assert torch.equal(moved.to_local(), values + 1)


def test_who_holds_a_pointer_sees_the_tensor_and_not_its_copy() -> None:
    local = torch.zeros(4)
    pointer = local.numpy()
    moved = DTensor.from_local(local, alone(), [Shard(0)]).redistribute(placements=[Replicate()])
    pointer[:] = 7
    assert moved.to_local().sum() == 0
    local.add_(1)
    assert (pointer == 8).all()


def test_any_memory_is_copied() -> None:
    wide = torch.arange(32.0).view(4, 8)
    parts = [wide[:, :4], wide[:2], wide.t()[:4], torch.from_numpy(wide.numpy()), wide[0, 0]]
    for part in parts:
        before = part.clone()
        tensor = DTensor.from_local(part, alone(), [Partial()])
        moved = tensor.redistribute(placements=[Replicate()]).to_local()
        assert torch.equal(moved, before)
        assert moved.is_contiguous()
        moved.zero_()
        assert torch.equal(part, before)


def test_gathered_values_stay_while_a_step_writes_the_parameter() -> None:
    weight: Any = distribute_tensor(torch.ones(4, 4), alone(), [Shard(0)]).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = weight.detach().full_tensor()
    (weight * 2).sum().backward()
    optimizer.step()
    assert torch.equal(weight.full_tensor() - before, torch.full((4, 4), -2.0))


def test_one_rank_needs_no_process_group() -> None:
    mesh = alone((1, 1))
    torch.manual_seed(0)
    plain = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    cuts = [[Shard(0), Shard(1)], [Replicate(), Shard(0, 0)], [Shard(1), Partial()]]
    ours: list[Any] = [
        distribute_tensor(t.detach(), mesh, cut).requires_grad_()
        for t, cut in zip(plain, cuts, strict=True)
    ]

    def step(tensors: list[Any]) -> Any:
        hidden = F.softmax(F.layer_norm(tensors[0] @ tensors[1], (8,)), -1) * tensors[2]
        value = (
            hidden.view(-1)[3:].cumsum(0).norm()
            + torch.linalg.cholesky(tensors[0] @ tensors[0].t() + 8 * torch.eye(8)).sum()
        )
        value.backward()
        return value

    with collectives() as seen:
        found, expected = step(ours), step(plain)
        torch.testing.assert_close(found.full_tensor(), expected)
        for own, other in zip(ours, plain, strict=True):
            assert own.grad is not None
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)
        assert torch.equal(
            DTensor.from_local(ours[0].to_local(), run_check=True, device_mesh=mesh).to_local(),
            plain[0],
        )
    assert seen == []


def test_several_tensors_and_other_meshes_of_one_rank() -> None:
    here, there = alone(), alone((1, 1))
    tensors = [
        distribute_tensor(torch.arange(6.0) + i, here, [p])
        for i, p in enumerate([Shard(0), Partial(), Replicate()])
    ]
    for moved in (
        redistribute_many(tensors, placements=[Replicate()]),
        redistribute_many(tensors, there, [Shard(0), Partial()]),
        [t.redistribute(there, [Shard(0), Replicate()], async_op=True) for t in tensors],
    ):
        for i, tensor in enumerate(moved):
            assert torch.equal(tensor.full_tensor(), torch.arange(6.0) + i)
            tensor.zero_()
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor.full_tensor(), torch.arange(6.0) + i)


def test_operators_on_one_rank_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of rows cut by columns, a view across a cut: on more ranks these redistribute."""
    mesh = alone()
    rows, columns = (distribute_tensor(torch.randn(8, 8), mesh, [Shard(d)]) for d in (0, 1))
    terms = DTensor.from_local(torch.randn(8, 8), mesh, [Partial()])
    moved: list[Any] = []

    def noted(locals_: Any, moves: Any) -> Any:
        moved.extend(moves)
        return redistribute_locals(locals_, moves)

    monkeypatch.setattr(plan, "redistribute_locals", noted)
    for call in (
        lambda: rows + columns,
        lambda: torch.relu(terms),
        lambda: rows @ columns,
        lambda: columns.add_(rows),
        lambda: aten._foreach_add([rows, columns], [terms, rows]),
    ):
        call()
    flat = columns.view(64)
    flat.zero_()  # a view, as on one device, and not a copy that refuses writes
    assert not columns.to_local().any()
    assert not moved


def test_values_are_read_on_one_rank_whatever_the_placement() -> None:
    for placement in PLACEMENTS:
        tensor = DTensor.from_local(torch.eye(4), alone(), [placement], shape=(4, 4))
        assert tensor.tolist() == torch.eye(4).tolist()
        assert (tensor.numpy() == torch.eye(4).numpy()).all()


def test_what_more_ranks_refuse_one_rank_refuses() -> None:
    numbers = DTensor.from_local(torch.ones(4, dtype=torch.int64), alone(), [Partial("avg")])
    with pytest.raises(PlacementError, match="floating point"):
        numbers.redistribute(placements=[Replicate()])
    with pytest.raises(PlacementError, match="do not commute"):
        distribute_tensor(torch.ones(4), alone((1, 1)), [Partial("sum"), Partial("max")])


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ([Shard(0), Shard(1)], [Replicate(), Shard(1)], []),
        ([Partial("max"), Shard(0)], [Shard(1), Shard(0)], []),
        ([Shard(0, 1), Shard(0, 0)], [Replicate(), Shard(0)], []),
        ([Shard(0), Shard(0)], [Partial(), Shard(1)], ["all_to_all"]),
    ],
)
def test_axes_of_one_rank_take_no_part(
    source: list[Placement], target: list[Placement], kinds: list[str]
) -> None:
    values = torch.arange(32.0).view(4, 8)

    def body(mesh: DeviceMesh) -> None:
        tensor = distribute_tensor(values, mesh, source, src_data_rank=None)
        with collectives() as seen:
            moved = tensor.redistribute(placements=target)
        assert [(c.kind, len(c.ranks)) for c in seen] == [(kind, 2) for kind in kinds]
        assert moved.placements == tuple(target)
        assert torch.equal(moved.full_tensor(), values)

    run_on_mesh((1, 2), body)


def test_a_view_of_a_copy_in_waiting_is_a_view() -> None:
    tensor = distribute_tensor(torch.arange(8.0), alone(), [Shard(0)])
    moved = tensor.redistribute(placements=[Replicate()])
    rows: Tensor = moved.view(2, 4)
    rows[1].fill_(7)
    assert moved.to_local().tolist() == [0, 1, 2, 3, 7, 7, 7, 7]
    assert tensor.to_local().tolist() == list(range(8))
