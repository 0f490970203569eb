"""Operators on our DTensors on a GPU, beside plain tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from .setting import Finding, Setting

_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "multiply and add": lambda a, b: a * 3 + b,
    "compare": lambda a, b: a < b,
    "where": lambda a, b: torch.where(a < 0, a, b),
    "cat": lambda a, b: torch.cat([a, b], dim=1),
    "transpose and reshape": lambda a, _: a.t().contiguous().reshape(-1, 4),
    "index": lambda a, b: a[2:9, ::3] + b[2:9, ::3],
    "sum": lambda a, _: a.sum(dim=0),
    "mean": lambda a, _: a.mean(),
    "max": lambda a, _: a.amax(dim=1),
    "softmax": lambda a, _: torch.softmax(a, dim=1),
    "layer norm": lambda a, _: torch.nn.functional.layer_norm(a, a.shape[1:]),
    "gelu": lambda a, _: torch.nn.functional.gelu(a),
    "matmul": lambda a, b: a @ b.t(),
    "cross entropy": lambda a, b: torch.nn.functional.cross_entropy(a, b.softmax(dim=1)),
}


def check_ops(setting: Setting) -> Finding:
    """Operators on our DTensors, forwards and backwards, beside plain tensors on the CPU."""
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    one, two = (torch.randn(24, 16, generator=generator) for _ in range(2))
    problems: list[str] = []
    for name, op in _OPS.items():
        for placement in (Replicate(), Shard(0), Shard(1)):
            expected, expected_grad = _result(op, one, two)
            try:
                inputs = (distribute_tensor(x.to(setting.device), mesh, [placement])
                          for x in (one, two))  # fmt: skip
                found, grad = _result(op, *inputs)
                _assert_close(found, expected)
                if expected_grad is not None:
                    _assert_close(grad, expected_grad)
            except Exception as error:
                told = str(error).strip().partition("\n")[0]
                problems.append(f"{name} on {placement}: {type(error).__name__}: {told}")
    return Finding(
        name=f"{len(_OPS)} operators on DTensors, forwards and backwards, beside the CPU",
        problems=tuple(problems),
    )


def _result(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], one: torch.Tensor, two: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    one = one.detach().requires_grad_()
    result = op(one, two)
    if not result.is_floating_point():
        return result, None
    (result * result).sum().backward()
    return result, one.grad


def _assert_close(found: Any, expected: torch.Tensor) -> None:
    if not isinstance(found, DTensor):
        raise TypeError(f"expected a DTensor, got {type(found).__name__}")
    torch.testing.assert_close(found.full_tensor().cpu(), expected, rtol=1e-4, atol=1e-4)
