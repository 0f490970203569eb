"""Every kind of parallelism goes on from what every other has saved, as if nothing had happened.

Eight processes save cells: one process, DDP, FSDP2, HSDP, tensor parallel, both, stages of a
pipeline, ragged experts, and the library's own styles and ``fully_shard``, on 1, 2, 3, 4 and 8
ranks. Then every kind is loaded from every other one, worlds by turns. With ``DTCKPT_WHOLE_MATRIX``
set there are 28 cells, and each is loaded into each.
"""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_processes


def test_every_kind_goes_on_from_every_other(tmp_path: Path) -> None:
    told = run_processes("tests.checkpoint.job_state.matrix_ranks", 8, str(tmp_path), timeout=900)
    assert all(output.endswith("ok\n") for output in told)
