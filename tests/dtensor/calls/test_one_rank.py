"""A mesh of one rank, or an axis of one: nothing is sent there, and nothing copied."""

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
from dtckpt.dtensor.ops.engine import primitives
from dtckpt.dtensor.redistribute import redistribute_locals
from dtckpt.errors import PlacementError

from ..rank_meshes import collectives, run_on_mesh

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
def test_redistribute_on_one_rank_is_a_view(source: Placement, target: Placement) -> None:
    values = torch.arange(16.0).view(4, 4)
    tensor = DTensor.from_local(values.clone(), alone(), [source], shape=(4, 4))
    with Ran() as ran:
        moved = tensor.redistribute(placements=[target])
    assert set(ran.names) <= {"aten::alias"}, ran.names
    assert (tensor.placements, moved.placements) == ((source,), (target,))
    moved.add_(1)
    assert torch.equal(tensor.to_local(), values + 1)
    tensor.mul_(2)
    assert torch.equal(moved.full_tensor(), (values + 1) * 2)
    assert moved.placements == (target,)


def test_what_goes_to_another_mesh_is_copied() -> None:
    wide = torch.arange(32.0).view(4, 8)
    parts = [wide[:, :4], wide[:2], wide.t()[:4], torch.from_numpy(wide.numpy()), wide[0, 0]]
    for part in parts:
        before = part.clone()
        tensor = DTensor.from_local(part, alone(), [Partial()])
        moved = tensor.redistribute(alone((1, 1)), [Replicate(), Replicate()]).to_local()
        assert torch.equal(moved, before)
        assert moved.is_contiguous()
        moved.zero_()
        assert torch.equal(part, before)


def test_a_gathered_parameter_is_the_parameter_as_on_one_device() -> None:
    weight: Any = distribute_tensor(torch.ones(4, 4), alone(), [Shard(0)]).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = weight.detach().full_tensor()
    (weight * 2).sum().backward()
    optimizer.step()
    assert torch.equal(before, torch.full((4, 4), -1.0))


def _same(tensor: Any) -> Any:
    return tensor.view_as(tensor)


def _gathered(tensor: Any) -> Any:
    return tensor.redistribute(placements=[Replicate()])


def test_autograd_knows_that_memory_is_shared() -> None:
    """Written to on either side: gradients are those of one device, or torch's error."""

    def gradient(start: Any, gather: Any) -> Any:
        leaf = start.requires_grad_()
        tensor = leaf * 3
        view = gather(tensor)
        view.mul_(tensor.detach() + 1)
        tensor.mul_(2)
        (tensor * gather(tensor)).sum().backward()
        return leaf.grad

    expected = gradient(torch.arange(8.0), _same)
    found = gradient(distribute_tensor(torch.arange(8.0), alone(), [Shard(0)]), _gathered)
    assert found.placements == (Shard(0),)
    assert torch.equal(found.to_local(), expected)

    leaf: Any = distribute_tensor(torch.arange(8.0), alone(), [Shard(0)]).requires_grad_()
    loss = (_gathered(leaf) ** 2).sum()
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="view of a leaf"):
        _gathered(leaf).add_(1)


def test_gradients_arrive_with_the_placements_of_the_tensor() -> None:
    leaf = distribute_tensor(torch.arange(8.0), alone(), [Shard(0)]).requires_grad_()
    tensor: Any = leaf * 1
    tensor.retain_grad()
    moved = _gathered(tensor)
    (moved * moved).sum().backward()
    assert tensor.grad.placements == (Shard(0),)
    assert torch.equal(tensor.grad.to_local(), 2 * torch.arange(8.0))


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

    monkeypatch.setattr(primitives, "redistribute_locals", noted)
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


def test_a_view_of_the_view_is_one_of_the_tensor() -> None:
    tensor = distribute_tensor(torch.arange(8.0), alone(), [Shard(0)])
    rows: Tensor = tensor.redistribute(placements=[Replicate()]).view(2, 4)
    rows[1].fill_(7)
    assert tensor.to_local().tolist() == [0, 1, 2, 3, 7, 7, 7, 7]
