from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp

from .conftest import Run, data_file, document, flip


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


def test_documents(run: Run, root: Path, tmp_path: Path) -> None:
    told = document(run("copy", root, tmp_path / "copy", "--json"))
    assert sorted(told["checkpoints"]) == sorted(p.name for p in root.glob("step-*[0-9]"))
    told = document(run("copy", root / "step-2", tmp_path / "one", "--json", "--no-verify"))
    assert (told["checkpoints"], told["verified"]) == (None, False)


def test_checkpoints_of_other_programs_are_not_copied(run: Run, root: Path, tmp_path: Path) -> None:
    dcp.export(root / "step-2", tmp_path / "others/step-2", format="dcp")
    result = run("copy", tmp_path / "others", tmp_path / "copy")
    assert (result.exit_code, "have dtckpt convert" in result.stderr) == (3, True)
    assert not (tmp_path / "copy").exists()


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


def test_what_is_damaged_keeps_nothing_else_from_being_copied(
    run: Run, root: Path, tmp_path: Path
) -> None:
    # step-60 has "other" in step-50, which has "large" in step-2.
    other = torch.arange(1 << 17).flip(0)
    state = {"large": torch.arange(1 << 17), "other": other}
    dcp.save(state, root / "step-50", base=root / "step-2")
    dcp.save({"other": other}, root / "step-60", base=root / "step-50")
    flip(root / "step-2/manifest.json", 50)
    result = run("copy", root, tmp_path / "copy")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "all is copied but what is damaged, step-2, and refers to that" in result.stderr
    assert [step.number for step in dcp.committed_steps(tmp_path / "copy")] == [10]


def test_a_second_call_brings_the_record_that_the_first_had_not_come_to(
    run: Run, root: Path, tmp_path: Path
) -> None:
    run("copy", root, tmp_path / "copy")
    (tmp_path / "copy/step-2.json").unlink()
    told = document(run("copy", root, tmp_path / "copy", "--json"))
    assert told["checkpoints"] == []
    assert listed(tmp_path / "copy") == listed(root)


def test_a_copy_of_what_was_edited_since_is_told(run: Run, root: Path, tmp_path: Path) -> None:
    run("copy", root, tmp_path / "copy")
    dcp.edit(root / "step-10", set_metadata={"x": 1})
    result = run("copy", root, tmp_path / "copy")
    assert (result.exit_code, "was edited since" in result.stderr) == (3, True)


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("run/step-10", "backup", "a directory of checkpoints, with step-10"),
        ("run", "backup/step-10", "a run is a directory of them"),
    ],
)
def test_a_run_and_a_checkpoint_are_not_mixed(
    run: Run, root: Path, tmp_path: Path, source: str, target: str, told: str
) -> None:
    run("copy", root / "step-10", tmp_path / "backup/step-10")
    before = listed(tmp_path / "backup")
    result = run("copy", tmp_path / source, tmp_path / target)
    assert (result.exit_code, told in result.stderr) == (3, True)
    assert listed(tmp_path / "backup") == before
