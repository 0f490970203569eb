"""Accelerate's objects are saved by dtckpt, and loaded on other numbers of ranks and kinds."""

from __future__ import annotations

from pathlib import Path

import dtckpt.checkpoint as ckpt

from ..processes import run_processes
from . import needs, run_page

pytestmark = needs("accelerate")


def test_trainings_go_on_under_ddp_fsdp2_and_alone(tmp_path: Path) -> None:
    run_processes("tests.integrations.accelerate_ranks", 4, str(tmp_path))
    for name, size in {"one": 1, "ddp": 2, "fsdp2": 2}.items():
        assert ckpt.verify(tmp_path / name / "4").problems == ()
        with ckpt.open(tmp_path / name / "4") as checkpoint:
            assert checkpoint.metadata == {"global_step": 4}
            assert len(checkpoint.state_dict()["rng"]["streams"]["values"]) == size
            assert checkpoint.state_dict()["data"] == [{"epoch": 5, "initial_seed": 0}]


def test_the_page_runs(tmp_path: Path) -> None:
    run_page("accelerate", tmp_path)


def test_buffers_of_ddp_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run_processes("tests.integrations.accelerate_buffers_ranks", 2, str(tmp_path))
