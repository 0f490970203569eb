"""Boxes and irregular layouts against sets of indices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.dtensor.geometry.box import Box, first_overlap
from dtckpt.dtensor.geometry.irregular import IrregularLayout
from dtckpt.errors import PlacementError


def elements(box: Box) -> set[tuple[int, ...]]:
    """Every index in the box."""
    spans = zip(box.offsets, box.ends, strict=True)
    return set(itertools.product(*(range(start, end) for start, end in spans)))


@st.composite
def boxes(draw: st.DrawFn, ndim: int = 2) -> Box:
    """A small box near the origin."""
    offsets = tuple(draw(st.integers(0, 4)) for _ in range(ndim))
    return Box(offsets, tuple(draw(st.integers(0, 4)) for _ in range(ndim)))


@given(boxes(), boxes())
def test_intersection(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert a.contains(b) == (elements(b) <= elements(a))
    if common:
        assert common.relative_to(a).translate(a.offsets) == common


@given(boxes())
def test_text_round_trip_and_halves(box: Box) -> None:
    assert Box.parse(str(box)) == box
    if box.numel > 1:
        first, second = box.halves()
        assert sorted(elements(first)) + sorted(elements(second)) == sorted(elements(box))


@given(st.lists(boxes(), max_size=6))
def test_first_overlap_finds_one_if_there_is_one(found: list[Box]) -> None:
    expected = any(a.intersect(b) for a, b in itertools.combinations(found, 2))
    overlap = first_overlap(found)
    assert (overlap is not None) == expected
    assert overlap is None or overlap[0].intersect(overlap[1]) is not None


def test_a_box_of_no_dims_holds_one_element() -> None:
    box = Box((), ())
    assert box.numel == 1
    assert box.intersect(box) == box
    assert Box.parse(str(box)) == box


@pytest.mark.parametrize("text", ["", "[", "[1]", "[1:2", "[2:1]", "[a:b]", "x[0:1]"])
def test_malformed_boxes_are_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        Box.parse(text)


def test_irregular_layouts_must_cover_without_overlap() -> None:
    left, right = Box((0,), (3,)), Box((3,), (1,))
    layout = IrregularLayout((4,), ((1, right), (0, left), (5, left), (2, Box((0,), (0,)))))
    layout.validate()
    assert layout.boxes() == [left, right]
    assert IrregularLayout.from_json(layout.to_json()) == layout
    with pytest.raises(PlacementError, match="3 of the 4"):
        IrregularLayout((4,), ((0, left),)).validate()
    with pytest.raises(PlacementError, match="overlap"):
        IrregularLayout((4,), ((0, left), (1, Box((2,), (2,))))).validate()
    with pytest.raises(PlacementError, match="does not lie"):
        IrregularLayout((3,), ((0, left), (1, right))).validate()
