"""Who stands in for a rank that is lost, of layouts alone."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.saving.agreeing import Agreement
from dtckpt.checkpoint.saving.finishing import replace_ranks
from dtckpt.checkpoint.saving.writers import assign_writers, stand_ins, stood_in_for
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.spec import GlobalTensor
from dtckpt.dtensor import Box, Layout, Mesh, Replicate, Shard
from dtckpt.dtensor.geometry.irregular import IrregularLayout

SHAPE = (8, 6)
DDP = Layout.replicated(Mesh((4,)), SHAPE)
HSDP = Layout(Mesh((2, 2)), (Replicate(), Shard(0)), SHAPE)
FSDP = Layout(Mesh((4,)), (Shard(0),), SHAPE)


def tensors(*layouts: Layout | IrregularLayout) -> tuple[StoredTensor, ...]:
    found = [
        GlobalTensor(name=f"t{i}", dtype=DTYPES["F32"], shape=layout.shape, layout=layout)
        for i, layout in enumerate(layouts)
    ]
    return assign_writers(found)


def table(size: int, *layouts: Layout | IrregularLayout) -> list[tuple[int, ...]]:
    return [stand_ins(rank, tensors(*layouts)) for rank in range(size)]


def test_replicas_of_data_parallelism_follow_each_other_in_a_circle() -> None:
    assert table(4, DDP) == [(1, 2, 3), (2, 3, 0), (3, 0, 1), (0, 1, 2)]


def test_hybrid_shards_have_the_ones_of_other_groups() -> None:
    assert table(4, HSDP, DDP) == [(2,), (3,), (0,), (1,)]


def test_tensor_parallelism_within_changes_nothing() -> None:
    mesh = Mesh((2, 2, 2), ("replica", "shard", "tp"))
    weight = Layout(mesh, (Replicate(), Shard(0), Shard(1)), SHAPE)
    norm = Layout(mesh, (Replicate(), Shard(0), Replicate()), (8,))
    assert table(8, norm, weight) == [(rank ^ 4,) for rank in range(8)]
    found = [set(others) for others in table(8, norm)]
    assert found == [{rank ^ 1, rank ^ 4, rank ^ 5} for rank in range(8)]


def test_ranks_of_a_stage_stand_in_for_each_other() -> None:
    stages = [Layout.replicated(Mesh((2,), ranks=ranks), SHAPE) for ranks in ((0, 1), (2, 3))]
    assert table(4, *stages, DDP) == [(1,), (0,), (3,), (2,)]
    tied = Layout.replicated(Mesh((2,), ranks=(1, 2)), SHAPE)
    assert table(4, *stages, tied) == [(), (), (), ()], "each of a stage holds something else"


def test_who_holds_something_alone_has_none() -> None:
    assert table(4, FSDP) == table(4, DDP, FSDP) == [(), (), (), ()]
    assert table(1, Layout.replicated(Mesh((1,)), SHAPE)) == [()]
    assert stand_ins(7, tensors(DDP)) == (), "of what is on no mesh of a rank nothing is written"


def test_copies_on_sibling_meshes_count() -> None:
    joined = Mesh((2, 2), ("copy", "dp"), (0, 2, 1, 3))
    assert table(4, Layout(joined, (Replicate(), Shard(0)), SHAPE)) == [(1,), (0,), (3,), (2,)]


def test_boxes_that_follow_from_no_mesh_have_none() -> None:
    boxes = IrregularLayout((4,), ((0, Box((0,), (4,))), (1, Box((0,), (4,)))))
    assert table(4, DDP, boxes) == [(), (), (3, 0, 1), (0, 1, 2)]
    assert stood_in_for(2, tensors(DDP, boxes), 2) == ()
    assert stood_in_for(0, tensors(DDP, boxes), 2) == (3, 2)


def test_who_copies_nothing_for_others_looks_at_no_tensor() -> None:
    looked_at: Any = None
    assert stood_in_for(0, looked_at, 0) == ()


def some_layout(rng: random.Random) -> Layout:
    ranks = rng.sample(range(8), rng.choice([1, 2, 4, 8]))
    shape = rng.choice([(len(ranks),), (1, len(ranks)), (len(ranks) // 2 or 1, min(len(ranks), 2))])
    if len(ranks) != shape[0] * (shape[1] if len(shape) > 1 else 1):
        shape = (len(ranks),)
    placements = tuple(rng.choice([Replicate(), Shard(0), Shard(1)]) for _ in shape)
    return Layout(Mesh(shape, ranks=tuple(ranks)), placements, (rng.randint(1, 9), 5))


def test_stand_ins_hold_all_that_they_may_have_to_write() -> None:
    rng = random.Random(1)
    num_found = 0
    for _ in range(300):
        stored = tensors(*(some_layout(rng) for _ in range(rng.randint(1, 3))))
        for rank in range(8):
            for other in stand_ins(rank, stored):
                num_found += 1
                for tensor in stored:
                    held = tensor.layout.held_by(other)
                    assert all(any(h.contains(b) for h in held) for b in tensor.chunks_of(rank))
            for most in range(4):
                assert set(stood_in_for(rank, stored, most)) == {
                    other for other in range(8) if rank in stand_ins(other, stored)[:most]
                }
    assert num_found > 1000


def agreement(*layouts: Layout | IrregularLayout) -> Agreement:
    found: Any = tensors(*layouts)
    return Agreement(save_id="0" * 16, tensors=found, stored=found, chunks=(), tree=None)


@pytest.mark.parametrize(
    ("layouts", "lost", "copies", "by", "problem"),
    [
        ([DDP] * 4, {1}, None, {1: 2}, ""),
        ([DDP] * 4, {1, 2}, None, {1: 3, 2: 3}, ""),
        ([DDP] * 4, {1, 2}, 2, {}, "part of rank 1: rank 2, who might have, died or fell silent"),
        ([DDP] * 4, {1, 2}, 3, {1: 3, 2: 3}, ""),
        ([DDP] * 4, {3}, 2, {3: 0}, ""),
        ([DDP] * 4, {3}, 1, {}, "ranks 0-2 held the same, but may have changed it since the call"),
        ([HSDP] * 4, {1, 3}, None, {}, "part of rank 1: rank 3, who might have, died or fell"),
        ([FSDP], {2}, None, {}, r"it alone held 't0' \[4:6,0:6\]"),
        ([FSDP] * 3, {2}, None, {}, r"it alone held 't0' \[4:6,0:6\] and 2 more"),
        ([DDP], {3}, 1, {}, ""),
    ],
)
def test_the_coordinator_says_who_writes_or_why_nobody_can(
    layouts: list[Layout], lost: set[int], copies: int | None, by: dict[int, int], problem: str
) -> None:
    chosen = replace_ranks(sorted(lost), agreement(*layouts), copies)
    assert chosen.by == by
    assert bool(chosen.problem) == bool(problem)
    assert re.search(problem, chosen.problem)
    if not problem:
        assert len(chosen.save_id) == 16
        assert chosen.save_id != replace_ranks(lost, agreement(*layouts), copies).save_id
    assert type(chosen).from_bytes(chosen.to_bytes()) == chosen
