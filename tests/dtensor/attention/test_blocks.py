"""Which scores are computed where, against the mask of the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from dtckpt.dtensor import HeadTail, Ragged, Shard, SplitPlacement
from dtckpt.dtensor.attention.blocks import Block, Sequences


@dataclass(frozen=True, slots=True)
class TailHead(SplitPlacement):
    """The chunks of HeadTail, the later one first."""

    form: ClassVar[str] = "TailHead(dim)"

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        return HeadTail(self.dim).sizes_over(size, count)

    def ranges_over(self, size: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(held[::-1] for held in HeadTail(self.dim).ranges_over(size, count))


LENGTHS = [(24, 24), (13, 13), (7, 12), (12, 5), (3, 3), (0, 4), (4, 0)]


def sequences(
    placement: SplitPlacement, lengths: tuple[int, int], count: int, *, is_causal: bool
) -> Sequences:
    queries, keys = (placement.ranges_over(length, count) for length in lengths)
    return Sequences(queries, keys, is_causal)


def positions(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([np.arange(start, start + size) for start, size in ranges])


def scores(block: Block) -> np.ndarray:
    """Return ones where a block has scores that are not masked."""
    seen = np.ones((block.rows[1] - block.rows[0], block.columns[1] - block.columns[0]), dtype=int)
    return seen if block.diagonal is None else np.tril(seen, block.diagonal)


def work(divided: Sequences) -> list[int]:
    """Return how many scores each rank computes."""
    ranks = range(divided.num_ranks)
    return [sum(scores(b).sum() for s in ranks for b in divided.blocks(rank, s)) for rank in ranks]


@pytest.mark.parametrize("placement", [HeadTail(0), Shard(0), TailHead(0)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_are_the_scores_that_the_mask_leaves(
    placement: SplitPlacement, is_causal: bool
) -> None:
    for lengths in LENGTHS:
        for count in (1, 2, 3, 4):
            divided = sequences(placement, lengths, count, is_causal=is_causal)
            for rank in range(count):
                own = positions(divided.queries[rank])
                for source in range(count):
                    others = positions(divided.keys[source])
                    computed = np.zeros((len(own), len(others)), dtype=int)
                    assert divided.sees(rank, source) == bool(divided.blocks(rank, source))
                    for block in divided.blocks(rank, source):
                        rows, columns = slice(*block.rows), slice(*block.columns)
                        seen = scores(block)
                        assert seen.any()
                        computed[rows, columns] += seen
                    expected = np.ones(computed.shape, dtype=int)
                    if is_causal:
                        expected = (own[:, None] >= others[None]).astype(int)
                    assert (computed == expected).all()


def test_under_head_tail_every_rank_computes_as_much_of_what_is_causal() -> None:
    for count in (2, 3, 4, 8):
        length = 2 * count * 16
        even = work(sequences(HeadTail(0), (length, length), count, is_causal=True))
        assert len(set(even)) == 1
        assert sum(even) == length * (length + 1) // 2
        uneven = work(sequences(Shard(0), (length, length), count, is_causal=True))
        assert max(uneven) > (2 - 1 / count) * 0.95 * max(even)


def test_work_differs_by_little_where_lengths_do_not_divide() -> None:
    found = work(sequences(HeadTail(0), (1003, 1003), 4, is_causal=True))
    assert max(found) < 1.01 * min(found)


def test_a_rank_needs_one_or_two_blocks_of_another() -> None:
    divided = sequences(HeadTail(0), (64, 64), 4, is_causal=True)
    for rank in range(4):
        for source in range(4):
            assert len(divided.blocks(rank, source)) == 1


def test_keys_stop_where_nobody_sees_them() -> None:
    causal = sequences(Shard(0), (12, 12), 4, is_causal=True)
    assert causal.stops == ((1, 3), (1, 2), (1, 1), (0, 0))
    ragged = sequences(Ragged(0, (0, 12)), (12, 12), 2, is_causal=False)
    assert ragged.stops == ((0, 0), (0, 0))
