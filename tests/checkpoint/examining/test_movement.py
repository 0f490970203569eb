"""Drift of weights between steps, against numpy."""

from __future__ import annotations

import functools
import itertools
import operator
from pathlib import Path

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.examining import movement as moving
from dtckpt.checkpoint.examining.drift import Sum
from dtckpt.checkpoint.examining.modules import modules_of
from dtckpt.checkpoint.examining.movement import Moved, Movement, movement
from dtckpt.storage import open_store


def relative(found: Movement) -> float:
    """How far all weights moved."""
    return functools.reduce(operator.add, found.moved.values()).relative


def test_drift_is_of_all_weights_the_unchanged_ones_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    frozen = torch.randn(50, 4, generator=generator).bfloat16()
    weights = [torch.randn(30, 7, generator=generator) for _ in range(3)]
    for step, weight in enumerate(weights):
        state = {"frozen": frozen, "w": weight, "count": torch.tensor(10**9 * step)}
        if step == 2:
            state |= {"new": torch.ones(3)}
        ckpt.save(state, tmp_path / f"step-{step}")
    stores = [open_store(tmp_path / f"step-{step}") for step in range(3)]
    first = movement(stores[0], stores[1])
    flat = [
        np.concatenate([frozen.double().numpy().ravel(), w.double().numpy().ravel()])
        for w in weights
    ]
    expected = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in itertools.pairwise(flat)]
    assert relative(first) == pytest.approx(expected[0], rel=1e-12)
    assert first.moved.keys() == {"frozen", "w"}
    assert first.drifts.keys() == {"w"}

    def read(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(moving, "tensor_statistics", read)  # what is known is not read again
    second = movement(stores[1], stores[2], first.squares)
    assert relative(second) == pytest.approx(expected[1], rel=1e-12)
    assert second.num_apart == 1


def test_what_is_not_finite_and_what_was_zero(tmp_path: Path) -> None:
    nan = float("nan")
    for step, (a, b) in enumerate([([3.0, 4.0], [0.0, 0.0]), ([3.0, nan], [0.0, 2.0])]):
        ckpt.save({"a": torch.tensor(a), "b": torch.tensor(b)}, tmp_path / f"step-{step}")
    found = movement(open_store(tmp_path / "step-0"), open_store(tmp_path / "step-1"))
    assert found.moved == {"a": Moved(Sum(0), Sum(9), True), "b": Moved(Sum(4), Sum(0))}
    assert found.moved["b"].relative == float("inf")
    assert (found.moved["a"] + found.moved["b"]).relative == pytest.approx(2 / 3)


def test_squares_beyond_the_range_of_floats(tmp_path: Path) -> None:
    still = torch.full((3,), 1e200, dtype=torch.float64)
    for step, value in enumerate((2e200, 4e200)):
        moving_one = torch.full((3,), value, dtype=torch.float64)
        ckpt.save({"still": still, "w": moving_one}, tmp_path / f"step-{step}")
    found = movement(open_store(tmp_path / "step-0"), open_store(tmp_path / "step-1"))
    assert relative(found) == pytest.approx(2 / 5**0.5)


@pytest.mark.parametrize(
    ("most", "modules"),
    [
        (1, {""}),
        (3, {"model.layers", "model.norm", "head"}),
        (4, {"model.layers.0", "model.layers.1", "model.norm", "head"}),
        (5, {"model.layers.0", "model.layers.1", "model.norm", "head"}),
        (
            99,
            {
                "model.layers.0.q",
                "model.layers.0.k",
                "model.layers.1.q",
                "model.layers.1.k",
                "model.norm",
                "head",
            },
        ),
    ],
)
def test_layers_are_taken_apart_together(most: int, modules: set[str]) -> None:
    sizes = {f"model.layers.{i}.{name}": 8 for i in range(2) for name in "qk"}
    found = modules_of(sizes | {"model.norm": 1, "head": 2}, most)
    assert set(found.values()) == modules
    assert all(name.startswith(module) for name, module in found.items())


def test_modules_of_odd_names() -> None:
    names = ["", ".", "a", "a.", "a/b", "a.b", "a..b"]
    assert modules_of(dict.fromkeys(names, 1), 99) == {name: name for name in names}
    assert modules_of({}, 3) == {}
