"""Attention on CPU: values and gradients for all placements; rules of other backends on specs."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# One line per operator; the operators of other backends have no public names.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, strict
from dtckpt.dtensor.geometry.placement import Placement

from ..rank_meshes import run_on_mesh
from .op_cases import Case, check_on

aten = torch.ops.aten

QKV = ((2, 4, 5, 4), (2, 4, 6, 4), (2, 4, 6, 4))
SAME = ((2, 4, 5, 4),) * 3
GROUPED = ((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))


def _numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) for s in shapes]


def _case(name: str, run: object, *shapes: tuple[int, ...]) -> Case:
    return Case(name, run, shapes, wholes=lambda: _numbers(*shapes))  # pyright: ignore[reportArgumentType]


CASES = [
    _case("flash", lambda q, k, v: sdpa(q, k, v), *QKV),
    _case("causal", lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3), *SAME),
    _case("mask", lambda q, k, v, m: sdpa(q, k, v, m.detach()), *QKV, (1, 4, 5, 6)),
    _case("bool_mask", lambda q, k, v, m: sdpa(q, k, v, m.detach() > -1), *QKV, (5, 6)),
    _case("mask_gradient", lambda q, k, v, m: sdpa(q, k, v, m), *QKV, (2, 1, 5, 6)),
    _case("groups", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *GROUPED),
    _case("math", lambda q, k, v: sdpa(q, k, v), (4, 5, 4), (4, 6, 4), (4, 6, 4)),
    _case("math_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), *((4, 5, 4),) * 3),
]
GROUPS = {"attention": CASES}


def test_one_axis() -> None:
    check_on((4,), CASES, 4)


def test_two_axes() -> None:
    check_on((2, 2), CASES, 2)


SHAPE = (4, 4, 8, 16)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    out, sums, cq, ck, lq, lk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
    assert (lq, lk) == (8, 8)
    grads = aten._scaled_dot_product_flash_attention_backward(
        out, q, k, v, out, sums, cq, ck, lq, lk, 0.0, False, seed, offset
    )
    return [out, *grads]


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    grads = aten._scaled_dot_product_efficient_attention_backward(
        out, q, k, v, None, out, sums, seed, offset, 0.0, [True, True, True, False]
    )
    return [out, *grads[:3]]


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    out, sums, cq, ck, lq, lk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True
    )
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        out, q, k, v, out, sums, seed, offset, None, cq, ck, lq, lk, 0.0, False
    )
    return [out, *grads]


@pytest.mark.parametrize("run", [_flash, _efficient, _cudnn])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_other_backends_split_alike(run: Callable[..., list[Tensor]], dim: int) -> None:
    if dim == 2 and run is _efficient:
        pytest.skip("its sums are padded along the sequence, which is therefore whole")

    def laid(mesh: DeviceMesh, placement: Placement) -> DTensor:
        sizes = [n // 2 if placement == Shard(i) else n for i, n in enumerate(SHAPE)]
        local = torch.empty(sizes, dtype=torch.float16, device="meta")
        return DTensor.from_local(local, mesh, [placement], shape=SHAPE)

    def body(mesh: DeviceMesh) -> None:
        q = laid(mesh, Shard(dim))
        k = laid(mesh, Replicate() if dim == 2 else Shard(dim))
        with strict():
            out, grad_q, grad_k, grad_v = [_as_dtensor(t) for t in run(q, k, k)]
        assert out.placements == grad_q.placements == (Shard(dim),)
        assert out.to_local().shape == grad_q.to_local().shape == q.to_local().shape
        assert grad_k.placements == grad_v.placements
        assert grad_k.placements[0].is_partial("sum") == (dim == 2)
        assert grad_k.to_local().shape == grad_v.to_local().shape == k.to_local().shape

    run_on_mesh((2,), body)


def _as_dtensor(tensor: Any) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
