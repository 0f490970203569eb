from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.examining import elements

from .conftest import Run, document, state

MODEL = state()["model"]


def test_values_are_printed_whole(run: Run, saved: Path) -> None:
    assert run("cat", saved / "step-100", "step").stdout == "12\n"
    assert run("cat", saved / "step-100", "note").stdout == "x" * 300 + "\n"
    assert run("cat", saved / "step-100", "hostile").stdout == "a\\x1b[31mb\n"
    text = run("cat", saved / "step-100", "optim/param_groups", "rng").stdout
    assert text.splitlines() == [
        "optim/param_groups/0/lr: 0.001",
        "optim/param_groups/0/betas: (0.9, 0.95)",
        "optim/param_groups/0/params: [0]",
        "optim/param_groups/0/name: None",
        f"rng/@0/seeds: (3, {list(range(50))})",
    ]
    assert "loss: nan" in run("cat", saved / "step-100").stdout


def test_elements_are_those_that_numpy_shows(run: Run, saved: Path) -> None:
    weight = MODEL["embed.weight"].numpy()
    wide = {"COLUMNS": "80"}
    text = run("cat", saved / "step-100", "model/embed.weight", env=wide).stdout
    assert text == np.array2string(weight, max_line_width=80) + "\n"
    part = run("cat", saved / "step-100", "model/embed.weight[0:2,:3]").stdout
    assert part == f"{weight[0:2, :3]}\n"
    full = run("cat", saved / "step-100", "model/embed.weight", "--full", env=wide).stdout
    assert full == np.array2string(weight, max_line_width=80, threshold=10**6) + "\n"
    two = run("cat", saved / "step-100", "model/scale", "model/layers/0/b[:1]", "step").stdout
    lines = two.splitlines()
    assert lines[:3] == ["step: 12", "model/scale:", "2."]
    assert lines[3:] == ["model/layers/0/b[:1]:", f"{MODEL['layers'][0]['b'][:1].float().numpy()}"]


def test_only_the_edges_of_large_tensors_are_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(4 * 300 * 5 * 70).reshape(4, 300, 5, 70)
    dcp.save({"t": tensor}, tmp_path)
    monkeypatch.setattr(elements, "_MAX_NUMEL", 1250)
    for text in ("t", "t[1]", "t[::2, 5:299]", "t[:, 3, :, ::7]"):
        part = eval(text, {"t": tensor.numpy()})
        shown = run("cat", tmp_path, text, env={"COLUMNS": "75"}).stdout
        threshold = 1000 if part.size > 1000 else part.size
        assert shown == np.array2string(part, max_line_width=75, threshold=threshold) + "\n"
    refused = run("cat", tmp_path, "t", "--full")
    assert refused.exit_code == 3
    assert "choose a slice" in refused.stderr


def test_json(run: Run, saved: Path, tmp_path: Path) -> None:
    found = document(run("cat", saved / "step-100", "step", "optim/param_groups", "--json"))
    assert (found["kind"], found["tensors"], found["values"]["step"]) == ("values", {}, 12)
    assert found["values"]["optim/param_groups/0/betas"] == {"tuple": [0.9, 0.95]}
    tensors = {"f": torch.tensor([[1.5, float("nan")]]), "c": torch.tensor([1 + 2j])}
    dcp.save(tensors | {"step": 1}, tmp_path)
    found = document(run("cat", tmp_path, "f[:, 0:]", "c", "--json"))
    assert found["values"] == {}
    assert found["tensors"]["f[:, 0:]"] == {
        "dtype": "float32",
        "shape": [1, 2],
        "elements": [[1.5, "nan"]],
    }
    assert found["tensors"]["c"]["elements"] == ["(1+2j)"]


def test_what_is_not_there(run: Run, saved: Path) -> None:
    result = run("cat", saved / "step-100", "stpe")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "did you mean 'step'" in result.stderr
    result = run("cat", saved / "step-100", "model/layers")
    assert result.exit_code == 3
    assert "only tensors and no values below 'model/layers'" in result.stderr


def test_where_there_are_only_tensors_it_is_said(run: Run, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, tmp_path / "one")
    result = run("cat", tmp_path / "one")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no values here, only tensors; name one" in result.stderr
