"""The command on checkpoints of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dtckpt.checkpoint as ckpt
from tests.checkpoint.formats.makers import unpacked

from .conftest import Run, document


def test_what_lies_beside_weights_is_said_by_every_command(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for command, *more in (["inspect"], ["verify"], ["convert", tmp_path / "o", "--to", "dtckpt"]):
        place = tmp_path / command  # what was said of a place is not said again
        place.mkdir()
        save_file({"w": torch.ones(3)}, place / "model.safetensors")
        torch.save({"state": {}}, place / "optimizer.pt")
        caplog.clear()
        result = run(command, place, *more)
        assert result.exit_code == 0, result.stderr
        assert "passed over optimizer.pt, which may be opened" in caplog.text  # shown on stderr


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40, 0], [1] * 71])
def test_shapes_that_no_tensor_can_have_are_damage(
    run: Run, tmp_path: Path, shape: list[int]
) -> None:
    size = 0 if 0 in shape else 4
    head = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))
    for command in ("verify", "inspect"):
        result = run(command, file)
        assert result.exit_code == 1, result.stderr
        assert "'x'" in result.stderr + result.stdout


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
    assert run("cat", place, "a.weight[:2, 1]").stdout == "[1. 1.]\n"
    values = document(run("inspect", place, "--tensor", "*", "--json"))["tensors"]
    assert [values[name]["mean"] for name in ("a.weight", "b")] == [1, 0]
    assert run("extract", place, "b", "-o", tmp_path / "b.safetensors").exit_code == 0
    assert load_file(tmp_path / "b.safetensors")["b"].tolist() == [0, 0, 0]
    edited = run("edit", place, "--rename", "b=c")
    assert edited.exit_code == 3
    assert "convert it first" in edited.stderr
    made = run("reshard", place, target, "--mesh", "tp=2", "--placements", "*.weight=S(0)")
    assert made.exit_code == 0, made.stderr
    assert "S(0) on tp=2" in run("inspect", target).stdout
    assert "intact" in run("verify", target).stdout


def test_files_of_ranks(run: Run, tmp_path: Path) -> None:
    place = unpacked("verl-0.9.1", tmp_path)
    shown = run("inspect", place)
    assert shown.exit_code == 0, shown.stderr
    assert "verl" in shown.stdout
    assert "S(0) on fsdp=2\n" in shown.stdout
    assert "complete, but without checksums" in run("verify", place).stdout


def test_convert(run: Run, tmp_path: Path) -> None:
    weights = {"a": torch.ones(100, 10), "b": torch.zeros(300)}
    ckpt.save({"model": weights, "step": 3}, tmp_path / "run", no_dist=True)
    target = tmp_path / "weights"
    made = run(
        "convert",
        tmp_path / "run",
        target,
        "--to",
        "safetensors",
        "--part",
        "model",
        "--max-file-size",
        "2KiB",
    )
    assert made.exit_code == 0, made.stderr
    assert "2 tensors, 5.1 KiB, in 2 files" in made.stdout
    assert load_file(target / "model-00001-of-00002.safetensors")["a"].equal(weights["a"])
    assert "complete, but without checksums" in run("verify", target).stdout
    again = run("convert", tmp_path / "run", target, "--to", "safetensors", "--part", "model")
    assert again.exit_code == 3
    assert "--overwrite" in again.stderr
    assert run("convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp").exit_code == 0
    assert "torch.distributed.checkpoint" in run("inspect", tmp_path / "dcp").stdout
    assert run("cat", tmp_path / "dcp", "model/a[99, 8:]").stdout == "[1. 1.]\n"
    whole = run("convert", tmp_path / "run", target, "--to", "safetensors")
    assert whole.exit_code == 3
    assert "safetensors files hold tensors only" in whole.stderr
    for size in ("0", "many", "-1GB"):
        wrong = run(
            "convert", tmp_path / "run", target, "--to", "safetensors", "--max-file-size", size
        )
        assert wrong.exit_code == 2
        assert "no size such as 500MB" in wrong.stderr


def test_convert_to_ours(run: Run, tmp_path: Path) -> None:
    weights = {"a": torch.arange(1000.0).reshape(100, 10), "b": torch.zeros(300)}
    ckpt.save({"model": weights, "step": 3}, tmp_path / "run", no_dist=True)
    assert run("convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp").exit_code == 0
    args = ("convert", tmp_path / "dcp", tmp_path / "ours", "--to", "dtckpt")
    shown = run(*args, "--mesh", "dp=4", "--placements", "*=S(0)", "--json")
    assert shown.exit_code == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert (told["kind"], len(told["files"])) == ("convert", 4)
    with ckpt.open(tmp_path / "ours") as found:
        assert found["model/a"][...].equal(weights["a"])
        assert found.state_dict()["step"] == 3
    assert run("verify", tmp_path / "ours").exit_code == 0
    as_it_is = run("convert", tmp_path / "dcp", tmp_path / "same", "--to", "dtckpt")
    assert as_it_is.exit_code == 0, as_it_is.stderr
    assert run("verify", tmp_path / "same").exit_code == 0
    for option in (("--part", "model"), ("--max-file-size", "1GB"), ("--mesh", "dp=2")):
        wrong = run(*args, *option)
        assert wrong.exit_code == 2, option
    wrong = run("convert", tmp_path / "run", tmp_path / "x", "--to", "dcp", "--mesh", "dp=2")
    assert wrong.exit_code == 2
    assert "--mesh is not for --to dcp" in wrong.stderr
