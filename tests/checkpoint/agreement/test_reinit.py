"""Groups that are destroyed and made anew in the same processes, with another world size."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_processes


def test_groups_made_anew_in_the_same_processes_agree_anew(tmp_path: Path) -> None:
    module = "tests.checkpoint.agreement.reinit_job"
    texts = run_processes(module, 3, str(tmp_path / "run"))
    lines = [[line for line in text.splitlines() if line.startswith("saved")] for text in texts]
    assert all(text.splitlines()[-1] == "ok" for text in texts)
    assert lines[0] == lines[1]
    assert [line.split()[1] for line in lines[0]] == ["3", "2", "3"]
    assert lines[2] == [line for line in lines[0] if line.split()[1] == "3"]
    steps = [int(line.split()[2]) for line in lines[0]]
    assert steps == sorted(steps)
    assert all(line.endswith("asked True") for line in lines[0])
