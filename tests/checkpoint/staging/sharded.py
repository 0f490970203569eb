"""What holds for saves with ``spread=True`` of a sharded model, whoever has sharded it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.errors import StateChanged
from dtckpt.storage import Store

from .training import bits_of

SIDE = 192
"""Half of a weight, as each of two ranks has it, takes 72 KiB."""


class Sharded:
    """A model sharded over two ranks, and its optimizer."""

    def __init__(self, shard: Callable[[nn.Module], object], group: Any, **settings: Any) -> None:
        torch.manual_seed(0)
        self.group = group
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        for layer in self.model:
            shard(layer)
        shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **settings)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.run()

    @property
    def weights(self) -> list[Any]:
        """Those of the weights, in their order."""
        return [param for param in self.model.parameters() if param.ndim == 2]

    def forward_backward(self) -> None:
        """Run what comes before a step."""
        self.model(torch.randn(4, SIDE)).square().mean().backward()

    def run(self) -> None:
        """Run a step."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] += 1

    def held(self) -> dict[str, torch.Tensor]:
        """Return copies of what this rank holds."""
        found: dict[str, Any] = dict(self.model.state_dict())
        for number, param in enumerate(self.model.parameters()):
            entries: dict[str, Any] = self.optimizer.state[param]
            found |= {f"{number}/{key}": value for key, value in entries.items()}
        return {name: _local(value).detach().clone() for name, value in found.items()}

    def save(self, store: Store, **options: Any) -> ckpt.SaveHandle:
        """Save, spread over the steps that follow."""
        chosen: dict[str, Any] = {"spread": True, "overwrite": True} | options
        return ckpt.async_save(self.state, store, process_group=self.group, **chosen)

    def check(self, store: Store, expected: dict[str, torch.Tensor]) -> None:
        """Load what was saved and compare all bits that this rank holds."""
        ckpt.load(self.state, store, process_group=self.group)
        found = self.held()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(bits_of(found[name]), bits_of(value)), name


def check_all(make: Callable[..., Sharded], store: Store) -> None:
    """Check everything; ``make`` returns a new model."""
    check_steps(make(), store)
    check_steps(make(foreach=True), store)
    check_steps(make(fused=True), store)
    check_gradients_drive(make(), store)
    check_steps_within_backward(make(), store)
    for change in (in_place, local_in_place, as_list, moment_in_place, through_data):
        check_change(make(), store, change)


def check_steps(one: Sharded, store: Store) -> None:
    expected = one.held()
    handle = one.save(store)
    one.run()
    one.run()
    handle.result(60)
    one.check(store, expected)


def check_gradients_drive(one: Sharded, store: Store) -> None:
    expected = one.held()
    handle = one.save(store)
    before = _left(handle)
    assert before >= 9 * SIDE * SIDE // 2 * 4, before
    one.model(torch.randn(4, SIDE))
    assert _left(handle) == before, "a forward pass copied"
    one.forward_backward()
    assert _left(handle) == 0, "gradients copied not all"
    one.optimizer.step()
    for param in one.model.parameters():
        assert not getattr(param, "_post_accumulate_grad_hooks", None), "hooks stayed"
    handle.result(60)
    one.check(store, expected)


def check_steps_within_backward(one: Sharded, store: Store) -> None:
    expected = one.held()
    for param in one.model.parameters():
        step = partial(_step, torch.optim.SGD([param], lr=0.1))
        param.register_post_accumulate_grad_hook(step)
    handle = one.save(store)
    one.forward_backward()
    assert _left(handle) == 0
    one.forward_backward()
    handle.result(60)
    one.check(store, expected)


def _step(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()


def check_change(one: Sharded, store: Store, change: Callable[[Sharded], object]) -> None:
    handle = one.save(store)
    with torch.no_grad():
        change(one)
    one.run()
    error = handle.exception(60)
    assert isinstance(error, StateChanged), (change, error)
    assert "0" in str(error)


# Each changes another tensor: what was found to change is not copied late any more.


def in_place(one: Sharded) -> None:
    one.weights[0].add_(1)


def local_in_place(one: Sharded) -> None:
    one.weights[1].to_local().add_(1)


def as_list(one: Sharded) -> None:
    vars(torch)["_foreach_mul_"]([one.weights[2]], 0.5)


def moment_in_place(one: Sharded) -> None:
    one.optimizer.state[one.weights[0]]["exp_avg"].mul_(0.5)


def through_data(one: Sharded) -> None:
    one.optimizer.state[one.weights[0]]["exp_avg_sq"].data.mul_(0.5)


def _left(handle: ckpt.SaveHandle) -> int:
    progress = handle.progress()
    return progress.total_bytes - progress.staged_bytes


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
