"""A small training whose parameters are large enough to be copied late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.storage import MemoryStore

SIDE = 128
"""A weight takes 64 KiB."""
LATE = 7 * SIDE * SIDE * 4
"""Bytes that wait: three weights, one of them frozen, and two moments of the others."""


class Training:
    """A model with a normalisation, which forward passes write to, and its optimizer."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.first = torch.nn.Linear(SIDE, SIDE)
        self.norm = torch.nn.BatchNorm1d(SIDE)
        self.frozen = torch.nn.Linear(SIDE, SIDE)
        self.frozen.weight.requires_grad_(False)
        last = torch.nn.Linear(SIDE, SIDE)
        self.model = torch.nn.Sequential(self.first, self.norm, last, self.frozen)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=0.1, **settings)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "step": 0,
        }
        for _ in range(2):
            self.run()

    def forward_backward(self) -> None:
        """Run what comes before a step."""
        self.model(torch.randn(4, SIDE)).square().mean().backward()

    def run(self) -> None:
        """Run a step."""
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] += 1

    @property
    def weight(self) -> torch.nn.Parameter:
        """A parameter that is copied late, the first one of the file."""
        return next(self.model.parameters())

    @property
    def moment(self) -> torch.Tensor:
        """State of the optimizer that is copied late."""
        return self.optimizer.state[self.weight]["exp_avg"]


def expected_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a save at this moment has to hold: that of one which copies within the call."""
    store = MemoryStore()
    ckpt.save(state, store)
    return content_of(store)


def content_of(store: Any) -> dict[str, Any]:
    """Return tensors and values of a checkpoint."""
    with ckpt.open(store) as checkpoint:
        tensors = {name: tensor[...] for name, tensor in checkpoint.items()}
        return tensors | {"step": checkpoint.state_dict()["step"]}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare all bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(bits_of(found[name]), bits_of(value)), name
        else:
            assert found[name] == value, name


def saved_through(
    training: Training, change: Callable[[Training], object], **options: Any
) -> tuple[ckpt.SaveHandle, MemoryStore, dict[str, Any]]:
    """Save, change what a test changes, and return the save, its place, and what it has to hold."""
    expected = copy.deepcopy(expected_of(training.state))
    store = MemoryStore()
    chosen: dict[str, Any] = {"spread": True} | options
    handle = ckpt.async_save(training.state, store, **chosen)
    change(training)
    return handle, store, expected


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def left(handle: ckpt.SaveHandle) -> int:
    progress = handle.progress()
    return progress.total_bytes - progress.staged_bytes


def several(*changes: Callable[[Training], object]) -> Callable[[Training], None]:
    def run(training: Training) -> None:
        for change in changes:
            change(training)

    return run


def no_grad(change: Callable[[Training], object]) -> Callable[[Training], None]:
    def run(training: Training) -> None:
        with torch.no_grad():
            change(training)

    return run
