"""``pin``, ``rm``, ``prune`` and ``gc``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import InUse
from dtckpt.tools.cli.common.options import split_place

from .conftest import Run, document


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A managed run of six steps, of which the fifth refers to the fourth."""
    with dcp.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 7):
            manager.save(step, {"a": torch.full((8,), float(step))})
    large = torch.zeros(1 << 18)
    dcp.save({"large": large, "n": 4}, tmp_path / "run/step-4", overwrite=True)
    dcp.save(
        {"large": large, "n": 5},
        tmp_path / "run/step-5",
        overwrite=True,
        base=tmp_path / "run/step-4",
    )
    for step in (4, 5):
        (tmp_path / f"run/step-{step}.json").unlink()
    return tmp_path / "run"


def steps(root: Path) -> list[int]:
    """The steps of a run."""
    return [step.number for step in dcp.committed_steps(root)]


def files(root: Path) -> set[str]:
    """All that is there, with times."""
    return {f"{path} {path.stat().st_mtime_ns}" for path in root.rglob("*")}


def test_prune_keeps_what_rules_pins_and_references_ask_for(run: Run, root: Path) -> None:
    assert run("pin", root / "step-1").exit_code == 0
    before = files(root)
    args = ("prune", root, "--keep-last", 2, "--json")
    told = document(run(*args, "--dry-run"))
    assert files(root) == before
    assert sorted(told["gone"]) == ["step-2", "step-3"]
    assert told["needed"] == {"step-4": ["step-5"]}
    assert document(run(*args)) == told | {"dry_run": False}
    assert steps(root) == [1, 4, 5, 6]
    assert run("prune", root, "--keep-every", 6).stdout.endswith("2 checkpoints deleted, 2 kept\n")
    assert steps(root) == [1, 6]


def test_prune_needs_a_rule_and_a_whole_checkpoint(run: Run, root: Path, tmp_path: Path) -> None:
    assert run("prune", root).exit_code == 2
    (tmp_path / "nothing").mkdir()
    result = run("prune", tmp_path / "nothing", "--keep-last", 1)
    assert (result.exit_code, "the directory is empty" in result.stderr) == (3, True)
    (tmp_path / "nothing" / "step-3" / "data").mkdir(parents=True)
    result = run("prune", tmp_path / "nothing", "--keep-last", 1)
    assert (result.exit_code, "no checkpoint here is whole" in result.stderr) == (3, True)
    dcp.save({"a": torch.ones(1)}, root / "other7")
    assert "begin in several ways ('other', 'step-')" in run("prune", root, "--keep-last", 1).stderr
    assert run("prune", root, "--keep-last", 1, "--prefix", "other").exit_code == 0
    assert steps(root) == [1, 2, 3, 4, 5, 6, 7]


def test_rm_deletes_all_or_nothing(run: Run, root: Path) -> None:
    result = run("rm", root / "step-2", root / "step-4")
    assert result.exit_code == 3
    assert "step-5" in result.stderr  # which refers to it
    run("pin", root / "step-3")
    assert "is pinned" in run("rm", root / "step-2", root / "step-3").stderr
    assert run("rm", root / "step-2", "--dry-run").exit_code == 0
    assert steps(root) == [1, 2, 3, 4, 5, 6]
    assert run("pin", root / "step-3", "--remove").exit_code == 0
    assert run("rm", f"{root}/step-2/", root / "step-3").exit_code == 0
    assert steps(root) == [1, 4, 5, 6]
    assert not list(root.glob("step-[23]*"))
    assert run("rm", root / "step-2").exit_code == 3


def test_rm_deletes_those_that_refer_to_others_first(run: Run, root: Path) -> None:
    both = (root / "step-4", root / "step-5")
    assert run("rm", *both, root / "step-77").exit_code == 3
    assert steps(root) == [1, 2, 3, 4, 5, 6]
    told = document(run("rm", *both, root / "step-4", "--json"))
    assert told["urls"] == list(map(str, both))
    assert steps(root) == [1, 2, 3, 6]


