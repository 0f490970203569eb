"""Functions of one tensor, sharded along its first dim, and of a number."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownLambdaType=false
# torch's functions on lists are private there, and optimizers consist of them.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .families import FAMILIES, Model, by_rows, numbers

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "topk": lambda x: x.topk(1, 0).values,
    "sort": lambda x: x.sort(0).values,
    "gather": lambda x: x.gather(0, x.argsort(0)),
    "median": lambda x: x.median(0).values,
    "index_select": lambda x: x.index_select(0, x[:1, 0].long() * 0),
    "softmax": lambda x: x.softmax(0).log(),
    "norm": lambda x: x / x.norm(dim=0),
    "var": lambda x: (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt(),
    "flip": lambda x: x.flip(0).roll(1, 0),
    "cat": lambda x: torch.cat([x, x.amin(0, keepdim=True)]),
    "matmul": lambda x: x @ x.mT @ x,
    "attend": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, 3)] * 3),
    "reshape": lambda x: x.reshape(-1).square().view(3, -1).sum(1),
    "unused": lambda x: (x.cumsum(0), x * 2)[1],
    "twice": lambda x: x.sum(0) * x.sum(0) + x.mean(0),
}
"""What sends something, often from a part alone that is empty on some rank."""

OF_A_NUMBER: dict[str, Callable[[Any, float], Any]] = {
    "mul": lambda x, s: x * s,
    "expression": lambda x, s: x * (s * 2 + 1) - s,
    "alpha": lambda x, s: torch.add(x, x, alpha=s),
    "pow": lambda x, s: x.abs() ** s,
    "clamp": lambda x, s: x.clamp(-s, max=s),
    "layer_norm": lambda x, s: F.layer_norm(x, x.shape[1:], eps=s),
    "vector_norm": lambda x, s: x * s + torch.linalg.vector_norm(x, s, dim=0) * s,
    "foreach": lambda x, s: torch._foreach_add(torch._foreach_mul([x, x], s), [s, 2 * s])[1],
    "in_place": lambda x, s: x.clone().mul_(s).add_(x, alpha=s),
    "dropout": lambda x, s: F.dropout(x, s / 10),
    "whole_number": lambda x, s: x.sum(int(s) % 2),
    "redistribute": lambda x, s: (x * s).sum() + s,
}
"""What takes a number in the place of which a graph has a symbol, from its second value on."""


class _Function(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def make(name: str, n: int) -> Model:
    """Return the model of a family, or of a function of one tensor, of a size that ranks share."""
    if name in FAMILIES:
        return FAMILIES[name](n)
    return Model(_Function(OF_ONE[name]), (numbers(n, 3),), by_rows(), (0,))
