"""What ranks have to have: tensors, and the bits of a training of a few steps on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

STEPS = 2
WHOLE = {
    "columns": torch.arange(28.0).reshape(7, 4),
    "rows": torch.arange(40.0).reshape(10, 4) + 100,
    "bias": torch.arange(10.0) + 200,
}
"""Tensors whose values are known."""


def make_model(seed: int) -> nn.Module:
    """Layers whose parameters no number of ranks divides evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def make_optimizer(params: Any, cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    """An optimizer with a group for each layer; ``params`` are those of the model in order."""
    given = list(params)
    groups: list[dict[str, Any]] = [{"params": given[:2], "lr": 0.1}, {"params": given[2:]}]
    return cls([group for group in groups if group["params"]], lr=0.2, **options)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    """Make steps on batches that are the same everywhere."""
    for step in range(steps):
        batch = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(seed: int, steps: int = STEPS) -> tuple[Any, Any]:
    """A training on one device."""
    model = make_model(seed)
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer
