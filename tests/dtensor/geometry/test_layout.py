"""Layouts against a brute-force NumPy oracle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch.fx
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.dtensor.geometry.box import Box
from dtckpt.dtensor.geometry.irregular import IrregularLayout
from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.dtensor.geometry.mesh import Mesh
from dtckpt.dtensor.geometry.placement import (
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    parse_placement,
    parse_placements,
)
from dtckpt.errors import PlacementError, UnsupportedOp

from ..oracle import local_array
from ..strategies import layouts, meshes


@given(layouts())
def test_local_boxes_are_those_of_the_oracle(layout: Layout) -> None:
    whole = np.arange(layout.numel).reshape(layout.shape)
    for coordinate in layout.mesh.coordinates():
        box = layout.box(coordinate)
        expected = local_array(layout, coordinate, whole)
        assert box.sizes == expected.shape
        assert np.array_equal(whole[box.slices], expected)


@given(layouts())
def test_coordinates_cover_every_element_once_per_replica(layout: Layout) -> None:
    count = np.zeros(layout.shape, dtype=int)
    for coordinate in layout.mesh.coordinates():
        count[layout.box(coordinate).slices] += 1
    assert (count == layout.num_replicas).all()


@given(layouts())
def test_cells_cover_every_element_once(layout: Layout) -> None:
    count = np.zeros(layout.shape, dtype=int)
    for cell in layout.cells():
        count[layout.cell_box(cell).slices] += 1
    assert (count == 1).all()


@given(layouts())
def test_coordinate_is_the_inverse_of_cell_and_replica(layout: Layout) -> None:
    for coordinate in layout.mesh.coordinates():
        cell, replica = layout.cell(coordinate), layout.replica(coordinate)
        assert layout.coordinate(cell, replica) == coordinate


@given(layouts(), st.data())
def test_cells_meeting_a_box_are_found_by_arithmetic(layout: Layout, data: st.DataObject) -> None:
    box = data.draw(boxes_in(layout.shape))
    expected = {
        (cell, common)
        for cell in layout.cells()
        if (common := layout.cell_box(cell).intersect(box)) is not None
    }
    assert set(layout.cells_meeting(box)) == expected
    assert sum(common.numel for _, common in layout.cells_meeting(box)) == box.numel


@given(layouts(), st.data())
def test_holders_of_a_box(layout: Layout, data: st.DataObject) -> None:
    box = data.draw(boxes_in(layout.shape))
    expected = [c for c in layout.mesh.coordinates() if layout.box(c).contains(box)]
    if not box.is_empty:
        assert sorted(layout.holders(box)) == expected


@given(layouts())
def test_json_round_trip(layout: Layout) -> None:
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert hash(again) == hash(layout)
    assert parse_placements(", ".join(map(str, layout.placements))) == layout.placements


@given(meshes())
def test_mesh_ranks_and_coordinates_are_inverse(mesh: Mesh) -> None:
    ranks = [mesh.rank(coordinate) for coordinate in mesh.coordinates()]
    assert tuple(ranks) == mesh.all_ranks()
    assert [mesh.coordinate(rank) for rank in ranks] == list(mesh.coordinates())
    assert mesh.coordinate(mesh.size) is None


def test_planning_needs_no_scan_of_the_mesh() -> None:
    mesh = Mesh((16, 128, 8), ("replicate", "fsdp", "tp"))
    layout = Layout(mesh, (Replicate(), Shard(0, 1), Shard(0, 0)), (8192, 4096))
    assert layout.box((3, 1, 2)) == Box((2 * 1024 + 8, 0), (8, 4096))
    assert len(list(layout.cells_meeting(Box((0, 0), (9, 1))))) == 2
    assert layout.num_replicas == 16


def test_an_explicit_order_that_is_the_default_is_dropped() -> None:
    mesh = Mesh((2, 2))
    assert Layout(mesh, (Shard(0, 0), Shard(-1, 1)), (8,)) == Layout(mesh, (Shard(0),) * 2, (8,))
    assert Layout(mesh, (Shard(0, 1), Shard(0, 0)), (8,)) != Layout(mesh, (Shard(0),) * 2, (8,))


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(0),), "as many placements"),
        ((Shard(2), Replicate()), "names dim 2"),
        ((Shard(0, 1), Shard(0)), "orders 0 to 1"),
        ((Ragged(0, (3, 3)), Ragged(0, (3, 3))), "only one axis"),
        ((Ragged(0, (3, 4)), Replicate()), "2 sizes that sum to 6"),
        ((Ragged(0, (3, 2, 1)), Replicate()), "needs 2 sizes"),
    ],
)
def test_impossible_layouts_are_refused(placements: tuple[Placement, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Layout(Mesh((2, 2)), placements, (6, 4))


@pytest.mark.parametrize("text", ["S", "S(a)", "R(0)", "P(mean)", "Ragged(0:)", "", "S(0)@"])
def test_unknown_placements_are_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        parse_placement(text)


def test_dims_and_orders_are_integers() -> None:
    number: Any = np.int64(1)
    made = Shard(number, order=number)
    assert type(made.dim) is type(made.order) is int
    assert str(made) == "S(1)@1"
    for wrong in ("0", 1.0, True):
        value: Any = wrong
        with pytest.raises(PlacementError, match="dim of a Shard must be an int"):
            Shard(value)
        with pytest.raises(PlacementError, match="order of a Shard must be an int"):
            Shard(0, value)
        with pytest.raises(PlacementError, match="dim of a Ragged must be an int"):
            Ragged(value, (1,))


def test_what_stands_for_a_number_in_graphs_is_left_out_of_them() -> None:
    varying: Any = torch.fx.Proxy(torch.fx.Graph().placeholder("n"))
    with pytest.raises(UnsupportedOp, match="dim of a Shard must not vary within a graph"):
        Shard(varying)


def test_placements_answer_the_questions_of_torch() -> None:
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Ragged(1, (1,)).is_shard(1)
    assert Replicate().is_replicate()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")


@pytest.mark.parametrize(
    "value", [None, {}, {"shape": [2], "axes": ["a", "b"]}, {"shape": [0], "axes": ["a"]}, [1]]
)
def test_malformed_meshes_are_refused(value: object) -> None:
    with pytest.raises(PlacementError):
        Mesh.from_json(value)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box, possibly empty, inside of a tensor of ``shape``."""
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def test_torch_placements_and_other_things_are_not_taken_for_ours() -> None:
    import torch.distributed.tensor as torch_tensor

    for odd in ((torch_tensor.Shard(0),), ("S(0)",), Shard(0), (None,)):
        with pytest.raises(PlacementError, match="one per axis"):
            Layout(Mesh((2,)), odd, (4,))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("coordinate", [(2,), (-1,), (0, 0), ()])
