"""Words that several messages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for a message, runs shortened.

    >>> ranks_text([0, 1, 2, 5]), ranks_text([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs = list(_runs(sorted(ranks)))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {text}" if single else f"ranks {text}"


def some_names(names: Sequence[str], most: int = 10) -> str:
    """Return the first names of many, for a message.

    >>> some_names(["a", "b", "c"], 2), some_names([])
    ('a, b and 1 more', 'nothing')
    """
    if not names:
        return "nothing"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def covering(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest beginnings of names, up to a /, that are beginnings of no others.

    >>> covering(["model/a", "model/b", "opt/x"], ["opt/y"])
    ['model', 'opt/x']
    """
    taken = {"/".join(parts[:n]) for parts in map(_parts, others) for n in range(1, len(parts) + 1)}
    found: dict[str, None] = {}
    for name in names:
        parts = _parts(name)
        ends = ("/".join(parts[:n]) for n in range(1, len(parts) + 1))
        found[next((end for end in ends if end not in taken), name)] = None
    return list(found)


def _parts(name: str) -> list[str]:
    return name.split("/")


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    start = None
    for i, rank in enumerate(ranks):
        start = rank if start is None else start
        if i + 1 == len(ranks) or ranks[i + 1] != rank + 1:
            yield start, rank
            start = None
