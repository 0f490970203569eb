"""Experts without a gradient on some ranks, or with other numbers of steps: kept as they are."""

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
from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import rank_mesh
from ...processes import run_processes
from ...ranks import run_ranks

ROWS = 4


class Moe(nn.Module):
    """A gate that all ranks share, and experts that are spread over them."""

    def __init__(self, mesh: DeviceMesh, placements: list[Any]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))
        whole = torch.arange(ROWS * 3.0).reshape(ROWS, 3)
        self.experts = nn.Parameter(distributed(whole, mesh, placements))


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """The tensor of which every rank cuts its own rows; nobody is asked."""
    at, size = mesh.get_coordinate() or [], mesh.mesh.shape
    rows = whole
    for place, index, count in zip(placements, at, size, strict=True):
        rows = rows.chunk(count)[index] if isinstance(place, Shard) else rows
    return DTensor.from_local(rows.clone(), mesh, placements, shape=tuple(whole.shape))


def trained(moe: Moe, steps: int, gate_steps: int) -> torch.optim.AdamW:
    """An optimizer after some steps in which this rank's experts had gradients."""
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1, foreach=False)
    for number in range(gate_steps):
        moe.gate.grad = torch.full((4,), number + 1.0)
        moe.experts.grad = torch.ones_like(moe.experts) * (number + 2) if number < steps else None
        optimizer.step()
    return optimizer


def state_of(moe: Moe, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of this rank's part, as plain tensors."""
    found: dict[str, Any] = {"lr": optimizer.param_groups[0]["lr"]}
    for name, param in moe.named_parameters():
        found[name] = param
        found |= {f"{name} {key}": value for key, value in optimizer.state.get(param, {}).items()}
    return {
        name: value.to_local().detach().clone() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def check_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Bit for bit, and nothing more or less."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


def on_mesh(
    shape: tuple[int, ...], placements: list[Any], body: Callable[[int, Any, Moe], Any]
) -> list[Any]:
    """Run ``body(rank, group, moe)`` on the ranks of a mesh."""
    c10d: Any = dist
    store = c10d.HashStore()

    def run(rank: int, group: Any) -> Any:
        mesh = rank_mesh(store, shape, rank, group)
        return body(rank, group, Moe(mesh, placements))

    return run_ranks(math.prod(shape), run)


def saved(
    shape: tuple[int, ...], placements: list[Any], steps: Callable[[int], int]
) -> tuple[MemoryStore, list[dict[str, Any]]]:
    """A checkpoint of experts with ``steps(rank)`` of two steps, and what each rank had."""
    store = MemoryStore()

    def save(rank: int, group: Any, moe: Moe) -> dict[str, Any]:
        optimizer = trained(moe, steps(rank), 2)
        ckpt.save({"m": moe, "o": optimizer}, store, process_group=group)
        return state_of(moe, optimizer)

    return store, on_mesh(shape, placements, save)


def loaded(
    store: MemoryStore,
    shape: tuple[int, ...],
    placements: list[Any],
    *,
    is_used: bool = False,
) -> list[Any]:
    """What each rank gets, or its error; the optimizer is new, or has made other steps."""

    def load(_: int, group: Any, moe: Moe) -> Any:
        with torch.no_grad():
            moe.gate.fill_(9)
        optimizer = trained(moe, 3, 3 if is_used else 0)
        try:
            ckpt.load({"m": moe, "o": optimizer}, store, process_group=group)
        except LayoutMismatch as error:
            return str(error)
        return state_of(moe, optimizer)

    return on_mesh(shape, placements, load)


KINDS: dict[str, Callable[[int], int]] = {
    "absent on the second rank": lambda rank: 2 if rank % 2 == 0 else 0,
    "absent on the first rank": lambda rank: 2 if rank % 2 else 0,
    "other numbers of steps": lambda rank: 1 + rank % 2,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_used", [False, True])
def test_each_rank_gets_what_it_had(kind: str, is_used: bool) -> None:
    store, wanted = saved((2,), [Shard(0)], KINDS[kind])
    for got, want in zip(loaded(store, (2,), [Shard(0)], is_used=is_used), wanted, strict=True):
        check_same(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_with_the_same_parts_get_them(kind: str) -> None:
    store, wanted = saved((2, 2), [Replicate(), Shard(0)], KINDS[kind])
    for got, want in zip(loaded(store, (2, 2), [Replicate(), Shard(0)]), wanted, strict=True):
        check_same(got, want)
    for got, want in zip(loaded(store, (2,), [Shard(0)]), wanted[:2], strict=True):
        check_same(got, want)
    moved = loaded(store, (2, 2), [Shard(0), Replicate()])
    for got, part in zip(moved, (0, 0, 1, 1), strict=True):
        check_same(got, wanted[part])


@pytest.mark.parametrize("kind", KINDS)
def test_other_parts_are_an_error_with_a_remedy(kind: str) -> None:
    store, wanted = saved((2,), [Shard(0)], KINDS[kind])
    for error in loaded(store, (4,), [Shard(0)]):
        assert "o/state/m/experts: ranks had other state of this parameter" in error
        assert "Load it with the parts of the save" in error
    # Following it on those parts loses nothing.
    for got, want in zip(loaded(store, (2,), [Shard(0)]), wanted, strict=True):
        check_same(got, want)


def test_replicas_that_differ_are_still_an_error() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any, moe: Moe) -> str:
        optimizer = trained(moe, rank, 2)
        with pytest.raises(LayoutMismatch) as failure:
            ckpt.save({"m": moe, "o": optimizer}, store, process_group=group)
        return str(failure.value)

    errors = on_mesh((2,), [Replicate()], save)
    assert "o/state/m/experts" in errors[0]
    assert len(set(errors)) == 1


def test_state_that_ranks_have_alike_is_stored_as_before() -> None:
    store, _ = saved((2,), [Shard(0)], lambda _: 2)
    found = ckpt.open(store)
    assert found["o/state/m/experts/exp_avg"].shape == (ROWS, 3)
    for part in loaded(store, (4,), [Shard(0)]):
        assert part["experts exp_avg"].shape == (1, 3)


def test_experts_as_tensors_of_torch(tmp_path: Path) -> None:
    outputs = run_processes("tests.checkpoint.optimizers.own_entries_ranks", 2, str(tmp_path))
    assert all(output.endswith("ok\n") for output in outputs)


def test_the_checkpoint_can_be_looked_at_and_verified() -> None:
    store, _ = saved((2,), [Shard(0)], KINDS["absent on the second rank"])
    assert ckpt.verify(store).problems == ()
    assert ckpt.open(store)["m/experts"][...].shape == (ROWS, 3)
    assert "o/state/m/experts/@0/state/exp_avg" in set(ckpt.open(store))
