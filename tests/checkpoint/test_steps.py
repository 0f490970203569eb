"""``latest``: None only where nothing is, and never a checkpoint that is not whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import dtckpt.checkpoint as dcp
from dtckpt.errors import Corrupt, NotCommitted, StorageError
from dtckpt.storage import Fault, FaultyStore, LocalStore, MemoryStore, ObjectInfo, RaiseError, Rule

from ..conftest import S3

STATE = {"w": torch.ones(4)}


def test_nothing_at_all_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert dcp.latest(tmp_path / "not" / "there") is None
    assert dcp.latest(tmp_path) is None
    assert dcp.latest(MemoryStore()) is None
    assert dcp.committed_steps("memory://dtckpt-nothing/run") == []
    assert not caplog.records


# torch warns of its own planner.
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_torch_are_named(tmp_path: Path) -> None:
    torch_dcp: Any = torch.distributed.checkpoint
    torch_dcp.save(dict(STATE), checkpoint_id=tmp_path / "step-5", no_dist=True)
    for call in (dcp.latest, dcp.committed_steps):
        with pytest.raises(
            NotCommitted, match=r"torch\.distributed\.checkpoint \(step-5/.*by its path"
        ):
            call(tmp_path)
    dcp.save(STATE, tmp_path / "step-6")
    found = dcp.latest(tmp_path)
    assert found is not None
    assert found.number == 6


def test_a_checkpoint_is_not_a_directory_of_them(tmp_path: Path) -> None:
    dcp.save(STATE, tmp_path / "step-5")
    with pytest.raises(NotCommitted, match=r"is a checkpoint itself.*the directory above"):
        dcp.latest(tmp_path / "step-5")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("final/manifest.json", r"holds final, .*names that end in a number: load one by its path"),
        ("demo/step-1/manifest.json", r"further down \(demo/step-1\): give .*/demo\."),
        ("a/b/c/d/step-1/manifest.json", r"further down .*: give .*/a/b/c/d\."),
        ("model-00001-of-00002.safetensors", r"weights .*\(model-00001-of-00002\.safetensors\)"),
        ("model.safetensors.index.json", r"weights .*\(model\.safetensors\.index\.json\)"),
        ("step-3/weights.pt", r"weights .*\(step-3/weights\.pt\)"),
        ("epoch=1-step=10.ckpt", r"weights .*\(epoch=1-step=10\.ckpt\)"),
        ("checkpoint-3/pytorch_model.bin", r"weights .*\(checkpoint-3/pytorch_model\.bin\)"),
        ("step-3/__0_0.distcp", r"torch\.distributed\.checkpoint \(step-3/__0_0\.distcp\)"),
    ],
)
def test_what_looks_like_a_checkpoint_is_not_passed_over(name: str, told: str) -> None:
    store = MemoryStore()
    store.publish(name, b"x", overwrite=False)
    for call in (dcp.latest, dcp.committed_steps):
        with pytest.raises(NotCommitted, match=f"{told}.*begun anew"):
            call(store)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("step-3/data/0123456789abcdef/00000.safetensors", r"not ended, or were killed \(1"),
        ("run/step-3/data/0123456789abcdef/00000.safetensors", r"not ended, or were killed \(1"),
        ("events.out\n", r"other files \(1"),
        ("data/tokens.bin", r"other files \(1"),
        ("third_party/project/assets/x.pt", r"other files \(1"),
    ],
)
def test_whatever_else_is_there_is_told(
    name: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.publish(name, b"x", overwrite=False)
    with caplog.at_level(logging.WARNING):
        assert dcp.latest(store) is None
    (record,) = caplog.records
    assert "no committed checkpoint here, but" in record.getMessage()
    assert re.search(told, record.getMessage()), record.getMessage()


def test_a_root_that_cannot_be_looked_at_is_an_error(s3: S3) -> None:
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1/run"):
        dcp.latest("http://127.0.0.1:1/run", storage_options={"deadline": 5})
    with pytest.raises(StorageError, match=r"no-such-bucket-here/run: .*bucket does not exist"):
        dcp.latest("s3://no-such-bucket-here/run", storage_options=s3.options)
    denied = FaultyStore(MemoryStore(), [Rule(RaiseError(StorageError("denied")), op="list")])
    with pytest.raises(StorageError, match="denied"):
        dcp.latest(denied)


def test_a_checkpoint_of_which_a_file_is_missing_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        dcp.save(STATE, tmp_path / f"step-{step}")
    (data,) = (tmp_path / "step-2" / "data").glob("*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    found = dcp.latest(tmp_path)
    assert found is not None
    assert found.number == 1
    assert f"{data} is missing or has another size" in caplog.text
    data.unlink()
    found = dcp.latest(tmp_path)
    assert found is not None
    assert found.number == 1


def test_a_checkpoint_whose_base_is_gone_is_passed_over(tmp_path: Path) -> None:
    dcp.save(STATE, tmp_path / "step-1")
    dcp.save({**STATE, "n": 1}, tmp_path / "step-2", base=tmp_path / "step-1")
    (lent,) = (tmp_path / "step-1" / "data").glob("*/*.safetensors")
    lent.unlink()
    with pytest.raises(Corrupt, match=r"none of the checkpoints here is whole.*step-1/data"):
        dcp.latest(tmp_path)


def test_a_checkpoint_that_is_replaced_while_it_is_looked_at(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    dcp.save(STATE, place)

    class Replaced(Fault):
        def before(self) -> None:
            dcp.save(STATE, place, overwrite=True)

    rules = [Rule(Replaced(), op="list", name="step-1/data/*", nth=1)]
    found = dcp.latest(FaultyStore(LocalStore(tmp_path), rules))
    assert found is not None
    assert found.number == 1


def test_a_listing_that_lags_behind_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    listed = MemoryStore.list

    def lagging(self: MemoryStore, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(()) if prefix.startswith("data/") else listed(self, prefix)

    monkeypatch.setattr(MemoryStore, "list", lagging)
    dcp.save(STATE, store.substore("step-1"))
    found = dcp.latest(store)
    assert found is not None
    assert found.number == 1
