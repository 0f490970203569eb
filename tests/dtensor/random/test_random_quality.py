"""Checks of the random bits, and that these checks notice generators that are broken."""

# pyright: reportPrivateUsage=false
# The parts of the generator are broken one by one.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import dtckpt.dtensor as dt
from dtckpt.dtensor import Box, DeviceMesh, Ragged, Shard, random
from dtckpt.dtensor.random import counter_rng, samplers
from dtckpt.dtensor.random.counter_rng import Keys, Words, fill

from ..rank_meshes import run_on_mesh
from .test_counter_rng import p_value

COUNT = 1 << 17
SHARDS = 4
LIMIT = 5.0
"""Deviations. Some hundred numbers are looked at, which are fixed, as the seeds are."""


def part(start: int, count: int, seed: int = 0, offset: int = 0) -> Tensor:
    """Return the uniform numbers of some neighbours in a long tensor."""
    made = torch.empty(count)
    keys = counter_rng.draw_keys(seed, offset)
    fill(made, (COUNT,), Box((start,), (count,)), keys, samplers.uniform())
    return made.double()


def correlation(a: Tensor, b: Tensor) -> float:
    """Return by how many deviations the correlation of uniform numbers is off 0."""
    return ((a - 0.5) * (b - 0.5) * 12).mean().item() * math.sqrt(len(a))


def unevenness(a: Tensor, b: Tensor, count: int = 24) -> float:
    """Return by how many deviations pairs miss an even spread over cells (chi-square)."""
    cells = (a * count).long() * count + (b * count).long()
    expected = len(a) / count**2
    found = torch.bincount(cells, minlength=count**2).double()
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    return (chi_square - count**2 + 1) / math.sqrt(2 * count**2)


def compared(a: Tensor, b: Tensor) -> Iterator[float]:
    """Yield how much two samples have to do with each other, at the same places and beside them."""
    for lag in (0, 1, 2, 7):
        for x, y in ((a[lag:], b[: len(b) - lag]), (a[: len(a) - lag], b[lag:])):
            yield abs(correlation(x, y))
            yield unevenness(x, y)


def between_neighbours() -> Iterator[float]:
    numbers = part(0, COUNT)
    for lag in (1, 2, 3, 8, 255, 256, 4096):
        yield abs(correlation(numbers[lag:], numbers[:-lag]))
        yield unevenness(numbers[lag:], numbers[:-lag])


def between_draws() -> Iterator[float]:
    draws = [part(0, COUNT, offset=offset) for offset in (0, 1, 2, 1 << 40)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            yield from compared(a, b)


def between_seeds() -> Iterator[float]:
    draws = [part(0, COUNT, seed=seed) for seed in (0, 1, 2, 1 << 63)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            yield from compared(a, b)


def between_shards() -> Iterator[float]:
    size = COUNT // SHARDS
    parts = [part(rank * size, size) for rank in range(SHARDS)]
    for i, a in enumerate(parts):
        for b in parts[:i]:
            yield from compared(a, b)


def of_one_draw() -> Iterator[float]:
    for offset in range(4):
        chance = p_value(part(0, COUNT, offset=offset))
        yield 0.0 if chance > 1e-4 else math.inf


CHECKS = (between_neighbours, between_draws, between_seeds, between_shards, of_one_draw)


@pytest.mark.parametrize("check", CHECKS)
def test_numbers_are_independent_and_uniform(check: Callable[[], Iterator[float]]) -> None:
    assert max(check()) < LIMIT


original_keys, original_pieces = counter_rng.draw_keys, counter_rng.pieces
original_signed = Words.signed


def keys_without_offset(seed: int, offset: int) -> Keys:
    return original_keys(seed, 0)


def keys_without_seed(seed: int, offset: int) -> Keys:
    return original_keys(0, offset)


def pieces_of_a_rank(shape: tuple[int, ...], box: Box, device: torch.device) -> object:
    return original_pieces(box.sizes, Box.whole(box.sizes), device)


def words_in_pairs(self: Words) -> Tensor:
    word = original_signed(self)
    word[1::2] = word[: len(word) // 2 * 2 : 2]
    return word


def words_that_are_small(self: Words) -> Tensor:
    word = original_signed(self)
    return word.sub_(word >> 6)


def words_beside(self: Words) -> Tensor:
    word = original_signed(self) >> 1
    return word.add_(word.roll(1))


BROKEN: list[tuple[str, str, object, Callable[[], Iterator[float]]]] = [
    ("draws are one", "draw_keys", keys_without_offset, between_draws),
    ("seeds are one", "draw_keys", keys_without_seed, between_seeds),
    ("ranks draw alike", "pieces", pieces_of_a_rank, between_shards),
    ("pairs are alike", "Words.signed", words_in_pairs, between_neighbours),
    ("upper parts are rare", "Words.signed", words_that_are_small, of_one_draw),
    ("neighbours are added", "Words.signed", words_beside, between_neighbours),
]


@pytest.mark.parametrize(
    ("part_of", "broken", "check"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_checks_notice_a_broken_generator(
    monkeypatch: pytest.MonkeyPatch,
    part_of: str,
    broken: object,
    check: Callable[[], Iterator[float]],
) -> None:
    monkeypatch.setattr(f"dtckpt.dtensor.random.counter_rng.{part_of}", broken)
    assert max(check()) > LIMIT


def test_shards_of_a_mesh_are_independent() -> None:
    sizes = (30_001, 40_000, 29_999, 31_072)

    def body(mesh: DeviceMesh) -> list[Tensor]:
        random.manual_seed(12, mesh)
        made = [
            dt.rand(SHARDS * 30_000, device_mesh=mesh, placements=[Shard(0)]),
            dt.rand(sum(sizes), device_mesh=mesh, placements=[Ragged(0, sizes)]),
        ]
        return [m.to_local().double() for m in made]

    for parts in zip(*run_on_mesh((SHARDS,), body), strict=True):
        for i, a in enumerate(parts):
            assert p_value(a) > 1e-4
            for b in parts[:i]:
                count = min(len(a), len(b))
                assert max(compared(a[:count], b[:count])) < LIMIT
