"""torch.compile of a model of DTensors: it runs, with graph breaks, and computes the same."""

from __future__ import annotations

import os

import pytest

from ..processes import run_processes

BREAKS = ["Failed to convert args/kwargs to proxy", "Skip inlining `torch.compiler.disable()`d"]
"""Where graphs break: operators on DTensors, and calls of the library."""


def test_graphs_break_at_distributed_tensors_only() -> None:
    text = run_processes("tests.dtensor.compiled", 2, "private", "aot_eager")[0]
    (line,) = [line for line in text.splitlines() if line.startswith("aot_eager")]
    reasons = line.split("[", 1)[1]
    assert reasons.count(", ") + 1 == len(BREAKS), reasons
    assert all(reason in reasons for reason in BREAKS), reasons


def test_functions_are_hidden_by_public_means_too() -> None:
    assert "eager" in run_processes("tests.dtensor.compiled", 1, "public", "eager")[0]


@pytest.mark.skipif(
    "DTCKPT_TEST_INDUCTOR" not in os.environ,
    reason="compiles C++ for 20 s; set DTCKPT_TEST_INDUCTOR=1 to run it",
)
def test_inductor() -> None:
    assert "inductor" in run_processes("tests.dtensor.compiled", 1, "private", "inductor")[0]
