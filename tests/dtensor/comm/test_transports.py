"""What is known of backends: asked of the group, and used where its bytes move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt.dtensor import DeviceMesh, Mesh, Partial, Placement, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.comm import transports
from dtckpt.dtensor.comm.costs import NCCL
from dtckpt.dtensor.comm.reductions import start_reduce_scatter
from dtckpt.dtensor.comm.transports import GLOO, OTHER, transport_of, usual_transport
from dtckpt.dtensor.redistribute import move_steps

from ..rank_meshes import collectives, run_on_mesh, scattered


class Backend:
    """A raw backend of a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """Return it."""
        return self._name


def test_the_backend_says_how_bytes_move_and_not_the_device() -> None:
    assert transport_of(Backend("gloo"), "cpu") is GLOO
    assert transport_of(Backend("nccl"), "cuda") is transports.NCCL
    staged = transport_of(Backend("gloo"), "cuda")
    assert staged == replace(GLOO, costs=replace(GLOO.costs, direct_bytes=None))
    assert transport_of(Backend("mpi"), "cpu") is OTHER
    assert transport_of(object(), "cpu") is OTHER
    assert usual_transport("cpu") is GLOO
    assert usual_transport("cuda") is transports.NCCL
    assert DeviceMesh("cpu", Mesh((4,)), rank=0).transport is GLOO


def test_a_mesh_and_its_peers_ask_their_group() -> None:
    def body(mesh: DeviceMesh) -> None:
        assert mesh.transport is GLOO
        assert mesh.peers((0,)).transport is GLOO
        assert mesh.cost_model() is GLOO.costs
        mesh.costs = NCCL
        assert mesh.cost_model() is NCCL

    run_on_mesh((2,), body)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([Shard(0), Replicate()], [Replicate(), Replicate()]),
        ([Shard(0), Shard(0)], [Replicate(), Replicate()]),
        ([Shard(0), Shard(0)], [Shard(0), Replicate()]),
        ([Shard(1), Shard(0)], [Shard(1), Replicate()]),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_even_rows_are_gathered_in_place(
    source: list[Placement], target: list[Placement], async_op: bool, monkeypatch: Any
) -> None:
    whole = torch.arange(48.0).view(8, 6)

    def refuse(*_: object) -> None:
        raise AssertionError("went through buffers")

    monkeypatch.setattr(move_steps, "gather", refuse)

    def body(mesh: DeviceMesh) -> None:
        mesh.costs = replace(NCCL, round_bytes=16)
        tensor = scattered(whole, mesh, source)
        with collectives() as seen:
            moved = tensor.redistribute(placements=target, async_op=async_op)
            tensor.zero_()
            assert torch.equal(moved.to_local(), scattered(whole, mesh, target).to_local())
        assert seen[0].kind == "all_gather"

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("rows", [5, 8])
def test_rows_that_are_not_even_or_not_in_order_go_through_buffers(rows: int) -> None:
    whole = torch.arange(rows * 4.0).view(rows, 4)

    def body(mesh: DeviceMesh) -> None:
        mesh.costs = replace(NCCL, round_bytes=16)
        for source in ([Shard(0, 1), Shard(0, 0)], [Shard(0), Shard(0)], [Shard(0), Shard(1)]):
            tensor = scattered(whole, mesh, source)
            gathered = tensor.redistribute(placements=[Replicate(), Replicate()])
            assert torch.equal(gathered.to_local(), whole)

    run_on_mesh((2, 2), body)


class Ran(TorchDispatchMode):
    """Lists the operators that this thread runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_pieces_in_one_stretch_are_not_joined_before_they_are_reduced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "GLOO", replace(GLOO, exchanges_terms=False))

    def body(mesh: DeviceMesh) -> None:
        peers = mesh.peers((0,))
        whole = torch.arange(16.0).view(4, 4)
        pieces = [whole[:2], whole[2:]]
        with Ran() as ran:
            summed = start_reduce_scatter(pieces, "sum", peers)()
        assert "aten::cat" not in ran.names
        assert torch.equal(summed, 2 * pieces[peers.position])
        apart = start_reduce_scatter(list(whole.t().split(2)), "sum", peers)()
        assert torch.equal(apart, 2 * whole.t()[2 * peers.position :][:2])
        total = distribute_tensor(whole, mesh, [Partial()]).redistribute(placements=[Shard(0)])
        assert torch.equal(total.full_tensor(), whole)

    run_on_mesh((2,), body)
