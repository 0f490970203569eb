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

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "LBFGS": {"max_iter": 3},
}
OF_TORCH = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in ("Optimizer", "SparseAdam")
)
"""All optimizers of torch; SparseAdam takes sparse gradients only and has the state of Adam."""


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


@pytest.mark.parametrize("kind", OF_TORCH)
def test_a_resumed_run_goes_on_as_if_nothing_had_been(kind: str) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        matrices = [p for p in params if kind != "Muon" or p.ndim == 2]
        return getattr(torch.optim, kind)(matrices, lr=0.1, **OPTIONS.get(kind, {}))

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


rate = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: rate.LambdaLR(o, [lambda n: 0.9**n, lambda n: 0.8**n]),
    "LambdaLR of an object": lambda o: rate.LambdaLR(o, Decay(0.9)),
    "MultiplicativeLR": lambda o: rate.MultiplicativeLR(o, lambda n: 0.9 + n / 100),
    "StepLR": lambda o: rate.StepLR(o, 2),
    "MultiStepLR": lambda o: rate.MultiStepLR(o, [1, 2, 9]),
    "ConstantLR": lambda o: rate.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: rate.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: rate.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: rate.PolynomialLR(o, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda o: rate.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: rate.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: rate.CyclicLR(o, [0.1, 0.2], 1.0, step_size_up=3),
    "OneCycleLR": lambda o: rate.OneCycleLR(o, [1.0, 2.0], total_steps=20),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=6),
    "ReduceLROnPlateau": lambda o: rate.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: rate.ChainedScheduler(
        [rate.ExponentialLR(o, 0.9), rate.ConstantLR(o, total_iters=6)]
    ),
    "SequentialLR": lambda o: rate.SequentialLR(
        o, [rate.LinearLR(o, total_iters=4), rate.CosineAnnealingLR(o, 7)], [5]
    ),
}


class Decay:
    """A factor with parameters, which a scheduler saves."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, epoch: int) -> float:
        return self.base**epoch


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_resumed_schedule_goes_on_as_if_nothing_had_been(kind: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        net = model()
        groups = [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "lr": 0.25}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def run(optimizer: Any, scheduler: Any, steps: int) -> list[list[float]]:
        found: list[list[float]] = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    for steps in (1, 4, 6):
        optimizer, scheduler = make()
        run(optimizer, scheduler, steps)
        store = MemoryStore()
        dcp.save({"o": optimizer, "s": scheduler}, store)
        kept = copy.deepcopy(scheduler.state_dict())
        expected = run(optimizer, scheduler, 8)
        for state in ("fresh", "used"):
            other, resumed = make()
            run(other, resumed, 3 if state == "used" else 0)
            dcp.load({"o": other, "s": resumed}, store)
            assert resumed.state_dict() == kept
            assert run(other, resumed, 8) == expected, (steps, state)


class Trainer:
    """An object of the user's that hands out the state of a scheduler among other things."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.scheduler.load_state_dict(state["scheduler"])


HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a state dict": (lambda s: s.state_dict(), "s"),
    "one in a list": (lambda s: [s.state_dict()], "s/0"),
    "one of a rank": (lambda s: dcp.PerRank(s.state_dict()), "s/@0"),
    "an object of the user's": (Trainer, "s/scheduler"),
}


@pytest.mark.parametrize("kind", ["StepLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_state_of_schedulers_is_known_by_its_rates_where_groups_have_moved(
    holder: str, kind: str
) -> None:
    hold, at = HOLDERS[holder]

    def make(order: list[str], rates: dict[str, float]) -> dict[str, Any]:
        net = model()
        groups = [{"params": [getattr(net, name)], "lr": rates[name]} for name in order]
        optimizer = torch.optim.SGD(groups)
        return {"net": net, "o": optimizer, "s": hold(SCHEDULERS[kind](optimizer))}

    rates = {"weight": 0.1, "bias": 0.2}
    store = MemoryStore()
    dcp.save(make(["weight", "bias"], rates), store)
    moved = make(["bias", "weight"], rates)
    with pytest.raises(LayoutMismatch, match=rf": 1 leaves .*\n  {at}: the scheduler was saved"):
        dcp.load(moved, store)
    dcp.load(make(["weight", "bias"], rates), store)
    dcp.load(moved, store, select=["net", "o"])
    del moved["s"]
    dcp.load(moved, store, strict=False)
    assert [group["lr"] for group in moved["o"].param_groups] == [
        group["lr"] for group in make(["bias", "weight"], rates)["o"].param_groups
    ]
    alike = dict.fromkeys(rates, 0.1)
    dcp.save(make(["weight", "bias"], alike), store, overwrite=True)
    dcp.load(make(["bias", "weight"], alike), store)


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