def test_coordinates_outside_of_the_mesh_are_refused(coordinate: tuple[int, ...]) -> None:
    layout = Layout(Mesh((2,)), (Shard(0),), (4,))
    with pytest.raises(PlacementError, match="outside of a mesh"):
        layout.box(coordinate)
    with pytest.raises(PlacementError):
        layout.coordinate((9,))
    with pytest.raises(PlacementError):
        layout.coordinate((0,), replica=1)


def test_sequences_become_tuples_and_odd_numbers_are_refused() -> None:
    layout = Layout(Mesh([2, 2]), [Shard(0), Ragged(1, [1, 3])], [4, 4])  # pyright: ignore
    assert layout == Layout(Mesh((2, 2)), (Shard(0), Ragged(1, (1, 3))), (4, 4))
    assert hash(layout)
    for shape in ("22", [2.5], [True], [None], 3, (-4,)):
        with pytest.raises(PlacementError):
            Layout.replicated(Mesh((2,)), shape)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "value",
    [
        {"mesh": {"shape": [2], "axes": ["a"]}, "placements": ["R"], "shape": ["x"]},
        {"mesh": {"shape": [1e400], "axes": ["a"]}, "placements": ["R"], "shape": [2]},
        {
            "mesh": {"shape": [2], "axes": ["a"]},
            "placements": ["S(" + "9" * 5000 + ")"],
            "shape": [2],
        },
        {"mesh": {"shape": [2], "axes": ["a"]}, "placements": ["S(\u0663)"], "shape": [2]},
        {"mesh": {"shape": [2], "axes": ["a"]}, "placements": [3], "shape": [2]},
        {"shape": [2], "boxes": [[0]]},
        {"shape": [2], "boxes": [["0", "[0:2]"]]},
        {"shape": [2], "boxes": [[0, "[0:" + "9" * 5000 + "]"]]},
    ],
)
def test_malformed_layouts_are_refused(value: dict[str, object]) -> None:
    kind = IrregularLayout if "boxes" in value else Layout
    with pytest.raises(PlacementError):
        kind.from_json(value)


def test_a_huge_mesh_is_cheap() -> None:
    mesh = Mesh((10**9,))
    assert Layout(mesh, (Shard(0),), (10**12,)).box((10**9 - 1,)).sizes == (1000,)


def test_columns_are_checked_for_overlap_as_fast_as_rows() -> None:
    mesh = Mesh((4096,))
    layout = Layout(mesh, (Shard(1),), (8, 8192))
    pieces = [(rank, layout.box((rank,))) for rank in range(4096)]
    IrregularLayout((8, 8192), tuple(pieces)).validate()  # minutes, if every pair were compared


@pytest.mark.parametrize("text", ["", "dp", "dp=", "=2", "dp=-1", "dp=" + "9" * 5000])
def test_texts_that_are_no_mesh(text: str) -> None:
    with pytest.raises(PlacementError, match="not a mesh"):
        Mesh.parse(text)


def test_irregular_layouts_have_a_shape() -> None:
    with pytest.raises(PlacementError, match="cannot have the shape"):
        IrregularLayout((2, -1), ())


def test_placements_that_nobody_knows_are_refused() -> None:
    class Cyclic(Placement):
        """Would be taken for replicated."""

    for placement in (Placement(), Cyclic()):
        with pytest.raises(PlacementError, match="placements must be a sequence of dtckpt's"):
            Layout(Mesh((2,)), (placement,), (4,))
