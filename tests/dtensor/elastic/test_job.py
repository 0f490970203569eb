"""A job goes on with other numbers of ranks, in processes of their own."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_processes


def test_steps_on_4_ranks_are_those_on_4_and_2_and_3(tmp_path: Path) -> None:
    run_processes("tests.dtensor.elastic.job_ranks", 4, str(tmp_path))
