"""``verify`` where the storage fails: not damage, unless something is known to be damaged."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import AccessDenied, StorageError
from dtckpt.storage import FaultyStore, LocalStore, RaiseError, Rule


def save(place: Path) -> Path:
    state: dict[str, Any] = {"a": torch.ones(5000), "b": torch.ones(7)}
    ckpt.save(state, place)
    (data,) = (place / "data").glob("*/*.safetensors")
    return data


def failing(place: Path, error: Exception, name: str = "data/*") -> FaultyStore:
    return FaultyStore(LocalStore(place), [Rule(RaiseError(error), op="read*", name=name)])


@pytest.mark.parametrize("error", [StorageError("503"), AccessDenied("403")])
def test_a_storage_that_fails_is_no_damage(tmp_path: Path, error: Exception) -> None:
    save(tmp_path)
    with pytest.raises(type(error), match=str(error)):
        ckpt.verify(failing(tmp_path, error))
    assert not ckpt.verify(tmp_path).problems


def test_so_it_is_for_files_of_earlier_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "1")
    ckpt.save({"a": torch.ones(5000), "n": 1}, tmp_path / "2", base=tmp_path / "1")
    faulty = FaultyStore(
        LocalStore(tmp_path), [Rule(RaiseError(StorageError("503")), op="read*", name="1/data/*")]
    )
    with pytest.raises(StorageError, match="503"):
        ckpt.verify(faulty.substore("2"))


def test_damage_is_told_with_what_could_not_be_read(tmp_path: Path) -> None:
    save(tmp_path / "1")
    ckpt.save({"a": torch.ones(5000), "c": torch.ones(9)}, tmp_path / "2", base=tmp_path / "1")
    (own,) = (tmp_path / "2" / "data").glob("*/*.safetensors")
    text = bytearray(own.read_bytes())
    text[4100] ^= 1  # behind the header
    own.write_bytes(text)
    faulty = FaultyStore(
        LocalStore(tmp_path), [Rule(RaiseError(StorageError("503")), op="read*", name="1/data/*")]
    )
    messages = [problem.message for problem in ckpt.verify(faulty.substore("2")).problems]
    assert any("503" in message for message in messages)
    assert any("4096 to 4132" in message for message in messages)


@pytest.mark.parametrize("how", ["missing", "bad disk"])
def test_what_is_missing_or_on_a_bad_disk_is_damaged(tmp_path: Path, how: str) -> None:
    data = save(tmp_path)
    if how == "missing":
        data.unlink()
        report = ckpt.verify(tmp_path)
    else:
        report = ckpt.verify(failing(tmp_path, StorageError(errno.EIO, "Input/output error")))
    assert report.problems
    assert {name for problem in report.problems for name in problem.tensors} == {"a", "b"}
