"""Gradients of leaves that stay as they come, and are reduced together when that is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    partial_gradients,
    reduce_gradients,
)
from dtckpt.dtensor.debug import CommDebugMode

from ..rank_meshes import run_on_mesh

SIZE, LAYERS = 6, 3


def whole(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)


def loss_of(x: Any, leaves: Any) -> Any:
    for leaf in leaves:
        x = torch.tanh(x @ leaf)
    return x.square().sum()


def expected(*seeds: int) -> list[Any]:
    leaves = [whole(i).requires_grad_() for i in range(LAYERS)]
    for seed in seeds:
        loss_of(whole(seed), leaves).backward()
    return [leaf.grad for leaf in leaves]


def test_gradients_stay_partial_until_they_are_asked_for() -> None:
    wanted = expected(9, 10, 11)

    def body(mesh: DeviceMesh) -> None:
        # The last one is sharded by an axis, along which its gradient comes as its shard.
        cuts: list[Any] = [Replicate(), Replicate(), Shard(1)]
        leaves: list[Any] = [
            distribute_tensor(whole(i), mesh, [Replicate(), cut]).requires_grad_()
            for i, cut in enumerate(cuts)
        ]

        def loss(seed: int) -> Any:
            return loss_of(distribute_tensor(whole(seed), mesh, [Shard(0), Replicate()]), leaves)

        with partial_gradients():
            for seed in (9, 10):
                loss(seed).backward()
        assert all(leaf.grad.placements[0] == Partial() for leaf in leaves)
        loss(11).backward()  # what is added to a Partial becomes one
        plain = torch.ones(2, requires_grad=True)
        plain.sum().backward()
        unused = distribute_tensor(whole(0), mesh, [Replicate(), Replicate()]).requires_grad_()
        with CommDebugMode() as comm:
            reduce_gradients([plain, unused, *leaves])
        first = comm.get_total_counts()
        with CommDebugMode() as comm:
            reduce_gradients(leaves)
        # One over both axes, and one over the first for the leaf that the second one cuts.
        assert (first, comm.get_total_counts()) == (2, 0)
        assert unused.grad is None
        for leaf, want in zip(leaves, wanted, strict=True):
            assert type(leaf.grad) is DTensor
            assert leaf.grad.placements == leaf.placements
            torch.testing.assert_close(leaf.grad.full_tensor(), want)
        memories = {leaf.grad.to_local().untyped_storage().data_ptr() for leaf in leaves}
        assert len(memories) == LAYERS

    run_on_mesh((2, 2), body, ("dp", "tp"))


def test_backward_passes_send_nothing_for_leaves() -> None:
    wanted = expected(9)

    def body(mesh: DeviceMesh) -> None:
        leaves: list[Any] = [
            distribute_tensor(whole(i), mesh, [Replicate()]).requires_grad_() for i in range(LAYERS)
        ]
        x = distribute_tensor(whole(9), mesh, [Shard(0)])
        for waits in (True, False):
            loss = loss_of(x, leaves)
            with CommDebugMode() as comm:
                if waits:
                    with partial_gradients():
                        loss.backward()
                    reduce_gradients(leaves)
                else:
                    loss.backward()
            assert comm.get_total_counts() == (1 if waits else LAYERS)
            for leaf, want in zip(leaves, wanted, strict=True):
                torch.testing.assert_close(leaf.grad.full_tensor(), want)
                leaf.grad = None

    run_on_mesh((3,), body)
