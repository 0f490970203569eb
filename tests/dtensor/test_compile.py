"""torch.compile of models of DTensors: it computes the same, and operators break no graph."""

from __future__ import annotations

import os
from functools import cache

import pytest

from ..processes import run_processes

UNEVEN = "uneven parts: local shapes do not fit a tensor of shape (7,)"


@cache
def told_by_two_ranks() -> list[str]:
    """Return what each rank says of models and functions, which it compiles in one process."""
    return compiled(2, "private", "aot_eager", "models", "calls", "checkpointing", "makers")


def compiled(size: int, *args: str) -> list[str]:
    return run_processes("tests.dtensor.compiled", size, *args, compiler=False)


def test_blocks_are_one_graph_each_with_and_without_gradients_of_inputs() -> None:
    names = ("distributed", "tensor parallel", "sharded")
    for text in told_by_two_ranks():
        lines = [line for line in text.splitlines() if line.startswith(names)]  # no warnings
        assert [line.rsplit(" ", 2) for line in lines] == [[name, "0", "2"] for name in names]


def test_functions_of_distributed_tensors() -> None:
    for text in told_by_two_ranks():
        assert UNEVEN in text
        assert "recomputed: True" in text


def test_functions_are_hidden_by_public_means_too() -> None:
    text = compiled(1, "public", "eager", "models", "makers")[0]
    assert "tensor parallel 0 2" in text


@pytest.mark.skipif(
    "DTCKPT_TEST_INDUCTOR" not in os.environ,
    reason="compiles C++ for minutes; set DTCKPT_TEST_INDUCTOR=1 to run it",
)
def test_inductor() -> None:
    for text in compiled(2, "private", "inductor", "models"):
        assert "tensor parallel 0 2" in text
