"""Which blocks of the scores a rank computes, where each rank has some ranges of the sequence.

Rows of the scores are positions of queries, columns those of keys. A rank has its own rows, and
sees the columns of one rank after the other. All of it follows from who has which ranges, so every
rank knows what the others compute, and need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..comm.caches import remembered

Ranges = tuple[tuple[int, int], ...]
"""Start and size of ranges of positions: what a rank has, one after the other."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some of a rank's queries with some of the keys that it sees at a time.

    Bounds are indices of what ranks hold, not positions.
    """

    rows: tuple[int, int]
    """First query and end of the queries."""
    columns: tuple[int, int]
    """First key and end of the keys."""
    diagonal: int | None
    """Query i sees the keys up to i + diagonal, counted from the first of both; None sees all."""


@remembered(1 << 12)
def blocks_of(queries: Ranges, keys: Ranges, *, is_causal: bool) -> tuple[Block, ...]:
    """Return the blocks of the queries of one rank and the keys of one, without those masked whole.

    Causal: the query at a position sees keys at this and earlier ones, counted from the beginning
    of both sequences, as torch does. Blocks are as few as they can be.

    >>> head_tail = (((0, 2), (6, 2)), ((2, 4),))
    >>> blocks_of(head_tail[0], head_tail[1], is_causal=True)
    (Block(rows=(2, 4), columns=(0, 4), diagonal=None),)
    >>> blocks_of(head_tail[1], head_tail[0], is_causal=True)
    (Block(rows=(0, 4), columns=(0, 2), diagonal=None),)
    """
    height, width = _total(queries), _total(keys)
    if not height or not width:
        return ()
    if not is_causal:
        return (Block((0, height), (0, width), None),)
    if queries == keys and queries == tuple(sorted(queries)):
        # In order on both sides: a triangle, whatever is missing between.
        return (Block((0, height), (0, width), 0),)
    found: list[Block] = []
    for row, first, size in _placed(queries):
        rows, seen = (row, row + size), 0
        others: list[Block] = []
        for column, start, count in _placed(keys):
            columns, is_whole = (column, column + count), start + count - 1 <= first
            if is_whole and column == seen:
                seen += count
            elif is_whole or start <= first + size - 1:
                others.append(Block(rows, columns, None if is_whole else first - start))
        if seen:
            last = found[-1] if found else None
            if last is not None and last.rows[1] == row and _is_whole(last, seen):
                found[-1] = Block((last.rows[0], row + size), (0, seen), None)
            else:
                found.append(Block(rows, (0, seen), None))
        found += others
    return tuple(found)


def _is_whole(block: Block, width: int) -> bool:
    return block.diagonal is None and block.columns == (0, width)


def _placed(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield (index of its first in what the rank holds, its position, size) of every range."""
    at = 0
    for start, size in ranges:
        if size:
            yield at, start, size
        at += size


def _total(ranges: Ranges) -> int:
    return sum(size for _, size in ranges)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which positions the ranks have, and what each of them computes."""

    queries: tuple[Ranges, ...]
    """By position of the rank among those that share the sequence."""
    keys: tuple[Ranges, ...]
    is_causal: bool
    stops: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """For the keys of every rank, after how many steps round the first and the last other rank sees
    them; twice 0 if none does.

    >>> rows = (((0, 2),), ((2, 2),), ((4, 2),))
    >>> Sequences(rows, rows, is_causal=True).stops
    ((1, 2), (1, 1), (0, 0))
    """

    def __post_init__(self) -> None:
        count = self.num_ranks
        seen = (
            [n for n in range(1, count) if self.sees((source + n) % count, source)]
            for source in range(count)
        )
        object.__setattr__(self, "stops", tuple((s[0], s[-1]) if s else (0, 0) for s in seen))

    @property
    def num_ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.queries)

    def num_keys(self, rank: int) -> int:
        """Return how many keys a rank has."""
        return _total(self.keys[rank])

    def sees(self, rank: int, source: int) -> bool:
        """Whether some query of a rank sees a key of another, or its own."""
        rows = [start + size for start, size in self.queries[rank] if size]
        columns = [start for start, size in self.keys[source] if size]
        return bool(rows and columns) and (not self.is_causal or min(columns) < max(rows))

    def blocks(self, rank: int, source: int) -> tuple[Block, ...]:
        """Return the blocks that a rank computes of the keys of another, or its own."""
        return blocks_of(self.queries[rank], self.keys[source], is_causal=self.is_causal)