def test_what_prune_refuses_it_refuses_in_a_dry_run_too(run: Run, root: Path) -> None:
    (root / "step-2/manifest.json").write_text("{}")  # of which the record beside it tells still
    before = {path.name for path in root.iterdir()}
    told = document(run("prune", root, "--keep-last", 1, "--dry-run", "--json"))
    assert (set(told["gone"]), [*told["refused"]]) == (
        {"step-1", "step-3", "step-4", "step-5"},
        ["step-2"],
    )
    made = document(run("prune", root, "--keep-last", 1, "--json"))
    assert (set(made["gone"]), [*made["refused"]]) == (set(told["gone"]), ["step-2"])
    assert {path.name for path in root.iterdir()} == {
        n for n in before if n[:6] in ("step-2", "step-6")
    }


def test_others_checkpoints_are_not_deleted(run: Run, root: Path) -> None:
    dcp.export(root / "step-6", root / "step-8", format="dcp")
    result = run("rm", root / "step-8")
    assert (result.exit_code, "dtckpt deletes nothing" in result.stderr) == (3, True)


def test_a_pin_needs_a_checkpoint(run: Run, root: Path) -> None:
    assert run("pin", root / "step-77").exit_code == 3
    assert not list(root.glob("*.pinned"))
    assert run("pin", "/").exit_code == 2


def test_a_pin_that_is_not_there_is_not_taken_away(run: Run, root: Path) -> None:
    assert run("pin", root / "step-99", "--remove").exit_code == 3
    assert run("pin", root / "step-5", "--remove").exit_code == 0


def test_documents(run: Run, root: Path) -> None:
    place = root / "step-3"
    assert document(run("pin", place, "--json"))["urls"] == [str(place)]
    assert document(run("pin", place, "--remove", "--json"))["pinned"] is False
    assert document(run("rm", place, "--dry-run", "--json"))["dry_run"] is True
    assert place.exists()
    assert document(run("rm", place, "--json"))["urls"] == [str(place)]
    assert not place.exists()


def test_gc_takes_away_what_dead_saves_left(run: Run, root: Path) -> None:
    save = root / "step-1/data"
    (dead,) = save.iterdir()
    left = root / "step-9" / "data" / dead.name / "00000.safetensors"
    left.parent.mkdir(parents=True)
    (part,) = dead.iterdir()
    left.write_bytes(part.read_bytes())
    told = "0 leftovers deleted; what was written to in the last 24 h stays\n"
    assert run("gc", root).stdout == told
    told = document(run("gc", root, "--older-than", "0s", "--dry-run", "--json"))
    assert told["gone"] == [f"step-9/data/{dead.name}/00000.safetensors"]
    assert left.exists()
    assert run("gc", root, "--older-than", "0s", "-q").stdout == ""
    assert not left.exists()
    assert steps(root) == [1, 2, 3, 4, 5, 6]
    assert run("gc", root, "--older-than", "soon").exit_code == 2


@pytest.mark.parametrize("place", ["", "/", "s3://bucket", "run/.."])
def test_what_names_no_checkpoint(run: Run, place: str) -> None:
    assert run("rm", place).exit_code == 2


def test_places_of_the_working_directory_and_the_root() -> None:
    assert split_place("/step-1") == ("/", "step-1")
    assert split_place("a/b") == ("a", "b")


def test_a_link_to_a_checkpoint_is_followed(run: Run, root: Path) -> None:
    (root / "latest").symlink_to("step-6")
    (root / "base").symlink_to("step-4")
    (root.parent / "elsewhere").symlink_to(root / "step-4")
    assert run("pin", root / "latest").exit_code == 0
    assert (root / "step-6.pinned").exists()
    assert "is pinned" in run("rm", root / "latest").stderr
    for link in (root / "base", root.parent / "elsewhere"):
        assert "step-5" in run("rm", link).stderr  # which refers to it
        with pytest.raises(InUse, match="step-5"):
            dcp.delete(link)
        with pytest.raises(InUse, match="step-5"):
            dcp.save({"a": torch.ones(1)}, link, overwrite=True)
    run("pin", root / "step-6", "--remove")
    assert run("rm", root / "latest", root / "step-6").exit_code == 0
    assert not list(root.glob("step-6*"))
    assert not dcp.verify(root / "step-5").problems


def test_a_directory_may_be_spelled_in_two_ways(run: Run, root: Path) -> None:
    (root.parent / "same").symlink_to(root)
    other = root.parent / "same"
    assert run("rm", other / "step-4", root / "step-5", root / "step-4").exit_code == 0
    assert steps(root) == [1, 2, 3, 6]
