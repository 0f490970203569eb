"""Norms do not depend on how elements are cut up, and are right."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Mesh
from dtckpt.dtensor.elastic import exact_norms
from dtckpt.dtensor.elastic.exact_norms import digits_of, norm
from tests.dtensor.rank_meshes import run_on_mesh


def wide(count: int, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Numbers of all sizes between two powers of ten."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(low, high, (count,), generator=generator).double()
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 10**sizes).to(dtype)


def alone(values: Tensor, norm_type: float = 2) -> float:
    return norm([values], norm_type, DeviceMesh("cpu", Mesh((1,)), rank=0))


def added(parts: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(one for one, _ in parts), sum(other for _, other in parts)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.float32, -44, 38),
        (torch.float32, -6, 2),
        (torch.float16, -7, 4),
        (torch.bfloat16, -30, 30),
        (torch.float64, -150, 305),
        (torch.float64, -320, -200),
    ],
)
@pytest.mark.parametrize("power", [1, 2])
def test_sums_are_those_of_any_cut(dtype: torch.dtype, low: int, high: int, power: int) -> None:
    values = wide(3000, dtype, low, high)
    exponent = math.frexp(values.double().abs().max().item())[1]
    whole = digits_of([values], power, exponent)
    for sizes in ([1] * 3000, [2999, 1], [7] * 428 + [4]):
        parts = [digits_of([part], power, exponent) for part in values.split(sizes)]
        assert added(parts) == whole
    assert digits_of(list(values.split(100)), power, exponent) == whole
    exact = sum(Fraction(value) ** power for value in values.double().abs().tolist())
    root = math.ldexp(math.sqrt(exact / Fraction(2) ** (2 * exponent)), exponent)
    assert math.isclose(alone(values, power), root if power == 2 else exact, rel_tol=1e-14)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.data())
def test_any_numbers_in_any_order(values: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(values))))
    tensor = torch.tensor(values)
    parts = [digits_of([tensor[i : i + 1]], 2, 128) for i in order]
    assert added(parts) == digits_of([tensor], 2, 128)


def test_sums_that_take_several_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = wide(3000, torch.float32, -6, 2)
    whole = digits_of([values], 2, 12)
    changed: Any = {"_MOST_IN_INT": 100, "_CPU_CHUNK": 64}
    for name, value in changed.items():
        monkeypatch.setattr(exact_norms, name, value)
    assert digits_of([values], 2, 12) == whole


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_what_is_no_number_spreads(odd: float, norm_type: float) -> None:
    def body(mesh: DeviceMesh) -> float:
        own = torch.ones(5)
        if mesh.get_local_rank() == 1:
            own[3] = odd
        return norm([own], norm_type, mesh)

    for found in run_on_mesh((2,), body):
        assert math.isnan(found) if math.isnan(odd) else found == math.inf


def test_norms_of_ranks() -> None:
    values = wide(1000, torch.float32, -5, 3)
    wanted = {
        2: values.double().square().sum().sqrt().item(),
        1: values.double().abs().sum().item(),
        math.inf: values.abs().max().item(),
    }

    def body(mesh: DeviceMesh) -> list[float]:
        own = values.chunk(mesh.size())[mesh.get_local_rank()]
        return [norm([own[:40], own[40:], own[:0]], p, mesh) for p in wanted]

    found = {size: run_on_mesh((size,), body) for size in (1, 2, 3)}
    for rows in found.values():
        assert all(row == found[1][0] for row in rows)
    for one, exact in zip(found[1][0], wanted.values(), strict=True):
        assert math.isclose(one, exact, rel_tol=1e-12)
    assert all(norms == [0.0] for norms in run_on_mesh((2,), lambda mesh: [norm([], 2, mesh)]))


def test_norms_whose_squares_are_no_floats() -> None:
    for unit in (1e200, 1e-200):
        sides = torch.tensor([3 * unit, 4 * unit], dtype=torch.float64)
        assert math.isclose(alone(sides), 5 * unit, rel_tol=1e-15)
    assert alone(torch.full((4,), 1.7e308, dtype=torch.float64)) == math.inf
