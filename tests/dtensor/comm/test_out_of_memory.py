"""A rank without memory for a large step: all ranks hear of it before anything is sent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtckpt.dtensor import (
    Box,
    DeviceMesh,
    IrregularLayout,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_many,
    redistribute_parts,
)
from dtckpt.dtensor.comm import transports
from dtckpt.dtensor.comm.costs import NCCL
from dtckpt.dtensor.redistribute import memory

from ..rank_meshes import collectives, run_on_mesh, scattered

MOVES: list[tuple[Placement, Placement, bool]] = [
    (Shard(0), Replicate(), False),
    (Shard(0), Replicate(), True),  # by an all-gather
    (Shard(0), Shard(1), False),
    (Partial(), Replicate(), False),
    (Partial(), Shard(0), False),
]


@pytest.fixture
def _agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all sizes be large."""
    monkeypatch.setattr(transports, "GLOO", replace(transports.GLOO, agree_bytes=1))


def _short_on(monkeypatch: pytest.MonkeyPatch, ranks: dict[int, int]) -> None:
    """Let some ranks, by the number of their thread, lack all memory."""
    lacking = memory._lacking  # pyright: ignore[reportPrivateUsage]

    def short(sizes: Sequence[int], device: torch.device) -> int:
        return sum(sizes) if threading.get_ident() in ranks else lacking(sizes, device)

    monkeypatch.setattr(memory, "_lacking", short)


@pytest.mark.usefixtures("_agreed")
@pytest.mark.parametrize(("source", "target", "gathers"), MOVES)
@pytest.mark.parametrize("many", [False, True])
def test_all_ranks_raise_before_anything_is_sent(
    source: Placement, target: Placement, gathers: bool, many: bool, monkeypatch: Any
) -> None:
    threads: dict[int, int] = {}
    _short_on(monkeypatch, threads)

    def body(mesh: DeviceMesh) -> None:
        if gathers:
            mesh.costs = NCCL
        tensor = scattered(torch.arange(16.0).view(4, 4), mesh, [source])

        def move() -> Any:
            if many:
                return redistribute_many([tensor, tensor], placements=[target])[0]
            return tensor.redistribute(placements=[target])

        if mesh.get_rank() == 1:
            threads[threading.get_ident()] = 1
        with collectives() as seen, pytest.raises(torch.OutOfMemoryError, match="rank 1 "):
            move()
        assert [c.kind for c in seen] == ["all_gather"]  # of one number
        threads.pop(threading.get_ident(), None)
        assert torch.equal(move().full_tensor(), torch.arange(16.0).view(4, 4))

    run_on_mesh((2,), body)


@pytest.mark.usefixtures("_agreed")
@pytest.mark.parametrize("call", ["distribute_tensor", "redistribute_parts"])
def test_all_ranks_raise_before_what_one_has_is_sent(call: str, monkeypatch: Any) -> None:
    threads: dict[int, int] = {}
    _short_on(monkeypatch, threads)
    whole, box = torch.arange(16.0).view(4, 4), Box.whole((4, 4))

    def body(mesh: DeviceMesh) -> None:
        rows = Layout(mesh.layout_mesh, (Shard(0),), (4, 4))
        first = IrregularLayout((4, 4), ((0, box),))
        rank = mesh.get_rank()

        def move() -> torch.Tensor:
            if call == "distribute_tensor":
                return distribute_tensor(whole, mesh, [Shard(0)]).to_local()
            parts = {box: whole} if rank == 0 else {}
            return redistribute_parts(parts, first, rows, mesh)[rows.box((rank,))]

        if rank == 1:
            threads[threading.get_ident()] = 1
        with collectives() as seen, pytest.raises(torch.OutOfMemoryError, match="rank 1 "):
            move()
        assert [c.kind for c in seen] == ["all_gather"] * 2  # of a row of numbers, and of one
        threads.pop(threading.get_ident(), None)
        assert torch.equal(move(), whole[rows.box((rank,)).slices])

    run_on_mesh((2,), body)


def test_memory_that_is_not_there_is_found_by_asking_for_it() -> None:
    cpu = torch.device("cpu")
    assert memory._lacking([1 << 20], cpu) == 0  # pyright: ignore[reportPrivateUsage]
    assert memory._lacking([1, 1 << 60], cpu) == 1 + (1 << 60)  # pyright: ignore[reportPrivateUsage]


class Fragmented:
    """A device whose free memory lies in blocks; it gives each of them out once."""

    def __init__(self, *blocks: int) -> None:
        self.free = list(blocks)

    def empty(self, size: int, **_: Any) -> object:
        """Stand for ``torch.empty``."""
        block = min((block for block in self.free if block >= size), default=None)
        if block is None:
            raise torch.OutOfMemoryError
        self.free.remove(block)
        return object()


@pytest.mark.parametrize(
    ("blocks", "sizes", "lacking"),
    [
        ((60, 20, 20), (50, 20, 20), 0),  # no block of 90
        ((60, 40), (50, 20, 20), 90),  # as much, but no third one
        ((), (), 0),
    ],
)
def test_memory_in_pieces_is_asked_for_tensor_by_tensor(
    monkeypatch: pytest.MonkeyPatch, blocks: Any, sizes: Any, lacking: int
) -> None:
    monkeypatch.setattr(torch, "empty", Fragmented(*blocks).empty)
    device = torch.device("cuda", 0)
    assert memory._lacking(sizes, device) == lacking  # pyright: ignore[reportPrivateUsage]


def test_small_steps_do_not_ask() -> None:
    def body(mesh: DeviceMesh) -> list[str]:
        tensor = scattered(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        with collectives() as seen:
            tensor.redistribute(placements=[Shard(1)])
        return [c.kind for c in seen]

    assert run_on_mesh((2,), body) == [["all_to_all"]] * 2


def test_what_a_transposed_tensor_sends_straight_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(transports, "GLOO", replace(transports.GLOO, agree_bytes=1))
    monkeypatch.setattr(
        memory,
        "_lacking",
        lambda sizes, _: asked.append(sum(sizes)) or 0,  # pyright: ignore
    )

    def body(mesh: DeviceMesh) -> None:
        mesh.costs = replace(mesh.transport.costs, round_bytes=8, direct_bytes=1)
        whole = torch.arange(64.0).view(8, 8)
        made = distribute_tensor(whole.t() if mesh.get_rank() == 0 else whole, mesh, [Shard(0)])
        assert torch.equal(made.full_tensor(), whole.t())

    run_on_mesh((2,), body)
    part = 4 * 8 * 4
    assert part + part + 8 in asked, "the result, what is packed for the other rank, and a round"
