"""Sums that are scaled by infinite numbers, and divided by zero, against one device."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Partial, Replicate, distribute_tensor

from ..rank_meshes import collectives, run_on_mesh

SUMS = torch.tensor([[1.0, 2.0, 0.0], [-3.0, 0.0, 5.0]])
NUMBERS = (math.inf, -math.inf, math.nan, 0.0, 2.5)

SCALES: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda x, k: x * k,
    "rmul": lambda x, k: k * x,
    "div": lambda x, k: x / k,
    "mul_": lambda x, k: x.clone().mul_(k),
    "div_": lambda x, k: x.clone().div_(k),
    "lerp": lambda x, k: torch.lerp(x, x * 2, k),
    "foreach_mul": lambda x, k: torch._foreach_mul([x, x * 2], k)[1],
    "foreach_div": lambda x, k: torch._foreach_div([x, x * 2], k)[1],
    "scaled sum": lambda x, k: x.sum() * k,
}
OF_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add alpha": lambda x, k: torch.add(x, x * 2, alpha=k),
    "foreach_mul_": lambda x, k: _in_place(torch._foreach_mul_, x, k),
    "foreach_div of a list": lambda x, k: torch._foreach_div([x, x * 2], [k, 1.0])[0],
}
OF_TENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "addcdiv": lambda x, k: torch.addcdiv(x, x, k),
    "addcmul": lambda x, k: torch.addcmul(x, torch.ones_like(x), k),
}


def _in_place(op: Callable[..., Any], x: Tensor, k: float) -> Tensor:
    made = x.clone()
    op([made], k)
    return made


def _terms(mesh: DeviceMesh, *, alone: bool) -> Any:
    """Return terms of the sums: they and zeros, or of unlike signs."""
    first = mesh.get_coordinate() == (0,)
    if alone:
        local = SUMS.clone() if first else torch.zeros_like(SUMS)
    else:
        local = SUMS - 1 if first else torch.ones_like(SUMS)
    return DTensor.from_local(local, mesh, [Partial()])


@pytest.mark.parametrize("name", [*SCALES, *OF_NUMBERS])
def test_sum_scaled_by_a_number_equals_one_device(name: str) -> None:
    run = {**SCALES, **OF_NUMBERS}[name]

    def body(mesh: DeviceMesh) -> None:
        for number in NUMBERS:
            for alone in (True, False):
                found = run(_terms(mesh, alone=alone), number).full_tensor()
                torch.testing.assert_close(found, run(SUMS, number), equal_nan=True)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("name", ["div", "div_", "foreach_div", "foreach_div of a list"])
def test_sum_divided_by_false_equals_one_device(name: str) -> None:
    run = {**SCALES, **OF_NUMBERS}[name]

    def body(mesh: DeviceMesh) -> None:
        for number in (True, False):
            for alone in (True, False):
                found = run(_terms(mesh, alone=alone), number).full_tensor()
                torch.testing.assert_close(found, run(SUMS, number), equal_nan=True)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("name", [*SCALES, *OF_TENSORS])
def test_sum_scaled_by_a_tensor_of_one_element_equals_one_device(name: str) -> None:
    run = {**SCALES, **OF_TENSORS}[name]

    def body(mesh: DeviceMesh) -> None:
        for number in NUMBERS:
            scale = torch.tensor(number)
            expected = run(SUMS, scale)
            for given in (scale, distribute_tensor(scale, mesh, [Replicate()], src_data_rank=None)):
                for alone in (True, False):
                    found = run(_terms(mesh, alone=alone), given).full_tensor()
                    torch.testing.assert_close(found, expected, equal_nan=True)

    run_on_mesh((2,), body)


def test_sum_scaled_by_a_finite_number_is_not_reduced() -> None:
    def body(mesh: DeviceMesh) -> None:
        terms = _terms(mesh, alone=False)
        with collectives() as seen:
            results: list[Any] = [terms * 2.5, terms / 4, torch.add(terms, terms, alpha=3)]
            terms.mul_(2)
        assert not seen
        assert all(result.placements == (Partial(),) for result in results)

    run_on_mesh((2,), body)
