"""A model of four units whose parts every kind of parallelism can spread, and its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNITS = ("stem", "block", "mixture", "head")
ROWS = 24
"""Of a batch, which 1, 2, 3, 4 and 8 ranks share."""
EXPERTS = 6
SAMPLES = torch.rand(480, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def same(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """Its second name for ``down`` is the same module: shared parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)
        self.again = self.down

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.again(F.relu(self.up(x)))


class Mixture(nn.Module):
    """A mixture of experts, of which a rank may have some."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.experts = nn.Parameter(torch.empty(EXPERTS, 8, 8))
        self.mine = slice(None)
        self.enter: Callable[[Tensor], Tensor] = same
        self.leave: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        shares = self.enter(self.gate(x).softmax(-1))[:, self.mine]
        experts: Any = self.experts
        local = experts.to_local() if self.mine != slice(None) else experts
        made = torch.einsum("re,ri,eij->rj", shares, self.enter(x), local)
        return x + self.leave(made)


class Model(nn.Module):
    """Units one after the other; a stage of a pipeline has some of them."""

    def __init__(self, units: tuple[str, ...] = UNITS) -> None:
        super().__init__()
        self.units = units
        parts: dict[str, nn.Module] = {
            "stem": nn.Linear(6, 8),
            "block": Block(),
            "mixture": Mixture(),
            "head": nn.Linear(8, 4),
        }
        for name in units:
            self.add_module(name, parts[name])

    def forward(self, x: Tensor) -> Tensor:
        for name in self.units:
            x = self.get_submodule(name)(x)
        return x


def make_model(seed: int, units: tuple[str, ...] = UNITS) -> Model:
    """Return a model in float64 whose parameters depend on seed and names; one is frozen."""
    model = Model(units).double()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    if "stem" in units:
        model.get_submodule("stem").get_parameter("weight").requires_grad_(False)
    return model


class Loader:
    """Takes every n-th of the samples, whose order does not depend on n."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.taken = 0

    def next(self) -> Tensor:
        """Return this loader's samples of the next batch."""
        rows = ROWS // self.count
        first = self.index + self.count * self.taken
        self.taken += rows
        return SAMPLES[first : first + self.count * rows : self.count]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]
