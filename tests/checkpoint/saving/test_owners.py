"""State of which each rank has another part: whole tensors with owners, who may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks

NAMES = [f"layer{number}" for number in range(7)]
WHOLE = {name: torch.arange(6.0).reshape(2, 3) + 10 * n for n, name in enumerate(NAMES)}


def owned(rank: int, size: int) -> list[str]:
    """The layers whose state a rank has, dealt out in turn."""
    return NAMES[rank::size]


def counted(model: nn.Module, seed: int) -> nn.Module:
    """Give parameters values that do not depend on the random numbers that threads share."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view_as(param) + 10 * number + seed)
    return model


@pytest.mark.parametrize("read_once", [None, True, False])
def test_owners_change_with_the_number_of_ranks(read_once: bool | None) -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> dcp.SaveReport:
        state = {name: {"momentum": WHOLE[name], "step": 4} for name in owned(rank, 2)}
        return dcp.save({"muon": state, "step": 4}, store, process_group=group)

    reports = run_ranks(2, save)
    assert all(report.written_bytes > 0 for report in reports), "every owner writes"

    def load(rank: int, group: Any) -> list[str]:
        mine: dict[str, Any] = {
            n: {"momentum": torch.zeros(2, 3), "step": 0} for n in owned(rank, 3)
        }
        state = {"muon": mine, "step": 0}
        report = dcp.load(state, store, process_group=group, read_once=read_once)
        for name, entry in mine.items():
            assert WHOLE[name].equal(entry["momentum"])
            assert entry["step"] == state["step"] == 4
        return [report.url, *mine]

    assert sorted(name for _, *names in run_ranks(3, load) for name in names) == sorted(NAMES)
    whole: Any = {"muon": {n: {"momentum": torch.zeros(2, 3), "step": 0} for n in NAMES}, "step": 0}
    dcp.load(whole, store)
    assert all(WHOLE[name].equal(entry["momentum"]) for name, entry in whole["muon"].items())


def test_an_optimizer_may_have_stepped_other_parameters_on_every_rank() -> None:
    store = MemoryStore()

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = counted(nn.Sequential(*(nn.Linear(2, 3) for _ in range(3))), seed)
        return model, torch.optim.Adam(model.parameters(), lr=0.1 if seed == 0 else 0.3)

    def save(rank: int, group: Any) -> None:
        model, optimizer = make(0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for number, param in enumerate(model.parameters()):
            if number % 2 == rank:
                param.grad = torch.full_like(param, float(number))
        optimizer.step()
        model.load_state_dict(before)  # as if owners had told the others
        dcp.save({"model": model, "optimizer": optimizer}, store, process_group=group)

    run_ranks(2, save)
    model, optimizer = make(1)
    dcp.load({"model": model, "optimizer": optimizer}, store)
    for number, param in enumerate(model.parameters()):
        assert optimizer.state[param]["exp_avg"].equal(torch.full_like(param, 0.1 * number))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_optimizers_over_other_matrices_on_every_rank() -> None:
    store, size = MemoryStore(), 7

    def make(seed: int, rank: int, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = counted(nn.Sequential(*(nn.Linear(2, 3, bias=False) for _ in range(size))), seed)
        own = list(model.parameters())[rank::count]
        return model, torch.optim.Muon(own, lr=0.1 if seed == 0 else 0.3)

    def trained(rank: int, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make(0, rank, count)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, float(number))
        optimizer.step()
        model.load_state_dict(before)  # as if owners had told the others
        return model, optimizer

    def save(rank: int, group: Any) -> None:
        model, optimizer = trained(rank, 2)
        dcp.save({"model": model, "optimizer": optimizer}, store, process_group=group)

    run_ranks(2, save)

    def load(rank: int, group: Any, count: int = 3) -> None:
        model, optimizer = make(1, rank, count)
        dcp.load({"model": model, "optimizer": optimizer}, store, process_group=group)
        _, wanted = trained(rank, count)
        assert len(optimizer.state) == len(wanted.state) == len(range(rank, size, count))
        for entry, other in zip(optimizer.state.values(), wanted.state.values(), strict=True):
            assert entry["momentum_buffer"].equal(other["momentum_buffer"])
        assert optimizer.param_groups[0]["lr"] == 0.1

    run_ranks(3, load)
    load(0, None, 1)


@pytest.mark.parametrize(
    "others", [WHOLE["layer1"], torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)]
)
def test_two_tensors_under_one_name_are_never_taken_for_one(others: torch.Tensor) -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        dcp.save({"w": others if rank else WHOLE["layer0"]}, store, process_group=group)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, save)
    for error in failed.value.errors.values():
        assert isinstance(error, LayoutMismatch)
        assert "'w'" in str(error)
