"""Parts of tensors without a mesh, moved into any layout and back, against NumPy."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dtckpt.dtensor import (
    Box,
    DeviceMesh,
    DTensor,
    IrregularLayout,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    redistribute_parts,
)
from dtckpt.errors import PlacementError
from tests.ranks import RanksFailed

from ..geometry.test_flows import SHAPES, random_irregular
from ..rank_meshes import collectives, run_on_mesh
from .test_redistribute import random_placements

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]
RANKS = range(4)
MESHES = [Mesh((4,)), Mesh((2, 2), ranks=(3, 1, 0, 2)), Mesh((2,), ranks=(2, 1))]
ROWS = IrregularLayout((6, 2), tuple((i % 3, Box((i, 0), (1, 2))) for i in range(6)))


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Different bytes everywhere, as far as the dtype has them."""
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(numel) % 3 == 0).view(shape)
    integers = torch.arange(numel * dtype.itemsize, dtype=torch.int64) % 113
    return integers.to(torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def parts_of(
    whole: torch.Tensor, layout: Layout | IrregularLayout, rank: int
) -> dict[Box, torch.Tensor]:
    return {box: whole[box.slices] for box in layout.held_by(rank)}


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_any_layout_of_either_kind_to_any_other(mesh_shape: tuple[int, ...]) -> None:
    rng = random.Random(11)
    cases: list[tuple[Layout | IrregularLayout, Layout | IrregularLayout, torch.dtype]] = []
    while len(cases) < 120:
        shape = rng.choice(SHAPES)
        found: list[Layout | IrregularLayout] = []
        for irregular in rng.choice([(True, True), (True, False), (False, True)]):
            mesh = rng.choice(MESHES)
            placements = random_placements(rng, mesh.shape, shape)
            placements = tuple(Replicate() if p.is_partial() else p for p in placements)
            found.append(
                random_irregular(rng, rng.choice([RANKS, (1, 3)]), shape)
                if irregular
                else Layout(mesh, placements, shape)
            )
        if 0 not in shape or not any(isinstance(layout, IrregularLayout) for layout in found):
            cases.append((found[0], found[1], rng.choice(DTYPES)))

    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        for source, target, dtype in cases:
            whole = values(source.shape, dtype)
            given = parts_of(whole, source, rank)
            made = redistribute_parts(given, source, target, mesh)
            expected = parts_of(whole, target, rank)
            assert list(made) == list(expected)
            for box, part in made.items():
                if given or part.numel():
                    assert part.dtype == dtype
                assert part.shape == box.sizes
                assert bits(part) == bits(expected[box]), (source, target, box)

    run_on_mesh(mesh_shape, body)


def test_parts_become_a_dtensor_and_parts_again() -> None:
    whole = torch.arange(12.0).view(6, 2)

    def body(mesh: DeviceMesh) -> None:
        columns = Layout(mesh.layout_mesh, (Shard(1),), (6, 2))
        given = parts_of(whole, ROWS, mesh.get_rank())
        (local,) = redistribute_parts(given, ROWS, columns, mesh).values()
        tensor = DTensor.from_local(local, mesh, [Shard(1)], shape=(6, 2))
        assert torch.equal(tensor.full_tensor(), whole)
        (box,) = columns.held_by(mesh.get_rank())
        back = redistribute_parts({box: tensor.to_local()}, columns, ROWS, mesh)
        assert back.keys() == given.keys()
        assert all(torch.equal(back[box], given[box]) for box in given)

    run_on_mesh((4,), body)


def test_nothing_that_a_rank_has_is_sent() -> None:
    first, last = Box((0,), (2,)), Box((2,), (2,))
    halves = IrregularLayout((4,), ((0, first), (1, last), (1, first)))
    threes = IrregularLayout((4,), ((0, Box((0,), (3,))), (1, Box((3,), (1,)))))

    def body(mesh: DeviceMesh) -> tuple[int, int]:
        given = parts_of(torch.arange(4.0), halves, mesh.get_rank())
        with collectives() as seen:
            redistribute_parts(given, halves, threes, mesh)
        moved = [c for c in seen if c.kind == "all_to_all"]
        return sum(c.sent_bytes for c in moved), sum(c.received_bytes for c in moved)

    assert run_on_mesh((2,), body) == [(0, 4), (4, 0)]


def test_large_parts_go_in_rounds_and_straight() -> None:
    size = 3 << 20
    cuts = [0, 10, size // 3, size - 5, size]
    boxes = [Box((a,), (b - a,)) for a, b in itertools.pairwise(cuts)]
    source = IrregularLayout((size,), tuple((i % 2, box) for i, box in enumerate(boxes)))
    whole = torch.arange(size, dtype=torch.int32)

    def body(mesh: DeviceMesh) -> None:
        target = Layout(mesh.layout_mesh, (Shard(0),), (size,))
        rank = mesh.get_rank()
        for costs in (None, mesh.transport.costs):
            mesh.costs = costs
            made = redistribute_parts(parts_of(whole, source, rank), source, target, mesh)
            for box, part in made.items():
                assert torch.equal(part, whole[box.slices])

    run_on_mesh((2,), body)


def failing(
    call: str, layouts: tuple[Layout | IrregularLayout, Layout | IrregularLayout] | None = None
) -> list[str]:
    """The errors of three ranks, the second of which does something wrong; none waits for it."""
    whole = torch.arange(12.0).view(6, 2)

    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        target: Layout | IrregularLayout = Layout(mesh.layout_mesh, (Shard(0),), (6, 2))
        source: Layout | IrregularLayout = ROWS
        if layouts is not None:
            source, target = layouts
        parts = parts_of(whole, ROWS, rank)
        if rank == 1:
            box = next(iter(parts))
            if call == "missing":
                del parts[box]
            elif call == "shape":
                parts[box] = parts[box].T
            elif call == "foreign":
                parts[Box((0, 0), (1, 2))] = whole[:1]
            elif call == "dtype":
                parts = {box: part.double() for box, part in parts.items()}
            elif call == "dtypes":
                parts[box] = parts[box].double()
            elif call == "layout":
                target = Layout(mesh.layout_mesh, (Shard(1),), (6, 2))
            elif call == "kind":
                parts[box] = parts[box].tolist()  # pyright: ignore[reportArgumentType]
            elif call == "sparse":
                parts[box] = parts[box].to_sparse()
            elif call == "dtensor":
                parts[box] = DTensor.from_local(parts[box], mesh, [Replicate()], run_check=False)
            elif call == "meta":
                parts[box] = parts[box].to("meta")
        redistribute_parts(parts, source, target, mesh)

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((3,), body)
    assert all(isinstance(error, PlacementError) for error in failed.value.errors.values())
    assert len(failed.value.errors) == 3
    return [str(failed.value.errors[rank]) for rank in range(3)]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("missing", r"rank 1: the parts are not those of the layout: it has \[1:2,0:2\], \[4:5"),
        ("foreign", r"rank 1: .* and not \[0:1,0:2\]"),
        ("shape", r"rank 1: the part \[1:2,0:2\] is of shape \(2, 1\)"),
        ("meta", r"rank 1: the part \[1:2,0:2\] is a meta tensor"),
        ("kind", r"rank 1: the part \[1:2,0:2\] is a list; pass a Tensor"),
        ("dtensor", r"rank 1: the part \[1:2,0:2\] is a DTensor; pass a Tensor"),
        ("sparse", r"rank 1: the part \[1:2,0:2\] is sparse or quantized"),
        ("dtypes", r"rank 1: parts have the dtypes"),
        ("dtype", r"parts are torch.float32 on rank 2, torch.float64 on rank 1"),
        ("layout", r"ranks \[1\] have other layouts than rank 0"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(call: str, told: str) -> None:
    errors = failing(call)
    assert len(set(errors)) == 1
    with pytest.raises(PlacementError, match=told):
        raise PlacementError(errors[0])


@pytest.mark.parametrize(
    ("layouts", "told"),
    [
        ((ROWS, Layout(Mesh((3,)), (Shard(0),), (6, 3))), r"shapes \(6, 2\) and \(6, 3\)"),
        ((ROWS, Layout(Mesh((4,)), (Shard(0),), (6, 2))), r"ranks \[3\] hold something"),
        ((ROWS, Layout(Mesh((3,)), (Partial(),), (6, 2))), "has terms of values"),
        ((ROWS, IrregularLayout((6, 2), ((0, Box((0, 0), (5, 2))),))), "10 of the 12 elements"),
    ],
)
def test_layouts_that_nothing_can_be_moved_between_are_refused(
    layouts: tuple[Layout | IrregularLayout, Layout | IrregularLayout], told: str
) -> None:
    errors = failing("", layouts)
    assert len(set(errors)) == 1
    with pytest.raises(PlacementError, match=told):
        raise PlacementError(errors[0])
