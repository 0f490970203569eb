"""Optimizers that keep their state in tensors made of others, over several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DTensor, Replicate, Shard
from dtckpt.errors import CheckpointError
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import rank_mesh
from ...processes import run_processes
from ...ranks import RanksFailed, run_ranks
from ..tensors.subclass_stand_ins import LowBit, State8bit, StateFp8, same

ROWS, COLUMNS = 8, 64
HALVES = (2,), [Shard(0)]
QUARTERS = (4,), [Shard(0)]
WHOLE = (2,), [Replicate()]
NO_MESH: tuple[tuple[int, ...], list[Any]] = ((), [])


class Weight(nn.Module):
    """A module with one parameter."""

    def __init__(self, mesh: Any, placements: list[Any], seed: int) -> None:
        super().__init__()
        whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
        if mesh is not None:
            rows = whole
            for place, at, size in zip(
                placements, mesh.get_coordinate(), mesh.mesh.shape, strict=True
            ):
                rows = rows.chunk(size)[at] if isinstance(place, Shard) else rows
            whole = DTensor.from_local(rows.clone(), mesh, placements, shape=tuple(whole.shape))
        self.weight = nn.Parameter(whole)


def on_ranks(layout: Any, body: Callable[[Any, Any], Any]) -> list[Any]:
    """Run ``body(mesh, group)`` on the ranks of a mesh; without one on a single rank."""
    shape = layout[0]
    if not shape:
        return [body(None, None)]
    c10d: Any = dist
    store = c10d.HashStore()
    return run_ranks(
        math.prod(shape), lambda rank, group: body(rank_mesh(store, shape, rank, group), group)
    )


def made(mesh: Any, layout: Any, kind: Any, steps: int, seed: int) -> tuple[Weight, LowBit]:
    """A module and its optimizer after some steps."""
    net = Weight(mesh, layout[1], seed)
    optimizer = LowBit(net.parameters(), kind)
    for number in range(steps):
        net.weight.grad = net.weight.detach() * (number + 1)
        optimizer.step()
    return net, optimizer


def saved(layout: Any, kind: Any = State8bit) -> tuple[MemoryStore, list[Any]]:
    """A checkpoint, and the state of each rank."""
    store = MemoryStore()

    def save(mesh: Any, group: Any) -> Any:
        net, optimizer = made(mesh, layout, kind, 2, 1)
        ckpt.save({"m": net, "o": optimizer}, store, process_group=group)
        return optimizer.state[net.weight]["momentum_buffer"]

    return store, on_ranks(layout, save)


def loaded(store: MemoryStore, layout: Any, steps: int, kind: Any = State8bit) -> list[Any]:
    """What each rank gets, or its error; the optimizer is new, or has made steps."""

    def load(mesh: Any, group: Any) -> Any:
        net, optimizer = made(mesh, layout, kind, steps, 2)
        before = [tensor.clone() for tensor in optimizer.state.get(net.weight, {}).values()]
        try:
            ckpt.load({"m": net, "o": optimizer}, store, process_group=group)
        except CheckpointError as error:
            now = optimizer.state.get(net.weight, {}).values()
            assert all(map(same, now, before))
            return str(error)
        return optimizer.state[net.weight]["momentum_buffer"]

    return on_ranks(layout, load)


def local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)


@pytest.mark.parametrize("kind", [State8bit, StateFp8])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("layout", [HALVES, WHOLE, ((2, 2), [Replicate(), Shard(0)])])
def test_ranks_with_the_same_parts_get_their_state(kind: Any, steps: int, layout: Any) -> None:
    store, wanted = saved(layout, kind)
    for got, want in zip(loaded(store, layout, steps, kind), wanted, strict=True):
        assert isinstance(got, DTensor)
        assert got.placements == want.placements
        assert got.shape == (ROWS, COLUMNS)
        assert same(local(got), local(want))
    assert "o/state/m/weight/@0/state/momentum_buffer/codes" in ckpt.open(store)
    assert ckpt.verify(store).problems == ()


@pytest.mark.parametrize("steps", [0, 1])
def test_other_parts_are_an_error_before_anything_changes(steps: int) -> None:
    store, wanted = saved(HALVES)
    for error in loaded(store, QUARTERS, steps):
        assert "o/state/m/weight: ranks had other state of this parameter" in error
    for error in (*loaded(store, WHOLE, steps), *loaded(store, NO_MESH, steps)):
        assert "goes back to these" in error
    four = loaded(store, ((2, 2), [Replicate(), Shard(0)]), steps)
    for got, want in zip(four, wanted * 2, strict=True):
        assert same(local(got), local(want))


@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_whole_parameters_goes_wherever_they_are_whole(steps: int) -> None:
    for source in (NO_MESH, WHOLE):
        store, wanted = saved(source)
        for layout in (NO_MESH, WHOLE):
            for got in loaded(store, layout, steps):
                assert same(local(got), local(wanted[0]))
                assert isinstance(got, DTensor) == (layout is WHOLE)
    store, _ = saved(NO_MESH)
    for error in loaded(store, HALVES, steps):
        assert "State8bit of the whole parameter was saved, and this parameter is sharded" in error


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_parts_without_state_or_without_elements(rows: int) -> None:
    """The second rank has had no gradient, or nothing of the parameter."""

    def net_of(mesh: Any, rank: int, seed: int) -> tuple[Any, LowBit]:
        whole = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))
        own = whole.split(max(rows // 2, 1))
        part = own[rank] if rank < len(own) else whole[:0]
        net = nn.Module()
        net.weight = nn.Parameter(
            DTensor.from_local(part.clone(), mesh, [Shard(0)], shape=(rows, COLUMNS))
        )
        return net, LowBit(net.parameters(), State8bit)

    store = MemoryStore()

    def run(mesh: Any, group: Any) -> None:
        net, optimizer = net_of(mesh, group.rank(), 1)
        if rows == 1 or group.rank() == 0:
            net.weight.grad = net.weight.detach() * 2
        optimizer.step()
        ckpt.save({"m": net, "o": optimizer}, store, process_group=group)
        for steps in (0, 1):
            other, its = net_of(mesh, group.rank(), 2)
            for _ in range(steps):
                other.weight.grad = other.weight.detach() * 3
                its.step()
            ckpt.load({"m": other, "o": its}, store, process_group=group)
            want, got = optimizer.state.get(net.weight, {}), its.state.get(other.weight, {})
            assert want.keys() == got.keys()
            for key, value in want.items():
                assert same(local(value), local(got[key])), key

    on_ranks(HALVES, run)


def test_a_parameter_or_tensor_with_such_shards_is_refused_by_name() -> None:
    def save(state: Callable[[Any], Any]) -> None:
        def body(mesh: Any, group: Any) -> None:
            ckpt.save(state(mesh), MemoryStore(), process_group=group)

        on_ranks(HALVES, body)

    def sharded(mesh: Any) -> DTensor:
        zeros: Any = State8bit.zeros((ROWS // 2, COLUMNS))
        return DTensor.from_local(zeros, mesh, [Shard(0)], shape=(ROWS, COLUMNS))

    def module(mesh: Any) -> nn.Module:
        net = nn.Module()
        net.weight = nn.Parameter(sharded(mesh), requires_grad=False)
        return net

    def optimizer(mesh: Any) -> LowBit:
        return made(mesh, HALVES, State8bit, 1, 1)[1]

    states: list[Callable[[Any], Any]] = [
        lambda mesh: {"m": module(mesh)},
        lambda mesh: {"m": {"weight": sharded(mesh)}},
        lambda mesh: {"o": optimizer(mesh).state_dict()},
        lambda mesh: {"o": optimizer(mesh)},
    ]
    for state in states:
        with pytest.raises(RanksFailed, match=r"has as its shard a .*State8bit.*beside its module"):
            save(state)


def test_with_fsdp_of_torch_and_with_ours(tmp_path: Path) -> None:
    outputs = run_processes("tests.checkpoint.optimizers.low_bit_ranks", 2, str(tmp_path))
    assert all(output.endswith("ok\n") for output in outputs)
    found = ckpt.open(tmp_path / "torch-State8bit")
    assert "o/state/m/0.weight/@1/state/momentum_buffer/qmap" in found
    assert "o/state/m/1.weight/@0/state/momentum_buffer/codes" in found
    assert "o/state/m/1.weight/@1/state/momentum_buffer" in found
