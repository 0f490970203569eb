from __future__ import annotations

from pathlib import Path

from .conftest import Run, document


def test_metadata_and_names(run: Run, checkpoint: Path) -> None:
    result = run(
        *("edit", checkpoint, "--set-metadata", "a.b=1", "--set-metadata", "note=so x=1"),
        *("--remove-metadata", "loss", "--rename", "model/layers/{i}/w=model/layers/{i}/weight"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{checkpoint}: edited; 3 tensors now named otherwise than in files\n"
    found = document(run("inspect", checkpoint, "--json"))
    assert found["metadata"] == {"a.b": 1, "note": "so x=1"}
    assert "model/layers/2/weight" in found["tensors"]
    assert run("verify", checkpoint).exit_code == 0
    told = document(run("edit", checkpoint, "--remove-metadata", "note", "--json"))
    assert (told["kind"], told["metadata"]) == ("edit", {"a.b": 1})


def test_what_is_wrong(run: Run, checkpoint: Path) -> None:
    assert run("edit", checkpoint).exit_code == 2
    assert run("edit", checkpoint, "--set-metadata", "a").exit_code == 2
    assert run("edit", checkpoint, "--rename", "a=b", "--rename", "a=c").exit_code == 2
    result = run("edit", checkpoint, "--rename", "model/nothing=b")
    assert result.exit_code == 3
    assert "no tensor fits" in result.stderr
