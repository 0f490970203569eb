from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp

from .conftest import Run, data_file, document, flip, interrupt

Damage = Callable[[Path], None]


def _data(checkpoint: Path) -> None:
    flip(data_file(checkpoint), 4096 + 100)


def _header(checkpoint: Path) -> None:
    flip(data_file(checkpoint), 50)


def _table(checkpoint: Path) -> None:
    flip(data_file(checkpoint), -1)


def _truncate(checkpoint: Path) -> None:
    path = data_file(checkpoint)
    path.write_bytes(path.read_bytes()[:-100])


def _delete(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()


def test_intact(run: Run, saved: Path) -> None:
    result = run("verify", saved / "step-100")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "intact (12 tensors in 1 file" in result.stdout
    found = document(run("verify", saved / "step-100", "--json"))
    assert found["intact"]
    assert found["problems"] == []
    assert found["num_tensors"] == 12


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_data, "bytes 4096 to "),
        (_header, "bytes 0 to 4096 (header)"),
        (_table, "(checksum table)"),
        (_truncate, "truncated"),
        (_delete, "missing"),
    ],
)
def test_damage_names_file_bytes_and_tensors(
    run: Run, checkpoint: Path, damage: Damage, text: str
) -> None:
    name = str(data_file(checkpoint).relative_to(checkpoint))
    damage(checkpoint)
    result = run("verify", checkpoint)
    assert (result.exit_code, result.stderr) == (1, "")
    head, *problems = result.stdout.splitlines()
    assert head.startswith(f"{checkpoint}: damaged, 1 problem")
    assert len(problems) == 1
    assert problems[0].startswith(f"  {name}: ")
    assert text in problems[0]
    assert "bytes " in problems[0]
    assert "model/embed.weight" in problems[0]
    result = run("verify", checkpoint, "--json")
    assert result.exit_code == 1
    found = document(result)
    assert not found["intact"]
    assert [problem["file"] for problem in found["problems"]] == [name]


def test_damage_of_one_file_does_not_hide_another(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    run("reshard", checkpoint, target, "--mesh", "dp=4", "--placements", "*=S(0)")
    first, second, third, _ = sorted(target.glob("data/*/*.safetensors"))
    flip(first, -20_000 % first.stat().st_size)
    flip(second, 50)
    third.unlink()
    result = run("verify", target)
    assert result.exit_code == 1
    assert "damaged, 3 problems" in result.stdout
    for file in (first, second, third):
        assert f"/{file.name}: " in result.stdout


def test_damaged_manifest(run: Run, checkpoint: Path) -> None:
    flip(checkpoint / "manifest.json", 700)
    result = run("verify", checkpoint)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "  manifest.json: " in result.stdout
    found = document(run("verify", checkpoint, "--json"))
    assert found["problems"][0]["file"] == "manifest.json"
    assert found["num_tensors"] is None


def test_truncated_manifest(run: Run, checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    assert run("verify", checkpoint).exit_code == 1


def test_nothing_committed(run: Run, checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    result = run("verify", checkpoint)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no committed checkpoint" in result.stderr


def test_a_run_is_verified_step_by_step(run: Run, tmp_path: Path) -> None:
    same = torch.arange(5000)
    dcp.save({"w": torch.zeros(3), "same": same}, tmp_path / "step-1")
    dcp.save({"w": torch.ones(3), "same": same}, tmp_path / "step-2", base=tmp_path / "step-1")
    result = run("verify", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [
        str(tmp_path / "step-1"),
        str(tmp_path / "step-2"),
    ]
    flip(data_file(tmp_path / "step-1"), 4096 + 8)
    found = document(run("verify", tmp_path / "step-2", tmp_path / "step-1", "--json"))
    assert not found["intact"]
    assert [len(each["problems"]) for each in found["checkpoints"]] == [1, 1]
    flip(tmp_path / "step-1" / "manifest.json", 300)
    result = run("verify", tmp_path, "--quiet")
    assert result.exit_code == 1
    assert "manifest" in result.stdout


def test_a_copy_repairs(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    shutil.copytree(checkpoint, copies / "step-1")
    own = tmp_path / "own" / "step-1"
    shutil.copytree(checkpoint, own)
    good = data_file(own).read_bytes()
    flip(data_file(own), 4096 + 100)
    result = run("verify", own, "--repair-from", copies / "step-1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "repaired data/" in result.stdout
    assert "intact" in result.stdout
    assert data_file(own).read_bytes() == good
    data_file(own).unlink()
    [told] = document(run("verify", own.parent, "--repair-from", copies, "--json"))["checkpoints"]
    assert told["intact"]
    assert data_file(own).read_bytes() == good
    flip(data_file(own), 4096 + 100)
    flip(data_file(copies / "step-1"), 4096 + 100)
    found = run("verify", own, "--repair-from", copies / "step-1", "--json")
    assert found.exit_code == 1
    told = document(found)
    assert told["repaired"] == []
    assert len(told["not_repaired"]) == len(told["problems"]) == 1
    assert run("verify", own, copies, "--repair-from", copies).exit_code == 2


def test_a_run_is_repaired_by_what_its_copy_has(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    own, copies = tmp_path / "own", tmp_path / "copies"
    for step in (own / "step-1", own / "step-2", copies / "step-2"):
        shutil.copytree(checkpoint, step)
    for step in ("step-1", "step-2"):
        flip(data_file(own / step), 4096 + 100)
    found = run("verify", own, "--repair-from", copies, "--json")
    assert found.exit_code == 1
    first, second = document(found)["checkpoints"]
    [why] = first["not_repaired"].values()
    assert why == f"{copies} has no step-1"
    assert second["intact"]
    for one, other in ((own / "step-2", copies), (own, copies / "step-2")):
        result = run("verify", one, "--repair-from", other)
        assert result.exit_code == 2
        assert "two checkpoints or two runs" in result.stderr
    result = run("verify", own / "step-2", "--repair-from", tmp_path / "copise")
    assert result.exit_code == 3
    assert "copise does not exist" in result.stderr


def test_an_interrupted_repair_leaves_what_was_there(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    flip(data_file(checkpoint), 4096 + 100)
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    patch = """
from dtckpt.checkpoint.examining import repairing
read = repairing.read_batch
def slowly(*args):
    wait()
    return read(*args)
repairing.read_batch = slowly
"""
    interrupt(patch, tmp_path, "verify", checkpoint, "--repair-from", copy)
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
