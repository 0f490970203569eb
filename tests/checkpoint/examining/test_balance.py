from __future__ import annotations

from dtckpt.checkpoint.examining.balance import bytes_by_rank
from dtckpt.dtensor import Box, IrregularLayout, Layout, Mesh, Replicate, Shard


def test_uneven_shards_copies_and_boxes() -> None:
    rows = Layout(Mesh((2,)), (Shard(0),), (5, 4))
    whole = Layout(Mesh((2,)), (Replicate(),), (3,))
    boxes = IrregularLayout((4,), ((1, Box((0,), (3,))), (2, Box((3,), (1,)))))
    held = bytes_by_rank([(rows, 4), (whole, 4), (boxes, 2), (boxes, 2)])
    assert held == {0: 48 + 12, 1: 32 + 12 + 12, 2: 4}
