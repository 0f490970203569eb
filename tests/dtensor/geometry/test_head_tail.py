"""``HeadTail``: a chunk from either end of a dim."""

from __future__ import annotations

import pytest

from dtckpt.dtensor.geometry.box import Box
from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.dtensor.geometry.mesh import Mesh
from dtckpt.dtensor.geometry.placement import HeadTail, Ragged, Shard, parse_placement
from dtckpt.errors import PlacementError


def test_chunks_are_as_even_as_they_can_be() -> None:
    assert HeadTail(0).sizes_over(16, 4) == (4, 4, 4, 4)
    assert HeadTail(0).ranges_over(16, 4)[0] == ((0, 2), (14, 2))
    assert HeadTail(0).sizes_over(9, 4) == (3, 2, 2, 2)
    assert HeadTail(0).sizes_over(1, 3) == (1, 0, 0)
    for size in range(40):
        sizes = HeadTail(0).sizes_over(size, 5)
        assert sum(sizes) == size
        assert max(sizes) - min(sizes) <= 1
        assert not HeadTail(0).misfit(size, 5)


def test_the_last_rank_holds_the_middle_in_one() -> None:
    layout = Layout(Mesh((2,)), (HeadTail(0),), (8,))
    assert [box for box, _ in layout.parts((0,))] == [Box((0,), (2,)), Box((6,), (2,))]
    assert [box for box, _ in layout.parts((1,))] == [Box((2,), (4,))]


def test_text_and_one_coordinate() -> None:
    assert parse_placement("HeadTail(1)") == HeadTail(1)
    one = Layout(Mesh((1,)), (HeadTail(0),), (4,))
    assert not one.is_dealt
    assert one.lies_as(Layout.replicated(Mesh((1,)), (4,)))
    assert Layout(Mesh((2,)), (HeadTail(-1),), (4, 4)).placements == (HeadTail(1),)


def test_other_axes_shard_its_pieces() -> None:
    mesh = Mesh((2, 2))
    layout = Layout(mesh, (HeadTail(0), Shard(0)), (8,))
    assert [str(box) for box, _ in layout.parts((0, 1))] == ["[6:8]"]
    with pytest.raises(PlacementError, match="only one axis may cut dim 0"):
        Layout(mesh, (HeadTail(0), Ragged(0, (4, 4))), (8,))
