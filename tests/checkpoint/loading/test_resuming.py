"""Training goes on where it was saved: on another mesh, with parameters that lie otherwise."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, Replicate
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import assert_holds, rank_mesh, scattered
from ...dtensor.redistribute.test_redistribute import random_placements
from ...ranks import run_ranks

# torch's stubs leave out the stores.
_c10d: Any = dist

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, foreach=True),
    "adamw-loop": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


class Experts(nn.Module):
    """A routed layer and a plain one, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, 4, 6, dtype=torch.float64))
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.out = nn.Linear(6, 3, dtype=torch.float64)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.arange(1.0, 6.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [experts, batch, 4] -> a loss."""
        hidden = torch.bmm(x, self.experts) * self.scale.view(5, 1, 1)
        logits = self.out(self.norm(F.gelu(hidden))).flatten(0, 1)
        return F.cross_entropy(logits, logits.detach().argmin(1))


def laid_out(model: nn.Module, mesh: DeviceMesh, seed: int, *, empty: bool = False) -> nn.Module:
    """A copy of the model with all its tensors in random layouts; zeros where ``empty``."""
    rng = random.Random(seed)
    model = copy.deepcopy(model)

    def placed(whole: torch.Tensor) -> Any:
        chosen = random_placements(rng, mesh.shape, tuple(whole.shape))
        values = [Replicate() if p.is_partial() else p for p in chosen]
        return scattered(torch.zeros_like(whole) if empty else whole, mesh, values).detach()

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(placed(parameter.detach())))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, placed(buffer))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, steps: int) -> None:
    """Some steps on one batch, gradients clipped."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def batch() -> torch.Tensor:
    """What both runs train on."""
    return torch.randn(5, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def on_mesh(shape: tuple[int, ...], body: Callable[[DeviceMesh, Any], None]) -> None:
    """Run ``body(mesh, group of all ranks)`` on the ranks of a mesh."""
    meeting = _c10d.HashStore()
    run_ranks(
        math.prod(shape), lambda rank, world: body(rank_mesh(meeting, shape, rank, world), world)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [((2, 2), (3,)), ((3,), (2, 1, 2)), ((4,), (2, 2))])
def test_on_another_mesh(name: str, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    seed = sum(before) * 31 + sum(after)
    torch.manual_seed(5)
    start = Experts()
    plain = copy.deepcopy(start)
    whole_optimizer = OPTIMIZERS[name](plain.parameters())
    train(plain, whole_optimizer, batch(), 4)
    store = MemoryStore()

    def first(mesh: DeviceMesh, world: Any) -> None:
        model = laid_out(start, mesh, seed)
        optimizer = OPTIMIZERS[name](model.parameters())
        rows = random_placements(random.Random(seed), mesh.shape, (5, 7, 4))
        train(model, optimizer, scattered(batch(), mesh, rows), 2)
        dcp.save({"model": model, "optim": optimizer}, store, process_group=world)

    def second(mesh: DeviceMesh, world: Any) -> None:
        model = laid_out(start, mesh, seed + 1, empty=True)
        optimizer = OPTIMIZERS[name](model.parameters())
        rows = random_placements(random.Random(seed + 1), mesh.shape, (5, 7, 4))
        x = scattered(batch(), mesh, rows)
        if seed % 2:  # else the optimizer is a fresh one
            train(model, optimizer, x, 1)
        dcp.load({"model": model, "optim": optimizer}, store, process_group=world)
        train(model, optimizer, x, 2)
        for tensor, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert_holds(tensor.detach(), whole.detach(), rtol=1e-8, atol=1e-10)
        entries = optimizer.state_dict()["state"]
        for index, wanted in whole_optimizer.state_dict()["state"].items():
            for key, value in wanted.items():
                if value is not None and value.ndim:
                    assert_holds(entries[index][key], value, rtol=1e-6, atol=1e-10)

    on_mesh(before, first)
    on_mesh(after, second)
