"""The random bits: quality, distributions, and independence of the part that is asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import Box
from dtckpt.dtensor.random import samplers
from dtckpt.dtensor.random.counter_rng import Sampler, Words, draw_keys, fill, scattered_indices

CPU = torch.device("cpu")


def sample(
    sampler: Any, *shape: int, offset: int = 0, seed: int = 0, dtype: Any = torch.float32
) -> Tensor:
    """Return one draw of a whole tensor."""
    made = torch.empty(shape, dtype=dtype)
    fill(made, shape, Box.whole(shape), draw_keys(seed, offset), sampler)
    return made


def p_value(fractions: Tensor) -> float:
    """Return the probability of a larger Kolmogorov-Smirnov distance from the uniform numbers."""
    found = np.sort(fractions.double().numpy().ravel())
    steps = np.arange(1, len(found) + 1) / len(found)
    distance = max((steps - found).max(), (found - steps + 1 / len(found)).max())
    x = distance * (math.sqrt(len(found)) + 0.12 + 0.11 / math.sqrt(len(found)))
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 60)]
    return min(1.0, max(0.0, sum(terms)))


def normal_cdf(x: Tensor) -> Tensor:
    return (1 + torch.erf(x.double() / math.sqrt(2))) / 2


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (2, 3, 4), (1, 3, 1, 2), (0, 3)])
def test_every_box_holds_its_part_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = sample(samplers.uniform(), *shape)
    normal = sample(samplers.normal(), *shape)
    for offsets in itertools.product(*[range(n + 1) for n in shape]):
        for sizes in itertools.product(
            *[range(n - a + 1) for n, a in zip(shape, offsets, strict=True)]
        ):
            box = Box(offsets, sizes)
            for sampler, expected in ((samplers.uniform(), whole), (samplers.normal(), normal)):
                part = torch.empty(sizes)
                fill(part, shape, box, draw_keys(0, 0), sampler)
                assert torch.equal(part, expected[box.slices])


DISTRIBUTIONS: list[tuple[str, Any]] = [
    ("uniform", samplers.uniform()),
    ("uniform_between", samplers.uniform(-0.3, 0.7)),
    ("normal", samplers.normal(1, 2)),
    ("bernoulli", samplers.bernoulli(0.3)),
    ("integers", samplers.integers(-3, 14)),
    ("exponential", samplers.exponential(0.5)),
    ("geometric", samplers.geometric(0.2)),
    ("log_normal", samplers.log_normal(0, 0.5)),
    ("cauchy", samplers.cauchy(1, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "sampler", [s for _, s in DISTRIBUTIONS], ids=[n for n, _ in DISTRIBUTIONS]
)
def test_large_tensors_are_made_in_pieces_that_do_not_show(
    sampler: Sampler, dtype: torch.dtype
) -> None:
    shape = (3, 20_001)
    whole = sample(sampler, *shape, dtype=dtype)
    for box in (Box((1, 0), (2, 20_001)), Box((0, 77), (3, 19_000)), Box((2, 20_000), (1, 1))):
        part = torch.empty(box.sizes[::-1], dtype=dtype).t()
        fill(part, shape, box, draw_keys(0, 0), sampler)
        assert torch.equal(part, whole[box.slices])


def test_values_never_change() -> None:
    # Checkpoints carry seed and offset: the same ones must give the same numbers for ever.
    words = Words(scattered_indices((3,), Box.whole((3,)), CPU), draw_keys(5, 7)).signed()
    assert words.tolist() == WORDS
    assert draw_keys(2**64 - 1, 2**64 - 1)[0] == KEY


WORDS = [8575930533415731077, -3570243204939751786, -6065066490682839623]
KEY = -310520546641296350


CDFS: list[tuple[str, Any, Callable[[Tensor], Tensor]]] = [
    ("uniform", samplers.uniform(), lambda x: x),
    ("uniform_between", samplers.uniform(-2, 5), lambda x: (x + 2) / 7),
    ("normal", samplers.normal(1, 2), lambda x: normal_cdf((x - 1) / 2)),
    ("exponential", samplers.exponential(3), lambda x: -torch.expm1(-3 * x.double())),
    ("log_normal", samplers.log_normal(), lambda x: normal_cdf((x.log() - 1) / 2)),
    ("cauchy", samplers.cauchy(1, 2), lambda x: ((x - 1) / 2).double().atan() / math.pi + 0.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("sampler", "cdf"), [c[1:] for c in CDFS], ids=[c[0] for c in CDFS])
def test_distributions(sampler: Any, cdf: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    assert p_value(cdf(sample(sampler, 300_000, dtype=dtype))) > 1e-3


def test_uniform_over_many_draws_of_few_elements() -> None:
    drawn = torch.stack([sample(samplers.uniform(), 256, offset=k) for k in range(1500)])
    within = [p_value(row) for row in drawn[:400]]
    across = [p_value(column) for column in drawn.t()]
    for found in (within, across):
        assert p_value(torch.tensor(found)) > 1e-3
    centred = (drawn - 0.5) * math.sqrt(12)
    for table, count in ((centred, 256), (centred.t(), 1500)):  # draws; then elements
        pairs = (table @ table.t()).div_(math.sqrt(count)).triu(1)
        pairs = pairs[pairs != 0]
        assert abs(pairs.std().item() - 1) < 0.02
        assert pairs.abs().max().item() < 6.5


def test_neighbours_in_a_large_draw_are_independent() -> None:
    drawn = sample(samplers.uniform(), 1 << 20, offset=3).double()
    other = sample(samplers.uniform(), 1 << 20, offset=4).double()
    centred = (drawn - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 16, 255, 256, 1000, 4096, 65536):
        assert abs((centred[lag:] * centred[:-lag]).mean().item()) * 1024 < 4.5
        assert abs(_cells(drawn[lag:], drawn[:-lag])) < 4.5
    assert abs(_cells(drawn, other)) < 4.5
    assert abs(_cells(drawn, sample(samplers.uniform(), 1 << 20, seed=1, offset=3).double())) < 4.5


def _cells(a: Tensor, b: Tensor, count: int = 64) -> float:
    """Return by how many deviations the pairs miss an even spread over cells (chi-square)."""
    cells = (a * count).long() * count + (b * count).long()
    expected = len(a) / count**2
    found = torch.bincount(cells, minlength=count**2).double()
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    return (chi_square - count**2) / math.sqrt(2 * count**2)


def test_all_bits_are_even_and_independent() -> None:
    scattered = scattered_indices((1 << 16,), Box.whole((1 << 16,)), CPU)
    words = Words(scattered, draw_keys(0, 1))
    tables = [
        _bits(w.positive()) for w in (words, words.stream(1), Words(scattered, draw_keys(0, 2)))
    ]
    first = tables[0]
    assert first.mean(0).abs().max().item() * 256 < 5
    for other in tables:
        pairs = (first.t() @ other) / 256
        if other is first:
            pairs.fill_diagonal_(0)
        assert pairs.abs().max().item() < 5.5
    for lag in (1, 2, 4, 256, 4096):
        assert (first[lag:].t() @ first[:-lag] / 256).abs().max().item() < 5.5


def _bits(words: Tensor) -> Tensor:
    """Return +1 or -1 for each of the 63 bits of every word."""
    return (words.unsqueeze(1) >> torch.arange(63)).bitwise_and_(1).float() * 2 - 1


def test_whole_numbers() -> None:
    dice = sample(samplers.integers(1, 7), 60_000)
    counts = torch.bincount(dice.long(), minlength=7)[1:]
    assert ((counts - 10_000) ** 2 / 10_000).sum().item() < 25
    top = 1 << 63
    for low, high in ((0, top), (-top, top), (-top // 2, top), (-5, top - 6), (3, 7 << 50)):
        wide = sample(samplers.integers(low, high), 50_000, dtype=torch.int64)
        assert low <= wide.min().item() <= low + (high - low) / 1000
        assert high - 1 - (high - low) / 1000 <= wide.max().item() < high
        assert p_value((wide.double() - float(low)) / float(high - low)) > 1e-3
    heads = sample(samplers.bernoulli(0.25), 100_000, dtype=torch.bool)
    assert abs(heads.double().mean().item() - 0.25) < 0.006
    assert not sample(samplers.bernoulli(0), 1000).any()
    assert sample(samplers.bernoulli(1), 1000).all()
    trials = sample(samplers.geometric(0.25), 100_000, dtype=torch.int64)
    assert trials.min().item() == 1
    assert abs(trials.double().mean().item() - 4) < 0.06


def test_ends_of_ranges() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        unit = sample(samplers.uniform(), 1 << 16, dtype=dtype)
        assert 0 <= unit.min().item() < unit.max().item() < 1
        moved = sample(samplers.uniform(1, 1.01), 1 << 16, dtype=dtype)
        assert (
            1 <= moved.min().item() <= moved.max().item() < torch.tensor(1.01, dtype=dtype).item()
        )
        assert sample(samplers.exponential(), 1 << 16, dtype=dtype).min().item() > 0
    assert (sample(samplers.uniform(2, 2), 8) == 2).all()


def test_complex_normal_numbers_have_independent_parts() -> None:
    drawn = sample(samplers.normal_of(torch.complex64), 100_000, dtype=torch.complex64)
    for part in (drawn.real, drawn.imag):
        assert p_value(normal_cdf(part * math.sqrt(2))) > 1e-3
    assert abs((drawn.real * drawn.imag).mean().item()) < 0.01
