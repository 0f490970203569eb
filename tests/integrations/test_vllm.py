"""vLLM reads weights out of checkpoints by dtckpt, into a model of its own."""

from __future__ import annotations

from pathlib import Path

from ..processes import run_processes
from . import needs

pytestmark = needs("vllm")


def test_what_fsdp_has_saved_is_read_by_tensor_parallel_ranks(tmp_path: Path) -> None:
    run_processes("tests.integrations.vllm_ranks", 2, str(tmp_path))
