from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from .conftest import Run, document, interrupt, state

WEIGHT = state()["model"]["embed.weight"].numpy()


def test_a_part_becomes_a_file(run: Run, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    result = run("extract", saved / "step-100", "model/embed.weight[0:2,:3]", "-o", file)
    assert (result.exit_code, result.stdout) == (0, f"{file}: float32[2, 3], 152 B\n")
    np.testing.assert_array_equal(np.load(file), WEIGHT[0:2, :3])
    again = run("extract", saved / "step-100", "model/embed.weight", "-o", file)
    assert again.exit_code == 3
    several = ("model/embed.weight[:, 0]", "model/layers/0/b", "--dtype", "float64")
    target = tmp_path / "x.safetensors"
    told = document(run("extract", saved / "step-100", *several, "-o", target, "--json"))
    assert told["tensors"]["model/layers/0/b"] == {"dtype": "float64", "shape": [17]}
    np.testing.assert_array_equal(load_file(target)["model/embed.weight"], WEIGHT[:, 0])


def test_stdout_gets_a_npy_stream_and_nothing_else(run: Run, saved: Path) -> None:
    result = run("extract", saved / "step-100", "model/embed.weight", "-o", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    np.testing.assert_array_equal(np.load(io.BytesIO(result.stdout_bytes)), WEIGHT)
    assert run("extract", saved / "step-100", "model/scale", "-o", "-", "--json").exit_code == 2


def test_bfloat16_has_to_be_converted(run: Run, saved: Path, tmp_path: Path) -> None:
    result = run("extract", saved / "step-100", "model/layers/0/b", "-o", tmp_path / "b.npy")
    assert result.exit_code == 3
    assert "Ask for the dtype float32" in result.stderr
    bits = ("--bits", "-o", tmp_path / "b.npy")
    assert run("extract", saved / "step-100", "model/layers/0/b", *bits).exit_code == 0
    assert np.load(tmp_path / "b.npy").dtype == np.uint16


def test_a_target_that_cannot_be_opened(run: Run, saved: Path, tmp_path: Path) -> None:
    a = ("extract", saved / "step-100", "model/scale", "-o")
    local = (tmp_path / "x.npy", "--target-option", "a=1")
    for target in (local, ("s3://b?x/y.npy",)):
        result = run(*a, *target)
        assert result.exit_code == 2
        assert "'--target-option'" in result.stderr or "'TARGET'" in result.stderr


def test_an_interrupt_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    patch = """
from dtckpt.checkpoint.reading.parts import TensorPart
read = TensorPart._read
def slowly(*args):
    items = read(*args)
    wait()
    return items
TensorPart._read = slowly
"""
    target = tmp_path / "out"
    target.mkdir()
    arguments = ("extract", saved / "step-100", "model/scale", "-o", target / "x.npy")
    interrupt(patch, tmp_path, *arguments)
    assert os.listdir(target) == []
