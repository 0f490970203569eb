"""Which boxes go where, against counting element by element."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from dtckpt.dtensor import Layout, Mesh, Replicate, Shard
from dtckpt.dtensor.geometry.flows import Flows, holders, numel_lacking

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


def test_holders_are_all_that_have_some_of_a_box() -> None:
    rng = random.Random(5)
    mesh = Mesh((2, 3))
    for _ in range(100):
        source, target = random_layouts(rng, (mesh, mesh))
        box = target.box((1, 0))
        found = {(rank, common) for rank, common in holders(source, box)}
        expected = {
            (rank, common)
            for rank in mesh.all_ranks()
            if (common := source.box(mesh.coordinate(rank) or ()).intersect(box)) is not None
        }
        assert found == (expected if not box.is_empty else set())


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
