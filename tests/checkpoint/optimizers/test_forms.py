"""State of optimizers has the dtypes and the form of the checkpoint, whatever was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.storage import MemoryStore

from ...processes import run_processes
from ...ranks import run_ranks


class Nested(torch.optim.Optimizer):
    """Keeps tensors of many dtypes in lists, tuples and dicts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for param in self.param_groups[0]["params"]:
            count = self.state[param].get("step", 0) + 1
            self.state[param] = {
                "step": count,
                "top": torch.full(param.shape, 0.1 * count),
                "list": [torch.full((3,), 0.1), torch.full((3,), 0.1, dtype=torch.float64)],
                "tuple": (torch.full((2,), 0.1), None),
                "dict": {"m": torch.full(param.shape, 0.1), "deep": {"k": [torch.full((1,), 0.1)]}},
                "codes": [torch.full((4,), 9, dtype=torch.int8)],
                "index": {"i": torch.full((2,), 16_777_217)},
            }


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, torch.Tensor) or not isinstance(value, dict | list | tuple):
        return {name: value}
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)  # pyright: ignore
    return {n: v for key, item in items for n, v in _flat(item, f"{name}/{key}").items()}


@pytest.mark.parametrize("steps", [0, 1])
def test_nested_state_keeps_its_dtypes_beside_bfloat16(steps: int) -> None:
    saved, net = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).bfloat16()
    one, other = Nested(saved.parameters()), Nested(net.parameters())
    for _ in range(3):
        one.step()
    store = MemoryStore()
    dcp.save({"model": saved, "opt": one}, store)
    for _ in range(steps):
        other.step()
    dcp.load({"model": net, "opt": other}, store)
    wanted, found = _flat(one.state[saved.weight]), _flat(other.state[net.weight])
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def test_forms_beside_sharded_parameters(tmp_path: Path) -> None:
    outputs = run_processes("tests.checkpoint.optimizers.form_ranks", 2, str(tmp_path / "c"))
    assert all(output.endswith("ok\n") for output in outputs)
    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False)).bfloat16()
    alone = Nested(net.parameters())
    dcp.load({"model": net, "opt": alone}, tmp_path / "c")
    weight: Any = net[0].weight
    state, whole = alone.state[weight], weight.detach().float()
    assert all(type(value) is torch.Tensor for value in _flat(state).values())
    assert torch.equal(state["exp_avg"], whole + 1)
    assert torch.equal(state["flat"], whole.flatten() + 5)
    assert state["norms"][1][0].tolist() == [16_777_217]


def _twins() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(torch.ones(2)).square().sum()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        return loss

    for _ in range(times):
        optimizer.step(closure)


@pytest.mark.parametrize("strict", [True, "state", False])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "LBFGS", "Adagrad"])
def test_going_back_to_before_the_first_step(kind: str, strict: Any) -> None:
    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        net = _twins()
        settings: dict[str, Any] = {"SGD": {"momentum": 0.9}}.get(kind, {})
        return net, getattr(torch.optim, kind)(net.parameters(), lr=0.1, **settings)

    store = MemoryStore()
    net, optimizer = make()
    dcp.save({"model": net, "opt": optimizer}, store)
    _step(net, optimizer, 3)
    report = dcp.load({"model": net, "opt": optimizer}, store, strict=strict)
    if kind != "Adagrad":  # which has state before its first step
        assert "opt/state/model/0.weight" in report.cleared
    straight, other = make()
    _step(net, optimizer, 3)
    _step(straight, other, 3)
    assert all(map(torch.equal, net.parameters(), straight.parameters()))


@pytest.mark.parametrize("in_optimizer", [True, False])
def test_state_of_what_was_frozen_goes(in_optimizer: bool) -> None:
    net = _twins()
    net[0].requires_grad_(False)
    trained = net.parameters() if in_optimizer else net[1].parameters()
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    _step(net, optimizer)
    store = MemoryStore()
    dcp.save({"model": net, "opt": optimizer}, store)
    now = optimizer if in_optimizer else torch.optim.AdamW(net.parameters(), lr=0.1)
    net[0].requires_grad_(True)
    _step(net, now, 3)
    state = {"model": net, "opt": now}
    if not in_optimizer:
        with pytest.raises(
            dcp.LayoutMismatch, match="Missing in the checkpoint: opt/state/model/0"
        ):
            dcp.load(state, store)
        assert len(now.state) == 4
    report = dcp.load(state, store, strict=in_optimizer)
    assert list(now.state) == list(net[1].parameters())
    assert set(report.cleared) == {"opt/state/model/0.weight", "opt/state/model/0.bias"}
    _step(net, now)
    kept = dcp.load(state, store, strict=False, select="opt/state/model/1.*")
    assert not kept.cleared
    assert len(now.state) == 4


def test_state_of_parameters_that_are_not_loaded_stays() -> None:
    net = _twins()
    optimizer = torch.optim.AdamW(net[1].parameters(), lr=0.1)
    _step(net, optimizer)
    store = MemoryStore()
    dcp.save({"model": {"1": net[1]}, "opt": optimizer}, store)
    now = torch.optim.AdamW(net.parameters(), lr=0.1)
    _step(net, now, 3)
    state = {"model": {"0": net[0], "1": net[1]}, "opt": now}
    report = dcp.load(state, store, strict=False)
    assert len(now.state) == 4
    assert not report.cleared


def test_empty_groups_of_a_stage_take_their_settings_by_position() -> None:
    store, again = MemoryStore(), MemoryStore()

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net: nn.Module = nn.ModuleDict(
            {"a": nn.Linear(4, 4)} if rank == 0 else {"b": nn.LayerNorm(4)}
        )
        params = list(net.parameters())
        groups = [
            {"params": [p for p in params if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def run(rank: int, group: Any) -> None:
        def step(net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            scheduler.step()

        was = make(rank)
        for _ in range(3):
            step(*was)
        dcp.save(dict(zip("mos", was, strict=True)), store, process_group=group)
        now = make(rank)
        dcp.load(dict(zip("mos", now, strict=True)), store, process_group=group)
        assert [group["lr"] for group in now[1].param_groups] == [0.025, 0.025]
        step(*now)
        step(*was)
        assert [g["lr"] for g in now[1].param_groups] == [g["lr"] for g in was[1].param_groups]
        dcp.save(dict(zip("mos", now, strict=True)), again, process_group=group)

    run_ranks(2, run)
