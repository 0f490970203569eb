"""Positions in the data that are dealt out anew, and numbers that have to agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import Dealing
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch, Unsavable

FOUR, TWO, THREE = (Mesh((n,), ("dp",)) for n in (4, 2, 3))


def dealt(values: list[Any], wanted: Mesh, *counts: str) -> Any:
    saved = Mesh((len(values),), ("dp",))
    dealing = Dealing(saved=saved, wanted=wanted, coordinate=(0,))
    return ckpt.deal_samples(*counts)({(i,): v for i, v in enumerate(values)}, dealing)


def test_loaders_are_told_their_share() -> None:
    state = {"sampler": {"taken": 6, "seen": [6]}, "epoch": 2, "taken": 6, "order": torch.ones(2)}
    made = dealt([state] * 4, TWO, "taken", "sampler/taken")
    assert (made["taken"], made["sampler"]["taken"], made["epoch"]) == (12, 12, 2)
    assert list(made) == list(state)
    assert state["taken"] == 6, "what was saved stays as it is"


def test_numbers_that_are_none_are_compared_bit_for_bit() -> None:
    def state() -> dict[str, Any]:
        nan = float("nan")
        arrays = {"a": np.full(2, nan), "b": np.float32(nan), "c": torch.tensor([nan, 1.0])}
        return {"n": 6, "loss": nan, "scalar": torch.tensor(nan).bfloat16(), **arrays}

    assert dealt([state(), state()], FOUR, "n")["n"] == 3


def test_what_cannot_be_dealt_out_is_refused() -> None:
    for values, wanted, told in [
        ([{"n": 5}] * 4, THREE, "which 3 data loaders cannot have taken in equal numbers"),
        ([{"n": 5}, {"n": 6}], FOUR, "have not taken equal numbers"),
        ([{"n": 6, "e": {"x": [1]}}, {"n": 6, "e": {"x": [2]}}], FOUR, "differ in e/x/0"),
        ([{"n": 6, "e": torch.ones(1)}, {"n": 6, "e": torch.zeros(1)}], FOUR, "differ in e,"),
        ([{"n": 6, "e": 1}, {"n": 6, "e": True}], FOUR, "differ in e,"),
        ([{"n": 6, "e": math.nan}, {"n": 6, "e": 1.0}], FOUR, "differ in e,"),
        ([{"n": 6, "e": torch.ones(1)}, {"n": 6, "e": torch.ones(1).int()}], FOUR, "differ in e,"),
        ([{"n": 6}, {"n": 6, "e": 1}], FOUR, "differ in their states"),
        ([{"m": 5}] * 2, FOUR, "no count 'n' was saved"),
        ([{"n": True}] * 2, FOUR, "have not taken equal numbers"),
    ]:
        with pytest.raises(LayoutMismatch, match=told):
            dealt(values, wanted, "n")


class Counting:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def job() -> tuple[dict[str, Any], Counting]:
    loader = Counting()
    state: dict[str, Any] = {"loader": loader, "step": 0}
    state["counters"] = ckpt.Counters(step=lambda: state["step"], batches=lambda: loader.n // 2)
    return state, loader


def test_parts_that_have_not_come_equally_far_are_not_saved(tmp_path: Path) -> None:
    state, loader = job()
    state["step"], loader.n = 3, 8
    with pytest.raises(Unsavable, match="batches=4, step=3"):
        ckpt.save(state, tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_part_of_a_step_is_not_cut_off(tmp_path: Path) -> None:
    batches: Any = 3.5
    counters = ckpt.Counters(step=lambda: 3, batches=lambda: batches)
    with pytest.raises(Unsavable, match=r"batches=\.\.\.\) compares whole numbers, got 3\.5"):
        ckpt.save({"counters": counters}, tmp_path / "a")
    batches = torch.tensor(3.0)
    ckpt.save({"counters": counters}, tmp_path / "a")


def test_parts_of_several_checkpoints_are_found_at_the_load(tmp_path: Path) -> None:
    state, loader = job()
    for step in (3, 4):
        state["step"], loader.n = step, 2 * step
        ckpt.save(state, tmp_path / str(step))
    other, its = job()
    ckpt.load(other, tmp_path / "3")
    assert (other["step"], its.n) == (3, 6)
    with pytest.raises(LayoutMismatch, match="had come to 4; loaded are batches=3, step=4"):
        ckpt.load(other, tmp_path / "4", select=["step", "counters"])
    with pytest.raises(ValueError, match="nothing to compare"):
        ckpt.Counters()
