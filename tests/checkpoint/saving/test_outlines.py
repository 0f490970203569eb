"""Ranks that differ in nothing but the ranks of their meshes say what they have once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from dtckpt.checkpoint.saving.merging import merge_tensors
from dtckpt.checkpoint.saving.outlines import Outline, Speakers, Told
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.spec import (
    GlobalTensor,
    TensorSpec,
    TensorSpecs,
    specs_from_json,
    specs_to_json,
)
from dtckpt.dtensor import Box, Layout, Mesh, Replicate, Shard
from dtckpt.errors import LayoutMismatch

from .plain_merging import merge_plainly

Said = Mapping[int, TensorSpecs]
"""What every rank says, the first one first."""


def spec(mesh: Mesh | None, *placements: Any, shape: tuple[int, ...] = (12, 4)) -> TensorSpec:
    layout = None if mesh is None else Layout(mesh, placements, shape)
    return TensorSpec(dtype=DTYPES["F32"], shape=shape, layout=layout)


def speakers_of(said: Said) -> Speakers:
    """Return what the coordinator makes of all records, as it comes to others."""
    found = Speakers.of({rank: Outline.of(specs).prints() for rank, specs in said.items()})
    return Speakers.from_json(json.loads(json.dumps(found.to_json())))


def told_by(speakers: Speakers, said: Said) -> dict[int, Told]:
    """Return what ranks tell, as it comes to others."""
    told = {rank: speakers.told_by(rank, Outline.of(specs)) for rank, specs in said.items()}
    return {r: Told.from_json(json.loads(json.dumps(part.to_json()))) for r, part in told.items()}


def merged(said: Said) -> tuple[GlobalTensor, ...]:
    """Merge as ranks do."""
    speakers = speakers_of(said)
    return merge_tensors(speakers.reports(Told.joined(told_by(speakers, said).values())))


def plainly(said: Said) -> tuple[GlobalTensor, ...]:
    """Merge what every group of ranks with the same tensors has."""
    groups: dict[str, list[int]] = {}
    for rank, specs in said.items():
        groups.setdefault(json.dumps(specs_to_json(specs)), []).append(rank)
    return merge_plainly(
        [(tuple(ranks), specs_from_json(json.loads(told))) for told, ranks in groups.items()]
    )


def outcome(merge: Callable[[Said], tuple[GlobalTensor, ...]], said: Said) -> Any:
    try:
        return merge(said)
    except LayoutMismatch as error:
        return str(error)


def sibling(rank: int, size: int, step: int, world: int) -> Mesh:
    """Return the mesh of a rank, where all are divided into meshes of so many, near or far."""
    if step == 1:
        first = rank // size * size
        return Mesh((min(size, world - first),), ("tp",), tuple(range(first, world))[:size])
    return Mesh(
        (len(range(rank % step, world, step)),), ("dp",), tuple(range(rank % step, world, step))
    )


def row(number: int) -> Box:
    return Box((number, 0), (1, 4))


class Jobs:
    """Makes small jobs, most of them with something wrong or uneven."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def job(self) -> Said:
        world = self.random.randint(1, 8)
        first = self.random.randrange(world)
        order = [first, *(rank for rank in range(world) if rank != first)]
        kinds = {name: self.kind(world) for name in "abcd"[: self.random.randint(1, 4)]}
        said = {r: {n: kind(r) for n, kind in kinds.items()} for r in order}
        for _ in range(self.random.choice([0, 0, 1, 2])):
            self.disturb(said, world)
        return said

    def kind(self, world: int) -> Callable[[int], TensorSpec]:
        """Return how one tensor lies on each rank."""
        size, step = self.random.randint(1, world), self.random.randint(1, world)
        placement = self.random.choice([Shard(0), Shard(1), Replicate()])
        stages = self.random.randint(1, world)
        square = Mesh((2, world // 2), ("a", "b")) if world % 2 == 0 else Mesh((world,))
        choices: list[Callable[[int], TensorSpec]] = [
            lambda _: spec(None),
            lambda _: spec(square, *[placement] * square.ndim),
            lambda rank: spec(sibling(rank, size, 1, world), placement),
            lambda rank: spec(sibling(rank, size, step, world), placement),
            lambda rank: spec(Mesh((1,), ("own",), (rank,)), placement),
            lambda rank: replace(
                spec(None), boxes=(Box((rank % stages, 0), (1, 4)),), shape=(stages, 4)
            ),
        ]
        return self.random.choice(choices)

    def disturb(self, said: dict[int, TensorSpecs], world: int) -> None:
        """Change what one rank says of one tensor."""
        rank = self.random.randrange(world)
        name = self.random.choice("abcd")
        found = said[rank].get(name)
        match self.random.randrange(6):
            case 0:
                said[rank].pop(name, None)
            case 1:
                said[rank][name] = spec(None)
            case 2:
                said[rank][name] = spec(Mesh((world,)), Shard(0))
            case 3 if found is not None:
                said[rank][name] = replace(found, dtype=DTYPES["BF16"])
            case 4 if found is not None:
                said[rank][name] = replace(found, same_as="a")
            case _:
                others = self.random.sample(range(world + 2), self.random.randint(1, world))
                said[rank][name] = spec(Mesh((len(others),), ("odd",), tuple(others)), Shard(0))


@pytest.mark.parametrize("seed", range(10))
def test_it_comes_to_the_same_as_looking_at_each_group(seed: int) -> None:
    jobs, seen = Jobs(seed), Counter[str]()
    for _ in range(150):
        said = jobs.job()
        expected = outcome(plainly, said)
        assert outcome(merged, said) == expected, said
        if isinstance(expected, str):
            words = ("did not bring", "share ranks", "laid out", " is ", ": ")
            seen[next(word for word in words if word in expected)] += 1
        else:
            seen["joined" if any(tensor.is_joined for tensor in expected) else "well"] += 1
    assert min(seen[word] for word in ("joined", "well", "did not bring", "laid out")) > 0, seen


def grid(num_groups: int, size: int) -> dict[int, TensorSpecs]:
    """Return tensor parallel groups, with norms that the data axis shards."""
    world = num_groups * size
    said: dict[int, TensorSpecs] = {}
    for rank in range(world):
        tp = Mesh((size,), ("tp",), tuple(range(rank // size * size, rank // size * size + size)))
        dp = Mesh((num_groups,), ("dp",), tuple(range(rank % size, world, size)))
        said[rank] = {
            "weight": spec(tp, Shard(0), shape=(64, 64)),
            "norm": spec(dp, Shard(0), shape=(64,)),
            "step": spec(None, shape=()),
        }
    return said


def test_one_rank_tells_of_tensors_and_one_of_each_mesh() -> None:
    said = grid(4, 8)
    speakers = speakers_of(said)
    told = told_by(speakers, said)
    assert len(speakers.groups) == 32, "no two ranks have the same two meshes"
    assert speakers.forms == (0,)
    assert [rank for rank, part in told.items() if part.forms] == [0]
    assert sorted(rank for rank, part in told.items() for _ in part.meshes) == sorted(
        [0, *range(8), 8, 16, 24]
    ), "four groups of tensor parallel ranks and eight lines of data parallel ones"
    assert sum(map(len, json.dumps(Told.joined(told.values()).to_json()))) < 2000


def sent(said: Said) -> int:
    """Return the bytes of all that is told."""
    parts: Iterable[Told] = told_by(speakers_of(said), said).values()
    return len(json.dumps(Told.joined(parts).to_json()))


def test_a_tensor_more_costs_the_same_whatever_the_number_of_groups() -> None:
    lengths: list[int] = []
    for said in (grid(4, 4), grid(32, 4)):
        before = sent(said)
        for rank, specs in said.items():
            tp = Mesh((4,), ("tp",), tuple(range(rank // 4 * 4, rank // 4 * 4 + 4)))
            specs["more"] = spec(tp, Shard(1), shape=(8, 64))
        lengths.append(sent(said) - before)
    assert lengths[0] == lengths[1]


def test_groups_that_are_uneven_are_joined_with_nothing() -> None:
    """Meshes of three and of two ranks are no copies of each other."""
    three, two = Mesh((3,), ("tp",), (0, 1, 2)), Mesh((2,), ("tp",), (3, 4))
    said = {rank: {"w": spec(three if rank < 3 else two, Shard(0))} for rank in range(5)}
    with pytest.raises(LayoutMismatch, match=r"over ranks 0-2 on ranks 0-2 but as .* on ranks 3-4"):
        merged(said)


def test_a_group_that_disagrees_is_named_by_its_own_ranks() -> None:
    said = grid(4, 2)
    for rank in (4, 5):
        said[rank]["weight"] = replace(said[rank]["weight"], dtype=DTYPES["BF16"])
    expected = r"tensor 'weight' is float32\[64, 64\] on rank 0 but bfloat16\[64, 64\] on rank 4;"
    with pytest.raises(LayoutMismatch, match=expected):
        merged(said)
