"""Norms in half precision, with weights of the same dtype, of single precision and without."""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Placement, Replicate, Shard, distribute_tensor

from ..rank_meshes import run_on_mesh

aten: Any = torch.ops.aten

Weights = list[Any]
"""Weight and bias over 4 channels, or over 6 features; None where there are none."""

NORMS: dict[str, tuple[int, Callable[..., Any]]] = {
    "layer_norm": (6, lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "rms_norm": (6, lambda x, w, b: F.rms_norm(x, (6,), w)),
    "group_norm": (4, lambda x, w, b: F.group_norm(x, 2, w, b)),
    "instance_norm": (4, lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "batch_norm": (4, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "batch_norm of running values": (
        4,
        lambda x, w, b: F.batch_norm(x, _running(x, w, -1, 1), _running(x, w, 0.5, 2), w, b),
    ),
}


def _running(x: Any, weight: Any, first: float, last: float) -> Any:
    made = torch.linspace(first, last, 4).to(x.dtype if weight is None else weight.dtype)
    if isinstance(x, DTensor):
        return distribute_tensor(made, x.device_mesh, [Replicate()], src_data_rank=None)
    return made


def _values() -> Tensor:
    return ((torch.arange(5 * 4 * 6) * 7) % 31).view(5, 4, 6) * 0.25 - 3.0


def _weights(size: int, dtype: torch.dtype | None) -> Weights:
    if dtype is None:
        return [None, None]
    return [torch.linspace(0.5, 2, size).to(dtype), torch.linspace(-1, 1, size).to(dtype)]


def _run(norm: Callable[..., Any], given: list[Any]) -> list[Any]:
    """Return values and gradients of a norm, None where nothing has a gradient."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in given]
    result = norm(*leaves)
    (result.float() * torch.arange(6.0)).sum().backward()
    return [result.detach(), *[None if leaf is None else leaf.grad for leaf in leaves]]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_half_precision_equals_one_device(name: str, dtype: torch.dtype) -> None:
    size, norm = NORMS[name]
    wholes = [[_values().to(dtype), *_weights(size, w)] for w in (None, dtype, torch.float32)]
    expected = [_run(norm, whole) for whole in wholes]

    def body(mesh: DeviceMesh) -> None:
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            for whole, wanted in zip(wholes, expected, strict=True):
                found = _run(norm, _laid_out(whole, mesh, placement))
                for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
                    _assert_close(ours, theirs, f"{placement}, weights {whole[1:]}: {index}")

    run_on_mesh((3,), body)


def _laid_out(whole: list[Any], mesh: DeviceMesh, placement: Placement) -> list[Any]:
    placements = [placement, Replicate(), Replicate()]
    pairs = zip(whole, placements, strict=True)
    return [
        None if t is None else distribute_tensor(t, mesh, [p], src_data_rank=None) for t, p in pairs
    ]


def _assert_close(found: Any, expected: Any, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is None:
        return
    assert (found.dtype, found.to_local().dtype) == (expected.dtype, expected.dtype), what
    largest = float(expected.float().abs().max())
    torch.testing.assert_close(
        found.full_tensor().float(),
        expected.float(),
        rtol=2e-2,
        atol=2e-2 * max(1.0, largest),
        msg=lambda text: f"{what}: {text}",
    )


@pytest.mark.parametrize("weights", [None, torch.bfloat16, torch.float32])
def test_statistics_have_the_dtype_of_the_kernel(weights: torch.dtype | None) -> None:
    values = _values().bfloat16()
    w, b = _weights(4, weights)
    running = [None, None] if w is None else [torch.zeros_like(w), torch.ones_like(w)]
    u, v = _weights(6, weights)
    calls: list[tuple[Any, list[Any]]] = [
        (aten.native_layer_norm, [values, [6], u, v, 1e-5]),
        (aten.native_group_norm, [values, w, b, 5, 4, 6, 2, 1e-5]),
        (aten.native_batch_norm, [values, w, b, *running, True, 0.1, 1e-5]),
        (aten._native_batch_norm_legit.no_stats, [values, w, b, True, 0.1, 1e-5]),
    ]
    if w is not None:
        calls += [
            (aten.native_batch_norm, [values, w, b, *running, False, 0.1, 1e-5]),
            (aten._batch_norm_with_update, [values, w, b, *running, 0.1, 1e-5]),
        ]

    def copied(args: list[Any]) -> list[Any]:
        return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]

    def body(mesh: DeviceMesh) -> None:
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            for op, args in calls:
                given = [
                    distribute_tensor(
                        arg, mesh, [placement if arg.ndim == 3 else Replicate()], src_data_rank=None
                    )
                    if isinstance(arg, Tensor)
                    else arg
                    for arg in copied(args)
                ]
                for ours, theirs in zip(op(*given), op(*copied(args)), strict=True):
                    assert ours.shape == theirs.shape, (op, placement)
                    if ours.numel():
                        _assert_close(ours, theirs, f"{op} of {placement}")
                    assert ours.dtype == ours.to_local().dtype == theirs.dtype, (op, placement)

    run_on_mesh((3,), body)


def test_weights_that_the_kernel_does_not_take_are_refused_on_every_rank() -> None:
    values, (w, b) = _values(), _weights(6, torch.bfloat16)

    def body(mesh: DeviceMesh) -> None:
        for placement in (Replicate(), Shard(0), Shard(2)):
            given = _laid_out([values[:2], w, b], mesh, placement)
            with pytest.raises(RuntimeError, match="mixed dtype"):
                F.layer_norm(given[0], (6,), given[1], given[2])

    run_on_mesh((3,), body)


def test_gradient_of_layer_norm_before_a_linear_layer_that_is_cut_by_columns() -> None:
    values, weight = _values().bfloat16(), (torch.arange(48).view(8, 6) % 5 - 2).bfloat16()

    def gradient(x: Any, w: Any) -> Any:
        x = x.detach().requires_grad_()
        F.linear(F.layer_norm(x, (6,)), w).float().square().sum().backward()
        return x.grad

    expected = gradient(values, weight)

    def body(mesh: DeviceMesh) -> None:
        for placement in (Replicate(), Shard(1), Shard(2)):
            x, w = (
                distribute_tensor(t, mesh, [p], src_data_rank=None)
                for t, p in ((values, placement), (weight, Shard(0)))
            )
            _assert_close(gradient(x, w), expected, f"{placement}")

    run_on_mesh((2,), body)
