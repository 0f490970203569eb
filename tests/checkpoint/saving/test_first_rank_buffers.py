"""Buffers that ranks have unlike: those of the first rank where DDP or the caller says so."""

from __future__ import annotations

from pathlib import Path

from ...processes import run_processes


def test_buffers_of_ddp_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run_processes("tests.checkpoint.saving.first_rank_buffers_ranks", 2, str(tmp_path))
