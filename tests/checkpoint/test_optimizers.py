"""Optimizers and schedulers, fresh, used and half used, come back as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtckpt.checkpoint as dcp
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def model(out: int = 4) -> nn.Linear:
    """A small model with the same start each time."""
    torch.manual_seed(0)
    return nn.Linear(8, out)


def step(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """One deterministic step."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 8)).square().mean()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_resumed_run_goes_on_as_if_nothing_had_been(make: Make) -> None:
    net = model()
    optimizer = make(net.parameters())
    for _ in range(3):
        step(net, optimizer)
    store = MemoryStore()
    dcp.save({"net": net, "optimizer": optimizer}, store)
    for used in (False, True):
        fresh = model()
        other = make(fresh.parameters())
        if used:
            step(fresh, other)
        dcp.load({"net": fresh, "optimizer": other}, store)
        continued = copy.deepcopy(net)
        reference = make(continued.parameters())
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(fresh, other)
        step(continued, reference)
        assert torch.equal(fresh.weight, continued.weight)


def test_state_in_another_dtype_than_its_parameter_is_not_rounded() -> None:
    net = model().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    kept = torch.randn(4, 8)
    for param in net.parameters():
        optimizer.state[param] = {
            "step": torch.tensor(3.0),
            "exp_avg": kept if param.ndim == 2 else torch.randn(4),
            "exp_avg_sq": torch.rand_like(param),
        }
    store = MemoryStore()
    dcp.save({"o": optimizer}, store)
    for touched in (False, True):
        fresh = model().bfloat16()
        other = torch.optim.AdamW(fresh.parameters())
        if touched:
            _ = other.state[fresh.weight]  # makes an empty entry
        dcp.load({"o": other}, store)
        loaded = other.state[fresh.weight]["exp_avg"]
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, kept)
        assert other.state[fresh.weight]["exp_avg_sq"].dtype == torch.bfloat16


def test_state_of_another_model_is_refused() -> None:
    net = model(4)
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    store = MemoryStore()
    dcp.save({"o": optimizer}, store)
    other = torch.optim.AdamW(model(5).parameters())
    with pytest.raises(
        LayoutMismatch, match=r"exp_avg: saved as float32\[4, 8\], wanted as .*5, 8"
    ):
        dcp.load({"o": other}, store)
    assert not other.state


def test_schedulers() -> None:
    def schedulers(optimizer: Any) -> dict[str, Any]:
        rate = torch.optim.lr_scheduler
        return {
            "multi": rate.MultiStepLR(optimizer, [1, 2, 9]),
            "cosine": rate.CosineAnnealingLR(optimizer, 7),
            "plateau": rate.ReduceLROnPlateau(optimizer),
        }

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    used = schedulers(optimizer)
    for _ in range(3):
        step(net, optimizer)
        used["multi"].step()
        used["cosine"].step()
        used["plateau"].step(1.0)
    store = MemoryStore()
    dcp.save({"o": optimizer, **used}, store)
    fresh_optimizer = torch.optim.SGD(model().parameters(), lr=5.0)
    fresh = schedulers(fresh_optimizer)
    dcp.load({"o": fresh_optimizer, **fresh}, store)
    for name, scheduler in used.items():
        assert fresh[name].state_dict() == scheduler.state_dict()
        assert type(fresh["multi"].milestones) is type(used["multi"].milestones)
    assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Shampoo(torch.optim.Optimizer):
    """State of as many dims as the parameter, but of other sizes, in lists and beside them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        """Make the state."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    f"precond_{d}": torch.eye(n) * 2 for d, n in enumerate(p.shape)
                } | {"history": [torch.ones(2), torch.zeros(3)], 7: torch.ones(1)}


def test_state_of_any_shape_is_loaded_into_a_fresh_optimizer() -> None:
    optimizer = Shampoo(model().parameters())
    optimizer.step()
    store = MemoryStore()
    dcp.save({"o": optimizer}, store)
    other = Shampoo(model().parameters())
    dcp.load({"o": other}, store)
    for state, expected in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert state.keys() == expected.keys()
        assert torch.equal(state["precond_0"], expected["precond_0"])
        assert torch.equal(state["history"][0], torch.ones(2))


def test_step_counters_that_are_numbers() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        zeros = torch.zeros_like(p)
        optimizer.state[p] = {"step": 3, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    store = MemoryStore()
    dcp.save({"o": optimizer}, store)
    for used in (False, True):
        fresh = model()
        other = torch.optim.AdamW(fresh.parameters())
        if used:
            step(fresh, other)
        dcp.load({"o": other}, store)
        assert int(other.state[fresh.weight]["step"]) == 3
