"""verl's checkpoint manager by dtckpt, over verl's own base class."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

import dtckpt.checkpoint as ckpt

from ..processes import run_processes
from . import needs

pytestmark = needs("verl")


def test_two_ranks_save_and_three_go_on(tmp_path: Path) -> None:
    run_processes("tests.integrations.verl_ranks", 3, str(tmp_path))
    kept = sorted(path.parent.parent.name for path in tmp_path.glob("*/*/manifest.json"))
    assert kept == ["global_step_3", "global_step_4"]
    actor = tmp_path / "global_step_4" / "actor"
    assert ckpt.verify(actor).problems == ()
    assert not (tmp_path / "global_step_1" / "actor").exists()
    weights = load_file(actor / "huggingface" / "model.safetensors")
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
