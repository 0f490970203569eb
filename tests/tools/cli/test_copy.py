from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp

from .conftest import Run, data_file, flip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three checkpoints, of which the last refers to the first; one is pinned."""
    large = torch.arange(1 << 17)
    with dcp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, {"large": large, "n": 2})
        manager.save(10, {"large": large + 1, "n": 10})
        manager.pin(10)
    dcp.save({"large": large, "n": 30}, tmp_path / "run/step-30", base=tmp_path / "run/step-2")
    return tmp_path / "run"


def listed(root: Path) -> dict[str, bytes]:
    """Every file under a directory, but marks of those that refer to others."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_run_is_copied_with_references_and_pins(run: Run, root: Path, tmp_path: Path) -> None:
    result = run("copy", root, tmp_path / "copy")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("3 checkpoints copied\n")
    assert listed(tmp_path / "copy") == listed(root)
    large = dcp.open(tmp_path / "copy/step-30")["large"][...]
    assert torch.equal(large, torch.arange(1 << 17))
    assert run("rm", tmp_path / "copy/step-2").exit_code == 3  # which is needed there, too
    dcp.save({"a": torch.ones(1)}, root / "step-40")
    assert run("copy", root, tmp_path / "copy").stdout.endswith("1 checkpoint copied\n")


def test_one_checkpoint_to_another_store(run: Run, root: Path) -> None:
    target = f"memory://test-copy/{root.parent.name}/step-10"
    result = run("copy", root / "step-10", target)
    assert result.exit_code == 0, result.output
    assert not dcp.verify(target).problems
    assert run("copy", root / "step-10", target).exit_code == 3  # it is there already
    result = run("copy", root / "step-30", target + "0")
    assert (result.exit_code, "incremental" in result.stderr) == (3, True)


def test_damage_is_not_copied(run: Run, root: Path, tmp_path: Path) -> None:
    file = data_file(root / "step-10")
    flip(file, file.stat().st_size // 2)
    result = run("copy", root, tmp_path / "copy")
    assert result.exit_code == 1
    assert "damaged" in result.stderr
    assert not (tmp_path / "copy/step-10/manifest.json").exists()


def test_another_checkpoint_at_the_target_stays(run: Run, root: Path, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1)}, tmp_path / "copy/step-10")
    before = listed(tmp_path / "copy/step-10")
    result = run("copy", root, tmp_path / "copy")
    assert (result.exit_code, "another checkpoint is here" in result.stderr) == (3, True)
    assert listed(tmp_path / "copy/step-10") == before


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(1 << 25)}, tmp_path / "source")
    program = "import sys; from dtckpt.tools.cli import main; main(sys.argv[1:])"
    args = [sys.executable, "-c", program, "copy", tmp_path / "source", tmp_path / "target"]
    process = subprocess.Popen([*map(str, args)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "target").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    is_there = (tmp_path / "target/manifest.json").exists()
    assert process.returncode == (0 if is_there else 130)
    assert is_there or "interrupted" in told
    for path in tmp_path.glob("target/data/*/*"):  # whole ones stay for a second call
        assert path.read_bytes() == data_file(tmp_path / "source").read_bytes()
