"""What is measured of one operator call: each row builds the same call on every side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtckpt.dtensor import partial_gradients, reduce_gradients

from ..fake_job import RANKS
from ..frame.timing import OURS, Call
from .sides import ALONE, MESHES, Side

WARM, MOVES, COLD, OPTIMIZER, ONE_RANK = 0.9, 0.4, 0.3, 0.6, 0.7
"""Bars: the most that ours may take, as a share of torch's time."""

SIZE = 64
LARGE = 1024
WIDTH = 128
PARAMETERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRow:
    """The same call again and again."""

    name: str
    make: Callable[[Side], Call]
    """Returns the call; what it needs is laid out before, outside of the time."""
    bar: float = WARM
    axes: int = 1
    """Of the mesh; ``ALONE`` for that of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRow:
    """Every call with shapes that were never seen."""

    name: str
    axes: int
    make: Callable[[Side, int], Call]
    """Returns a call on shapes that only this number has."""
    bar: float = COLD


def _sharded(side: Side, rows: int = SIZE, axes: int = 1) -> Tensor:
    """Return a matrix whose rows the first axis of the mesh cuts."""
    return side.put(torch.randn(rows, SIZE), 0, *(None,) * (axes - 1))


def _replicated(side: Side, *shape: int, axes: int = 1) -> Tensor:
    return side.put(torch.randn(shape), *(None,) * axes)


def _unary(function: Callable[[Tensor], Any]) -> Callable[..., Call]:
    def make(side: Side, rows: int = SIZE, axes: int = 1) -> Call:
        x = _sharded(side, rows, axes)
        return lambda: function(x)

    return make


def _binary(function: Callable[[Tensor, Tensor], Any]) -> Callable[..., Call]:
    def make(side: Side, rows: int = SIZE, axes: int = 1) -> Call:
        x, y = _sharded(side, rows, axes), _sharded(side, rows, axes)
        return lambda: function(x, y)

    return make


def _mm(side: Side, rows: int = SIZE, axes: int = 1) -> Call:
    x, w = _sharded(side, rows, axes), _replicated(side, SIZE, SIZE, axes=axes)
    return lambda: torch.mm(x, w)


def _linear(side: Side) -> Call:
    x, w, bias = _sharded(side), _replicated(side, SIZE, SIZE), _replicated(side, SIZE)
    return lambda: F.linear(x, w, bias)


def _layer_norm(side: Side, rows: int = SIZE, axes: int = 1) -> Call:
    x = _sharded(side, rows, axes)
    weight, bias = (_replicated(side, SIZE, axes=axes) for _ in range(2))
    return lambda: F.layer_norm(x, (SIZE,), weight, bias)


_view = _unary(lambda x: x.view(-1, 8, SIZE // 8))


def _cut(side: Side, size: int = SIZE) -> Call:
    x = side.put(torch.randn(size, size), None)
    return lambda: side.move(x, 0)


def _gather(side: Side, size: int = SIZE) -> Call:
    x = side.put(torch.randn(size, size), 0)
    return lambda: side.move(x, None)


def _whole(side: Side, size: int = SIZE) -> Call:
    x = side.put(torch.randn(size, size), 0)
    return lambda: side.whole(x)


def _from_local(side: Side) -> Call:
    local = torch.randn(SIZE // RANKS, SIZE)
    return lambda: side.wrap(local, (SIZE, SIZE), 0)


def _leaf(side: Side, shape: tuple[int, ...], *cuts: int | None) -> Tensor:
    return side.put(torch.randn(shape) / WIDTH, *cuts).detach().requires_grad_()


def _data_parallel(
    side: Side, *, reduces: bool = False, stays: bool = False, rows: int = SIZE
) -> Call:
    """Return a training step, whose gradients torch leaves Partial, and ours reduces.

    With ``reduces`` torch's are reduced, too. With ``stays`` ours stay Partial while the backward
    pass runs, and are reduced after it.
    """
    weights = [_leaf(side, (WIDTH, WIDTH), None) for _ in range(4)]
    biases = [_leaf(side, (WIDTH,), None) for _ in range(4)]
    inputs = side.put(torch.randn(rows, WIDTH), 0)

    def step() -> None:
        hidden = inputs
        for weight, bias in zip(weights, biases, strict=True):
            hidden = F.relu(F.linear(hidden, weight, bias))
        if stays and side.name == OURS:
            with partial_gradients():
                hidden.sum().backward()
            reduce_gradients((*weights, *biases))
        else:
            hidden.sum().backward()
        for leaf in (*weights, *biases):
            if reduces and leaf.grad is not None:
                side.move(leaf.grad, None)
            leaf.grad = None

    return step


def _tensor_parallel(side: Side) -> Call:
    cuts = (0, 1, 0, 1)  # columns, rows, columns, rows
    weights = [_leaf(side, (WIDTH, WIDTH), cut) for cut in cuts]
    inputs = side.put(torch.randn(SIZE, WIDTH), None)

    def step() -> None:
        hidden = inputs
        for up, down in (weights[:2], weights[2:]):
            hidden = side.move(F.linear(F.relu(F.linear(hidden, up)), down), None)
        hidden.sum().backward()
        for leaf in weights:
            leaf.grad = None

    return step


def _parameters(side: Side) -> list[nn.Parameter]:
    made = [nn.Parameter(_leaf(side, (WIDTH, SIZE), 0).detach()) for _ in range(PARAMETERS)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def _adamw(side: Side) -> Call:
    optimizer = torch.optim.AdamW(_parameters(side), lr=1e-3, foreach=True)
    return optimizer.step


def _clip(side: Side) -> Call:
    parameters = _parameters(side)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)


WARM_ROWS = (
    WarmRow(name="add", make=_binary(torch.add)),
    WarmRow(name="add scalar", make=_unary(lambda x: x + 1.0)),
    WarmRow(name="mul", make=_binary(torch.mul)),
    WarmRow(name="relu", make=_unary(torch.relu)),
    WarmRow(name="mm", make=_mm),
    WarmRow(name="linear", make=_linear),
    WarmRow(name="view of a shard", make=_view),
    WarmRow(name="transpose", make=_unary(lambda x: x.transpose(0, 1))),
    WarmRow(name="slice", make=_unary(lambda x: x[:, :8])),
    WarmRow(name="sum", make=_unary(torch.sum)),
    WarmRow(name="layer_norm", make=_layer_norm),
    WarmRow(name="softmax", make=_unary(lambda x: F.softmax(x, -1))),
    WarmRow(name="detach", make=_unary(lambda x: x.detach())),
    WarmRow(name="uniform_", make=_unary(lambda x: x.uniform_())),
    WarmRow(name="redistribute R to S(0)", make=_cut, bar=MOVES),
    WarmRow(name="redistribute S(0) to R", make=_gather, bar=MOVES),
    WarmRow(name="from_local", make=_from_local),
    WarmRow(name="MLP of 4 layers, forward and backward", make=_data_parallel),
    WarmRow(
        name="the same, gradients reduced", make=lambda side: _data_parallel(side, reduces=True)
    ),
    WarmRow(
        name="the same, reduced after it by ours only",
        make=lambda side: _data_parallel(side, stays=True),
    ),
    WarmRow(name="tensor-parallel MLP, forward and backward", make=_tensor_parallel),
    WarmRow(name="AdamW foreach, 100 tensors", make=_adamw, bar=OPTIMIZER),
    WarmRow(name="clip_grad_norm_, 100 tensors", make=_clip),
    *(
        WarmRow(name=f"one rank: {name}", make=make, bar=ONE_RANK, axes=ALONE)
        for name, make in {
            "S(0) to R": _gather,
            "R to S(0)": _cut,
            "full_tensor": _whole,
            "S(0) to R, 4 MiB": partial(_gather, size=LARGE),
            "R to S(0), 4 MiB": partial(_cut, size=LARGE),
            "full_tensor, 4 MiB": partial(_whole, size=LARGE),
            "MLP of 4 layers, forward and backward": partial(_data_parallel, rows=SIZE // RANKS),
        }.items()
    ),
)


_COLD: dict[str, Callable[..., Call]] = {
    "mul": _binary(torch.mul),
    "add": _binary(torch.add),
    "mm": _mm,
    "layer_norm": _layer_norm,
    "sum": _unary(torch.sum),
    "view": _view,
}


def _cold(make: Callable[..., Call], axes: int, side: Side, number: int) -> Call:
    return make(side, RANKS * (2 + number), axes)


COLD_ROWS = tuple(
    ColdRow(name=name, axes=axes, make=partial(_cold, make, axes))
    for axes in MESHES
    if axes != ALONE
    for name, make in _COLD.items()
)
ALL_ROWS: tuple[WarmRow | ColdRow, ...] = (*WARM_ROWS, *COLD_ROWS)
