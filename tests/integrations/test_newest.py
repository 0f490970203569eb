"""``newest``: None only where nothing is that a training could go on from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import NotCommitted
from dtckpt.integrations.newest import newest


def save(path: Path, step: int) -> None:
    state: dict[str, Any] = {"w": torch.ones(4)}
    ckpt.save(state, path, metadata={"global_step": step})


def test_nothing_at_all_is_none(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.out").write_text("x")
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_any_name_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "best", 3)
    save(tmp_path / "epoch=1.ckpt", 7)
    assert newest(tmp_path) == str(tmp_path / "epoch=1.ckpt")


def test_what_else_looks_like_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoint-3", 3)
    with pytest.raises(NotCommitted, match=r"further down .*: give .*/run\."):
        newest(tmp_path)
    with pytest.raises(NotCommitted, match="is a checkpoint itself"):
        newest(tmp_path / "run" / "checkpoint-3")
    (tmp_path / "hf" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "hf" / "checkpoint-5" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(NotCommitted, match=r"weights .*checkpoint-5/model\.safetensors"):
        newest(tmp_path / "hf")
    (tmp_path / "pl").mkdir()
    torch.save({"w": torch.ones(4)}, tmp_path / "pl" / "last.ckpt")
    with pytest.raises(NotCommitted, match=r"weights .*last\.ckpt"):
        newest(tmp_path / "pl")


def test_newer_ones_of_other_programs_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "checkpoint-3", 3)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "checkpoint-9").mkdir()  # of a killed save
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == str(tmp_path / "checkpoint-3")
    assert "going on from checkpoint-3, though checkpoint-5 is here as well" in caplog.text
