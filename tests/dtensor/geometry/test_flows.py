"""Which boxes go where, against counting element by element."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from dtckpt.dtensor import Box, IrregularLayout, Layout, Mesh, Replicate, Shard
from dtckpt.dtensor.geometry.flows import Flows, numel_lacking
from dtckpt.dtensor.geometry.holding import Holding

from ..redistribute.test_redistribute import random_placements

SHAPES = [(5, 7), (8, 4), (1, 3), (3,), (), (0, 4), (2, 5, 3)]
MESHES = [
    (Mesh((4,)), Mesh((4,))),
    (Mesh((2, 2)), Mesh((2, 2))),
    (Mesh((2, 3)), Mesh((6,))),
    (Mesh((4,)), Mesh((2, 2), ranks=(3, 2, 1, 0))),
    (Mesh((2, 2)), Mesh((2, 3))),
    (Mesh((2, 3)), Mesh((2,), ranks=(4, 1))),
    (Mesh((3,)), Mesh((2, 2), ranks=(3, 4, 5, 6))),
    (Mesh((2, 2)), Mesh((3,), ranks=(2, 3, 9))),
]


def random_layouts(rng: random.Random, meshes: tuple[Mesh, Mesh]) -> tuple[Layout, Layout]:
    shape = rng.choice(SHAPES)
    found = [Layout(mesh, random_placements(rng, mesh.shape, shape), shape) for mesh in meshes]
    return found[0], found[1]


@pytest.mark.parametrize("meshes", MESHES)
def test_every_rank_takes_what_it_wants_once_and_from_itself_what_it_has(
    meshes: tuple[Mesh, Mesh],
) -> None:
    rng = random.Random(3)
    for _ in range(150):
        source, target = random_layouts(rng, meshes)
        flows = Flows(source, target)
        for rank in target.mesh.all_ranks():
            wanted = target.box(target.mesh.coordinate(rank) or ())
            taken = np.zeros(source.shape, dtype=int)
            received = 0
            for giver, box in flows.into(rank):
                taken[box.slices] += 1
                received += box.numel if giver != rank else 0
                assert source.box(source.mesh.coordinate(giver) or ()).contains(box)
            here = source.mesh.coordinate(rank)
            held = np.zeros(source.shape, dtype=bool)
            if here is not None:
                held[source.box(here).slices] = True
            expected = np.zeros(source.shape, dtype=int)
            expected[wanted.slices] = 1
            assert (taken == expected).all()
            assert received == int((expected.astype(bool) & ~held).sum())
            assert received == numel_lacking(source, target, rank)


@pytest.mark.parametrize("meshes", MESHES)
def test_givers_and_takers_agree(meshes: tuple[Mesh, Mesh]) -> None:
    rng = random.Random(4)
    for _ in range(150):
        source, target = random_layouts(rng, meshes)
        flows = Flows(source, target)
        everyone = {*source.mesh.all_ranks(), *target.mesh.all_ranks()}
        given = {(r, taker, box) for r in everyone for taker, box in flows.out_of(r)}
        taken = {(giver, r, box) for r in everyone for giver, box in flows.into(r)}
        assert given == taken
        assert len({(giver, taker) for giver, taker, _ in given}) == len(given)


def test_replicas_share_the_giving() -> None:
    shape = (64, 64)
    for source, target in [
        (Layout(Mesh((4, 4)), (Shard(0), Replicate()), shape), Mesh((16,), ranks=range_of(16, 32))),
        (Layout(Mesh((2, 8)), (Shard(1), Replicate()), shape), Mesh((4, 4), ranks=range_of(8, 24))),
        (Layout(Mesh((8,)), (Replicate(),), shape), Mesh((8,), ranks=range_of(8, 16))),
    ]:
        for placement in (Replicate(), Shard(0), Shard(1)):
            placements = (placement,) * target.ndim
            flows = Flows(source, Layout(target, placements, shape))
            sent: Counter[int] = Counter()
            for rank in source.mesh.all_ranks():
                sent[rank] = sum(box.numel for _, box in flows.out_of(rank))
            assert max(sent.values()) <= 1.5 * sum(sent.values()) / len(sent), (placements, sent)


def range_of(start: int, stop: int) -> tuple[int, ...]:
    return tuple(range(start, stop))


def test_pieces_that_meet_a_box_are_told_with_all_that_hold_them() -> None:
    rng = random.Random(5)
    mesh = Mesh((2, 3))
    for _ in range(100):
        source, target = random_layouts(rng, (mesh, mesh))
        box = target.box((1, 0))
        meeting = source.pieces_meeting(box)
        found = {(rank, common) for ranks, _, common in meeting for rank in ranks}
        expected = {
            (rank, common)
            for rank in mesh.all_ranks()
            if (common := source.box(mesh.coordinate(rank) or ()).intersect(box)) is not None
        }
        assert found == (expected if not box.is_empty else set())


def random_cuts(rng: random.Random, box: Box, depth: int) -> list[Box]:
    """Boxes that tile one, none of them empty."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if box.is_empty or not depth or not dims or rng.random() < 0.2:
        return [] if box.is_empty else [box]
    dim = rng.choice(dims)
    at = rng.randrange(1, box.sizes[dim])
    sizes, offsets = list(box.sizes), list(box.offsets)
    sizes[dim], offsets[dim] = box.sizes[dim] - at, box.offsets[dim] + at
    first = Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
    rest = Box(tuple(offsets), tuple(sizes))
    return random_cuts(rng, first, depth - 1) + random_cuts(rng, rest, depth - 1)


