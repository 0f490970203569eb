from __future__ import annotations

from dtckpt.checkpoint.examining.balance import Balance, balance_of, bytes_by_rank
from dtckpt.dtensor import Box, IrregularLayout, Layout, Mesh, Replicate, Shard


def test_uneven_shards_copies_and_boxes() -> None:
    rows = Layout(Mesh((2,)), (Shard(0),), (5, 4))
    whole = Layout(Mesh((2,)), (Replicate(),), (3,))
    boxes = IrregularLayout((4,), ((1, Box((0,), (3,))), (2, Box((3,), (1,)))))
    held = bytes_by_rank([(rows, 4), (whole, 4), (boxes, 2), (boxes, 2)])
    assert held == {0: 48 + 12, 1: 32 + 12 + 12, 2: 4}


def test_balance_has_the_extremes_and_what_they_mean() -> None:
    balance = balance_of({3: 10, 5: 30, 7: 20, 9: 30})
    assert balance == Balance(num=4, total_bytes=90, least_bytes=10, most_bytes=30, least=3, most=5)
    assert balance is not None
    assert balance.most_over_mean == 30 / 22.5
    empty = balance_of({0: 0})
    assert empty is not None
    assert empty.most_over_mean == 1
    assert balance_of({}) is None
