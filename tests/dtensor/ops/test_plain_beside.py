"""Operators made of others, with plain tensors in each of their places."""

# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Shard
from dtckpt.errors import PlacementError

from ..rank_meshes import run_on_mesh, scattered

VALUES, WEIGHT = torch.arange(24.0).view(6, 4).sin(), torch.arange(24.0).view(6, 4).cos().abs()
CHANNELS = torch.arange(4.0).sin().abs() + 0.5
EDGES = torch.tensor([-1.0, -0.5, 0.25, 1.0])
NUMBERS, OF_NUMBERS = torch.tensor([0, 1, 1, 4, 2, 1]), torch.arange(6.0).cos()


def batch_norm(
    values: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    given = [tensor.detach().requires_grad_() for tensor in (values, weight, bias)]
    running = mean.clone(), variance.clone()
    normal = F.batch_norm(given[0], *running, *given[1:], training=True)
    normal.square().sum().backward()
    return normal.detach(), *running, *[tensor.grad for tensor in given if tensor.grad is not None]


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "batch_norm": (batch_norm, [VALUES, CHANNELS, CHANNELS, CHANNELS, CHANNELS]),
    "histogram": (lambda v, e, w: torch.histogram(v, e, weight=w), [VALUES, EDGES, WEIGHT]),
    "histogram of a count": (
        lambda v, w: torch.histogram(v, 4, weight=w, density=True),
        [VALUES, WEIGHT],
    ),
    "bincount": (lambda v, w: [torch.bincount(v, w)], [NUMBERS, OF_NUMBERS]),
    "histogramdd": (
        lambda v, e, w: [torch.histogramdd(v, [e, e], weight=w).hist],
        [VALUES[:, :2], EDGES, OF_NUMBERS.abs()],
    ),
    "bucketize": (lambda v, e: [torch.bucketize(v, e)], [VALUES, EDGES]),
    "searchsorted": (lambda v, e: [torch.searchsorted(e, v)], [VALUES, EDGES]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plain_tensor_in_any_place_counts_as_the_same_on_all_ranks(name: str) -> None:
    """Batch norm and histograms of plain values, or with plain weights, raised AttributeError."""
    function, given = CASES[name]
    expected = function(*given)

    def body(mesh: DeviceMesh) -> None:
        for chosen in range(len(given)):
            for chosen_is_plain in (False, True):
                made = function(
                    *[
                        tensor
                        if (place == chosen) == chosen_is_plain
                        else scattered(tensor, mesh, [Shard(0)])
                        for place, tensor in enumerate(given)
                    ]
                )
                for one, other in zip(made, expected, strict=True):
                    whole = one.full_tensor() if isinstance(one, DTensor) else one
                    torch.testing.assert_close(whole, other)

    run_on_mesh((2,), body)


def test_plain_tensors_that_are_only_written_may_differ_between_ranks() -> None:
    """As buffers do that were never filled: what is in them is not read."""

    def body(mesh: DeviceMesh) -> None:
        rank = float(mesh.get_local_rank())
        for at in (0, 1):
            values = scattered(WEIGHT, mesh, [Shard(at)])
            out, best = torch.full((6, 6), rank), torch.full((6,), rank)
            places = torch.full((6,), int(rank))
            torch.mm(values, values.t(), out=out)
            torch.max(values, 1, out=(best, places))
            assert torch.allclose(out, WEIGHT @ WEIGHT.t())
            assert [best.tolist(), places.tolist()] == [t.tolist() for t in WEIGHT.max(1)]
            read = torch.full((6, 4), rank)
            with pytest.raises(PlacementError, match="differs between ranks"):
                torch.add(read, values, out=read)
            assert read.eq(rank).all()
            copied = torch.full((6, 4), rank)
            copied.copy_(values)
            assert torch.equal(copied, WEIGHT)

    run_on_mesh((2,), body)
