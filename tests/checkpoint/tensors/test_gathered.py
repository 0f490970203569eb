"""Parameters that FSDP2 has gathered, torch's and ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed._composable_state as composable

from dtckpt.dtensor import torch_private

from ...processes import run_processes


def test_gathered_parameters_are_refused_and_the_remedies_lose_nothing(tmp_path: Path) -> None:
    outputs = run_processes("tests.checkpoint.tensors.gathered_ranks", 2, str(tmp_path))
    assert all(output.endswith("ok\n") for output in outputs)


def test_a_torch_that_shows_no_states_of_fsdp_has_no_gathered_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed.fsdp  # noqa: F401  # pyright: ignore[reportUnusedImport]

    monkeypatch.delattr(composable, "_module_state_mapping")
    assert list(torch_private.gathered_by_torch_fsdp()) == []
