"""Words that several messages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for a message, runs shortened.

    >>> ranks_text([0, 1, 2, 5]), ranks_text([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs = list(_runs(sorted(ranks)))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {text}" if single else f"ranks {text}"


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    start = None
    for i, rank in enumerate(ranks):
        start = rank if start is None else start
        if i + 1 == len(ranks) or ranks[i + 1] != rank + 1:
            yield start, rank
            start = None