def random_irregular(
    rng: random.Random, ranks: Sequence[int], shape: tuple[int, ...]
) -> IrregularLayout:
    """Boxes dealt out to ranks, some of which get none; some boxes are held by several."""
    pieces = [
        (rank, box)
        for box in random_cuts(rng, Box.whole(shape), 4)
        for rank in rng.sample(ranks, min(rng.choice([1, 1, 2, 3]), len(ranks)))
    ]
    layout = IrregularLayout(shape, tuple(pieces))
    layout.validate()
    return layout


@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, True), (False, False)])
def test_flows_between_layouts_of_both_kinds(kinds: tuple[bool, bool]) -> None:
    rng = random.Random(6)
    for _ in range(300):
        meshes = rng.choice(MESHES)
        regular = random_layouts(rng, meshes)
        source, target = (
            random_irregular(rng, mesh.all_ranks(), layout.shape) if irregular else layout
            for irregular, mesh, layout in zip(kinds, meshes, regular, strict=True)
        )
        everyone = sorted({*meshes[0].all_ranks(), *meshes[1].all_ranks()})
        flows = Flows(source, target)
        given = Counter((r, taker, box) for r in everyone for taker, box in flows.out_of(r))
        taken = Counter((giver, r, box) for r in everyone for giver, box in flows.into(r))
        assert given == taken
        for rank in everyone:
            held = count(source.shape, source.held_by(rank))
            wanted = count(target.shape, target.held_by(rank))
            into = list(flows.into(rank))
            assert (count(source.shape, (box for _, box in into)) == wanted).all()
            for giver, box in into:
                assert count(source.shape, source.held_by(giver))[box.slices].all()
            received = sum(box.numel for giver, box in into if giver != rank)
            assert received == int((wanted * (1 - held)).sum())
            assert received == numel_lacking(source, target, rank)


def count(shape: tuple[int, ...], boxes: Iterable[Box]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many of the boxes have each element."""
    found = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        found[box.slices] += 1
    return found


@pytest.mark.parametrize("irregular", [False, True])
def test_layouts_of_both_kinds_tell_who_holds_what(irregular: bool) -> None:
    rng = random.Random(7)
    for _ in range(200):
        mesh = rng.choice(MESHES)[1]
        layout, other = random_layouts(rng, (mesh, mesh))
        box = other.box((0,) * mesh.ndim)
        holding = random_irregular(rng, mesh.all_ranks(), layout.shape) if irregular else layout
        everyone = mesh.all_ranks()
        by_box: dict[Box, list[int]] = {}
        for rank in everyone:
            for held in holding.held_by(rank):
                if not held.is_empty:
                    by_box.setdefault(held, []).append(rank)
        met = {held: common for held in by_box if (common := held.intersect(box)) is not None}
        found = list(holding.pieces_meeting(box))
        assert {held: common for _, held, common in found} == met
        assert len(found) == len(met)
        for held, ranks in by_box.items():
            told = holding.replica_ranks(held)
            assert sorted(told) == sorted(ranks)
            assert [holding.replica_of(rank, held) for rank in told] == [*range(len(told))]
            assert all((rank in told) == (rank in ranks) for rank in everyone)
            assert [list(r) for r, at, _ in found if at == held] == [list(told)] * (held in met)
            for replica, rank in enumerate(told):
                assert held in holding.held_by(rank, (replica,))
                assert held not in holding.held_by(rank, (replica + 1,))
        assert holding.held_by(99) == ()


def test_replicas_share_the_giving_to_lists_of_boxes() -> None:
    shape = (64, 64)
    sources: list[Holding] = [
        Layout(Mesh((4, 4)), (Shard(0), Replicate()), shape),
        IrregularLayout(shape, tuple((rank, Box.whole(shape)) for rank in range(8))),
    ]
    rows = [Box((i, 0), (1, 64)) for i in range(64)]
    target = IrregularLayout(shape, tuple((16 + i % 4, row) for i, row in enumerate(rows)))
    for source in sources:
        flows = Flows(source, target)
        sent = [sum(box.numel for _, box in flows.out_of(rank)) for rank in range(16)]
        assert max(sent) <= 1.5 * sum(sent) / sum(numel > 0 for numel in sent)
        assert sum(numel > 0 for numel in sent) >= 8


def test_many_boxes_are_found_by_place() -> None:
    size = 100
    boxes = [Box((3 * i, 3 * j), (3, 3)) for i in range(size) for j in range(size)]
    layout = IrregularLayout((3 * size, 3 * size), tuple((i % 7, b) for i, b in enumerate(boxes)))
    looked_at = 0
    intersect = Box.intersect

    def counted(box: Box, other: Box) -> Box | None:
        nonlocal looked_at
        looked_at += 1
        return intersect(box, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Box, "intersect", counted)
        found = list(layout.pieces_meeting(Box((100, 100), (4, 4))))
    assert len(found) == 4
    assert looked_at <= 4 * size


def test_the_cost_grows_with_what_is_met_and_not_with_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (1 << 20, 64)
    source = Layout(Mesh((128, 128)), (Shard(0), Replicate()), shape)
    target = Layout(Mesh((64, 128)), (Shard(0), Replicate()), shape)
    looked_at: list[tuple[int, int]] = []
    interval = Layout.interval

    def counted(layout: Layout, dim: int, index: int) -> tuple[int, int]:
        looked_at.append((dim, index))
        return interval(layout, dim, index)

    monkeypatch.setattr(Layout, "interval", counted)
    assert len(list(Flows(source, target).into(5000))) == 2
    assert len(looked_at) < 20
