"""The command on checkpoints of other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from .conftest import Run, document


def test_weights_of_hugging_face(run: Run, tmp_path: Path) -> None:
    place, target = tmp_path / "weights", tmp_path / "ours"
    place.mkdir()
    save_file({"a.weight": torch.ones(4, 6), "b": torch.zeros(3)}, place / "model.safetensors")
    shown = run("inspect", place)
    assert shown.exit_code == 0, shown.stderr
    assert "safetensors" in shown.stdout
    assert "float32[4, 6]" in shown.stdout
    assert "whole" in shown.stdout
    assert "created" not in shown.stdout
    found = document(run("inspect", place, "--json"))
    assert (found["format"], found["format_version"]) == ("safetensors", None)
    assert [file["path"] for file in found["files"]] == ["model.safetensors"]
    verified = run("verify", place)
    assert verified.exit_code == 0
    assert "complete, but without checksums" in verified.stdout
    assert document(run("verify", place, "--json"))["has_checksums"] is False
    made = run("reshard", place, target, "--mesh", "tp=2", "--placements", "*.weight=S(0)")
    assert made.exit_code == 0, made.stderr
    assert "S(0) on tp=2" in run("inspect", target).stdout
    assert "intact" in run("verify", target).stdout
