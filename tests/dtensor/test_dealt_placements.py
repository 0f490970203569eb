"""Placements that give a rank several ranges of a dim: what others do, these do, too."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtckpt.checkpoint as dcp
import dtckpt.dtensor as dt
from dtckpt.checkpoint import parse_rules
from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    HeadTail,
    Layout,
    Mesh,
    Packed,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    SplitPlacement,
    distribute_tensor,
    explain,
    parse_placements,
    redistribute_parts,
)
from dtckpt.dtensor.debug import visualize_sharding
from dtckpt.dtensor.geometry.box import Box
from dtckpt.errors import PlacementError, Unsavable
from dtckpt.storage import LocalStore, MemoryStore

from ..commands import run_command
from ..ranks import run_ranks
from .ops.some_cases import check_some
from .rank_meshes import assert_holds, collectives, run_on_mesh, scattered


@dataclass(frozen=True, slots=True)
class Cyclic(SplitPlacement):
    """Every rank gets every so manyth index."""

    form: ClassVar[str] = "Cyclic(dim)"

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        return tuple(len(range(first, size, count)) for first in range(count))

    def ranges_over(self, size: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(tuple((i, 1) for i in range(first, size, count)) for first in range(count))


WHOLE = torch.arange(96.0).view(12, 8)
PACKED = Packed(0, (5, 3, 4))
DEALT: list[Any] = [PACKED, Cyclic(0), HeadTail(0)]
OTHERS: list[Placement] = [
    Shard(0),
    Shard(1),
    Ragged(0, (0, 7, 1, 4)),
    Replicate(),
    Partial(),
    Partial("max"),
    Packed(0, (2, 10)),
    Packed(1, (4, 1, 3)),
    Cyclic(1),
]
each = pytest.mark.parametrize("dealt", DEALT, ids=str)


def test_each_part_is_sharded_by_itself() -> None:
    parts = WHOLE.split(PACKED.sizes)
    for rank in range(4):
        pieces = [part.chunk(4) for part in parts]
        expected = torch.cat([piece[rank] for piece in pieces if rank < len(piece)])
        layout = Layout(Mesh((4,)), (PACKED,), (12, 8))
        held = torch.cat([WHOLE[box.slices] for box in layout.held_by(rank)])
        assert torch.equal(held, expected)
        assert layout.box((rank,)).sizes == tuple(expected.shape)


@each
def test_what_meets_a_box_is_within_boxes_that_ranks_hold(dealt: Any) -> None:
    for placements in ((dealt, Shard(0)), (Replicate(), dealt), (dealt, Packed(1, (5, 3)))):
        layout = Layout(Mesh((2, 2)), placements, (12, 8))
        for start, end in itertools.combinations(range(13), 2):
            box = Box((start, 1), (end - start, 5))
            found = list(layout.pieces_meeting(box))
            assert sum(common.numel for _, _, common in found) == box.numel
            for ranks, held, common in found:
                assert held.contains(common)
                assert all(held in layout.held_by(rank) for rank in ranks)


@each
def test_any_placement_to_it_and_back(dealt: Any) -> None:
    pairs = [(a, b) for a, b in itertools.product([dealt, *OTHERS], repeat=2) if dealt in (a, b)]

    def body(mesh: DeviceMesh) -> None:
        for source, target in pairs:
            moved = scattered(WHOLE, mesh, [source]).redistribute(placements=[target])
            assert moved.placements == (target,)
            assert_holds(moved, WHOLE)
        with collectives() as seen:
            whole = distribute_tensor(WHOLE, mesh, [Replicate()], src_data_rank=None)
            assert_holds(whole.redistribute(placements=[dealt]), WHOLE)
        assert seen == []
        assert_holds(distribute_tensor(WHOLE, mesh, [dealt]), WHOLE)

    run_on_mesh((4,), body)


@each
def test_beside_other_axes(dealt: Any) -> None:
    kinds: list[Any] = [
        (dealt, Shard(0)),
        (Shard(0), dealt),
        (dealt, Replicate()),
        (Replicate(), dealt),
        (dealt, Shard(1)),
        (dealt, Packed(1, (4, 4))),
        (Partial(), dealt),
        (Shard(0), Shard(0)),
        (Partial(), Partial()),
        (Packed(0, (2, 4, 6)), Shard(0)),
    ]

    def body(mesh: DeviceMesh) -> None:
        for source, target in itertools.product(kinds, repeat=2):
            moved = scattered(WHOLE, mesh, source).redistribute(placements=target)
            assert_holds(moved, WHOLE)

    run_on_mesh((2, 2), body)


def test_moves_are_told_and_send_what_is_lacking() -> None:
    mesh = Mesh((4,))
    packed, rows = (Layout(mesh, (p,), (12, 8)) for p in (PACKED, Shard(0)))
    for source, target in [(packed, rows), (rows, packed)]:
        told = explain(source, target)
        assert str(PACKED) in str(told)
        assert told.received_bytes == told.needed_bytes
    told = explain(packed, [Replicate()])
    assert told.received_bytes == told.needed_bytes


def test_parts_of_irregular_layouts() -> None:
    def body(mesh: DeviceMesh) -> None:
        packed, rows = (Layout(mesh.layout_mesh, (p,), (12, 8)) for p in (PACKED, Shard(0)))
        for source, target in itertools.product((packed, rows), repeat=2):
            parts = {box: WHOLE[box.slices] for box in source.held_by(mesh.get_rank())}
            made = redistribute_parts(parts, source, target, mesh)
            assert set(made) == set(target.held_by(mesh.get_rank()))
            for box, part in made.items():
                assert torch.equal(part, WHOLE[box.slices])

    run_on_mesh((4,), body)


def test_fused_projections_run_without_communication() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(15, 6, dtype=torch.float64, generator=generator)
    bias, x = weight[:, 0].clone(), torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
    sizes = (7, 4, 4)

    def run(weight: Any, bias: Any, x: Any) -> Any:
        q, k, v = torch.split(F.linear(x, weight, bias), [*sizes], dim=-1)
        return [q, k, v], q.sin().sum() + (k * v).sum()

    leaves = [t.clone().requires_grad_() for t in (weight, bias, x)]
    run(*leaves)[1].backward()

    def body(mesh: DeviceMesh) -> None:
        placements = ([Packed(0, sizes)], [Packed(0, sizes)], [Replicate()])
        ours: list[Any] = [
            distribute_tensor(t, mesh, p).requires_grad_()
            for t, p in zip((weight, bias, x), placements, strict=True)
        ]
        with collectives() as seen:
            parts, loss = run(*ours)
        assert seen == []
        assert all(part.placements == (Shard(2),) for part in parts)
        with collectives() as seen:
            loss.backward()
        assert [c.kind for c in seen] in ([], ["all_to_all"], ["all_reduce"])  # of x alone
        assert ours[0].grad.placements == (Packed(0, sizes),)
        for one, other in zip(ours, leaves, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)

    run_on_mesh((3,), body)


def test_operators_keep_it() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor: Any = distribute_tensor(WHOLE, mesh, [PACKED])
        like: Any = distribute_tensor(WHOLE, mesh, [PACKED])
        right: Any = distribute_tensor(WHOLE[:8], mesh, [Replicate()])
        with dt.strict(), collectives() as seen:
            assert (tensor * 2 + 1).placements == (PACKED,)
            assert (tensor + like).placements == (PACKED,)
            assert (tensor @ right).placements == (PACKED,)
            assert tensor.sum(1).placements == (PACKED,)
            assert tensor.sum(0).placements == (Partial(),)
            assert tensor.t().placements == (replace(PACKED, dim=1),)
            assert tensor[:, 2:5].placements == (PACKED,)
            assert tensor[5:].placements == (Packed(0, (3, 4)),)
            assert tensor[5:8].placements == (Shard(0),)
            tensor.mul_(1)
            first, second = tensor.split((8, 4))
            assert first.placements == (Packed(0, (5, 3)),)
            joined: Any = torch.cat([first, second])
            assert joined.placements == (PACKED,)
        assert seen == []
        assert_holds(joined, WHOLE)
        assert_holds(tensor[5:8], WHOLE[5:8])
        assert_holds(tensor[3:9], WHOLE[3:9])
        assert_holds(tensor.cumsum(0), WHOLE.cumsum(0))
        assert torch.equal(tensor.argmax(0).full_tensor(), WHOLE.argmax(0))
        tensor[2:9, 1] = -1.0
        expected = WHOLE.clone()
        expected[2:9, 1] = -1.0
        assert_holds(tensor, expected)

    run_on_mesh((4,), body)


def test_random_numbers_are_those_of_the_element() -> None:
    def body(mesh: DeviceMesh) -> list[Tensor]:
        found: list[Tensor] = []
        for placement in (Replicate(), PACKED, Cyclic(0)):
            dt.random.manual_seed(3, mesh)  # pyright: ignore[reportAttributeAccessIssue]
            made: Any = dt.randn(12, 8, device_mesh=mesh, placements=[placement])
            with collectives() as seen:
                dropped: Any = F.dropout(made, 0.4)
                like: Any = torch.rand_like(made)
                set_again: Any = torch.nn.init.kaiming_uniform_(made.clone())
            assert seen == []
            assert like.placements == set_again.placements == (placement,)
            found += [tensor.full_tensor() for tensor in (made, dropped, like, set_again)]
        return found

    for found in run_on_mesh((4,), body):
        for one, other in zip(found[:4] * 2, found[4:], strict=True):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_operators_are_right_or_move_it(mesh_shape: tuple[int, ...]) -> None:
    check_some(mesh_shape, Cyclic, first=len(mesh_shape) - 1, step=6)


def test_texts_json_and_equality() -> None:
    assert parse_placements("Packed(0:5,3,4), R") == (PACKED, Replicate())
    assert parse_rules("model/*=Packed(0:5,3,4)")[0].placements == (PACKED,)
    layout = Layout(Mesh((4, 2)), (PACKED, Shard(1)), (12, 8))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    ragged = Layout(Mesh((4, 2)), (Ragged(0, PACKED.sizes_over(12, 4)), Shard(1)), (12, 8))
    assert layout != ragged
    assert layout.in_places() == ragged
    assert not Layout(Mesh((1,)), (PACKED,), (12, 8)).is_dealt


def test_pictures() -> None:
    told = visualize_sharding(((6,), "tp=2", "Packed(0:4,2)"), show=False)
    assert told == (
        "[6] (Packed(0:4,2)) on tp=2\n"
        "  tp=2  Packed(0:4,2): cuts dim 0 into 3, 3\n"
        "+-------+-----+-----+-----+-----+\n"
        "| dim 0 | 0:2 | 2:4 | 4:5 | 5:6 |\n"
        "+-------+-----+-----+-----+-----+\n"
        "| rank  | 0   | 1   | 0   | 1   |\n"
        "+-------+-----+-----+-----+-----+"
    )


def _mesh(rank: int, shape: tuple[int, ...] = (4,)) -> DeviceMesh:
    return DeviceMesh("cpu", Mesh(shape), rank=rank)


def test_checkpoints_of_it_and_into_it() -> None:
    kinds: list[Any] = [
        (PACKED, Replicate()),
        (PACKED, Shard(0)),
        (Shard(0), Packed(1, (4, 1, 3))),
        (Shard(0), Shard(1)),
        (Replicate(), Replicate()),
    ]
    pairs = [(a, b) for a, b in itertools.product(kinds, repeat=2) if kinds.index(a) < 3]
    pairs += [(b, a) for a, b in pairs if kinds.index(b) >= 3]
    stores = [MemoryStore() for _ in pairs]

    def body(rank: int, group: Any) -> None:
        mesh = _mesh(rank, (2, 2))
        for (source, target), store in zip(pairs, stores, strict=True):
            saved = distribute_tensor(WHOLE, mesh, source, src_data_rank=None)
            dcp.save({"w": saved}, store, process_group=group)
            loaded = distribute_tensor(torch.zeros(12, 8), mesh, target, src_data_rank=None)
            dcp.load({"w": loaded}, store, process_group=group)
            assert_holds(loaded, WHOLE)

    run_ranks(4, body)
    for store in stores:
        dcp.verify(store)
        with dcp.open(store) as opened:
            assert torch.equal(opened["w"][...], WHOLE)


def test_checkpoints_are_resharded_by_the_command(tmp_path: Path) -> None:
    def save(rank: int, group: Any) -> None:
        tensor = distribute_tensor(WHOLE, _mesh(rank), [PACKED], src_data_rank=None)
        dcp.save({"w": tensor}, LocalStore(tmp_path / "a"), process_group=group)

    run_ranks(4, save)
    assert "Packed(0:5,3,4)" in run_command("inspect", tmp_path / "a")
    rules = "*=Packed(0:5,3,4),S(1)"
    run_command(
        "reshard", tmp_path / "a", tmp_path / "b", "--mesh", "tp=3,dp=2", "--placements", rules
    )
    run_command("verify", tmp_path / "b")
    with dcp.open(LocalStore(tmp_path / "b")) as opened:
        assert torch.equal(opened["w"][...], WHOLE)


def test_what_files_cannot_name_is_not_saved() -> None:
    tensor = distribute_tensor(WHOLE, _mesh(0, (1,)), [Cyclic(0)], src_data_rank=None)
    dcp.save({"w": tensor}, MemoryStore())  # one rank holds all of it in order

    def body(rank: int, group: Any) -> None:
        tensor = distribute_tensor(WHOLE, _mesh(rank, (2,)), [Cyclic(0)], src_data_rank=None)
        with pytest.raises(Unsavable, match=r"'w'.*Cyclic\(0\).*redistribute to Shard or Packed"):
            dcp.save({"w": tensor}, MemoryStore(), process_group=group)

    run_ranks(2, body)


def test_torchs_checkpoints_get_every_box() -> None:
    tensor: Any = DTensor.from_local(torch.zeros(7, 8), _mesh(0, (2,)), [PACKED], shape=(12, 8))
    chunks = tensor.__create_chunk_list__()
    assert [(*c.offsets, *c.sizes) for c in chunks] == [(0, 0, 3, 8), (5, 0, 2, 8), (8, 0, 2, 8)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"parts that sum to 12, expected 13"):
        Layout(Mesh((4,)), (PACKED,), (13, 8))
    with pytest.raises(PlacementError, match="a size of 0 or more for each part"):
        Packed(0)
    with pytest.raises(PlacementError, match="only one axis may cut dim 0"):
        Layout(Mesh((2, 2)), (PACKED, Cyclic(0)), (12, 8))

    @dataclass(frozen=True)
    class Twice(SplitPlacement):
        form: ClassVar[str] = "Twice(dim)"

        def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
            return (size // count,) * count

        def ranges_over(self, size: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
            return (((0, size // count),),) * count

    with pytest.raises(PlacementError, match="must deal out 4 indices, each once"):
        Layout(Mesh((2,)), (Twice(0),), (4,))

    @dataclass(frozen=True)
    class Backwards(SplitPlacement):
        form: ClassVar[str] = "Backwards(dim)"

        def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
            return Shard(0).sizes_over(size, count)

        def ranges_over(self, size: int, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
            halves = Shard(0).ranges_over(size, 2 * count)
            return tuple((halves[2 * i + 1][0], halves[2 * i][0]) for i in range(count))

    assert Layout(Mesh((2,)), (Backwards(0),), (8,)).is_dealt
    with pytest.raises(PlacementError, match=r"in order over one coordinate, got \(\(4, 4\), \(0"):
        Layout(Mesh((1,)), (Backwards(0),), (8,))
