"""Modules on the meta device in real processes: FSDP2, tensor parallel, HSDP."""

from __future__ import annotations

from pathlib import Path

from ...processes import run_processes


def test_modules_without_memory_are_loaded_and_train(tmp_path: Path) -> None:
    outputs = run_processes("tests.checkpoint.tensors.meta_ranks", 4, str(tmp_path / "step-1"))
    assert all(output.endswith("ok\n") for output in outputs)
