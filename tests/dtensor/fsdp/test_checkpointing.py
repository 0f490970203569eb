"""Activation checkpointing beside ``fully_shard``: every kind, inside, outside, on one module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import (
    checkpoint as composable_checkpoint,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DeviceMesh, DTensor
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.fsdp.state import states_below
from tests.dtensor.rank_meshes import run_on_mesh


class Called(nn.Module):
    """Calls ``torch.utils.checkpoint`` around its layer."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return result


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Dropout(0.0)).double()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block())


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "composable": lambda module: composable_checkpoint(module),
    "wrapper": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "reentrant wrapper": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "called": partial(Called, reentrant=False),
    "called, reentrant": partial(Called, reentrant=True),
}


def before(model: Any, again: Callable[[nn.Module], nn.Module], shard: Any) -> Any:
    for i in range(2):
        model[i] = shard(again(model[i]))
    return shard(model)


def after(model: Any, again: Callable[[nn.Module], nn.Module], shard: Any) -> Any:
    for i in range(2):
        model[i] = again(shard(model[i]))
    return shard(model)


def outside(model: Any, again: Callable[[nn.Module], nn.Module], shard: Any) -> Any:
    for part in model:
        shard(part[0])
        shard(part[2])
    for i in range(2):
        model[i] = again(model[i])
    return shard(model)


def inside(model: Any, again: Callable[[nn.Module], nn.Module], shard: Any) -> Any:
    for part in model:
        part[0] = again(part[0])
        part[2] = again(part[2])
        shard(part)
    return shard(model)


def nested(model: Any, again: Callable[[nn.Module], nn.Module], shard: Any) -> Any:
    """Checkpointing within checkpointing, and sharded modules within sharded ones."""
    for i in range(2):
        model[i][0] = again(shard(model[i][0]))
        model[i] = shard(again(model[i]))
    return shard(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [before, after, outside, inside, nested])
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_are_those_without_checkpointing(kind: str, order: Any, reshard: bool) -> None:
    start = made()
    x = torch.randn(4, 6, dtype=torch.float64)
    whole = copy.deepcopy(start)
    given = x.clone().requires_grad_()
    whole(given).square().sum().backward()
    wanted = [p.grad for p in whole.parameters()]

    def body(mesh: DeviceMesh) -> None:
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard)
        model = order(copy.deepcopy(start), KINDS[kind], shard)
        for _ in range(2):
            mine = x.clone().requires_grad_()
            model(mine).square().sum().backward()
            assert not any(s.unit.is_whole or s.is_in_backward for s in states_below(model))
            torch.testing.assert_close(mine.grad, given.grad)
            for one, grad in zip(model.parameters(), wanted, strict=True):
                assert isinstance(one.grad, DTensor)
                torch.testing.assert_close(one.grad.full_tensor(), grad)
            model.zero_grad()

    run_on_mesh((2,), body)
