"""`verify` compares the CRC-32 that torch writes of each record of an archive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import dtckpt.checkpoint as ckpt
from dtckpt.errors import Corrupt

_serialization: Any = torch.serialization
_torch_dcp: Any = torch.distributed.checkpoint


def of_torch_save(place: Path) -> Path:
    whole = torch.arange(100_000, dtype=torch.float32)
    torch.save({"w": whole, "view": whole[10:20], "b": torch.ones(3)}, place / "model.pt")
    return place / "model.pt"


def of_dcp(place: Path) -> Path:
    state = {"w": torch.arange(100_000, dtype=torch.float32), "b": torch.ones(3)}
    _torch_dcp.save(state, checkpoint_id=place / "dcp")
    return place / "dcp"


def flip_byte_of(path: Path, values: torch.Tensor) -> None:
    """Change a byte of the elements in a file."""
    data = bytearray(path.read_bytes())
    at = data.find(values.numpy().tobytes())
    assert at > 0
    data[at + 2] ^= 1
    path.write_bytes(data)


SOUGHT = torch.arange(70_000, 70_008, dtype=torch.float32)


def test_verify_names_a_damaged_record_of_torch_save(tmp_path: Path) -> None:
    place = of_torch_save(tmp_path)
    intact = ckpt.verify(place)
    assert intact.has_checksums
    assert not intact.problems
    assert intact.bytes_checked > 400_000
    flip_byte_of(place, SOUGHT)
    found = ckpt.verify(place).problems
    assert sorted(name for problem in found for name in problem.tensors) == ["view", "w"]
    assert all(problem.end - problem.start == 400_000 for problem in found)
    assert all("are damaged" in problem.message for problem in found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_verify_names_a_damaged_record_of_dcp(tmp_path: Path) -> None:
    place = of_dcp(tmp_path)
    assert ckpt.verify(place).has_checksums
    assert not ckpt.verify(place).problems
    flip_byte_of(place / "__0_0.distcp", SOUGHT)
    (problem,) = ckpt.verify(place).problems
    assert problem.tensors == ("w",)
    assert problem.file == "__0_0.distcp"


def test_verify_tells_that_archives_without_checksums_have_none(tmp_path: Path) -> None:
    _serialization.set_crc32_options(False)
    try:
        place = of_torch_save(tmp_path)
    finally:
        _serialization.set_crc32_options(True)
    report = ckpt.verify(place)
    assert not report.has_checksums
    assert not report.problems


def test_large_records_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def piece_bytes(_: object) -> int:
        return 4096

    monkeypatch.setattr("dtckpt.checkpoint.reading.limits.piece_bytes", piece_bytes)
    place = of_torch_save(tmp_path)
    assert not ckpt.verify(place).problems
    flip_byte_of(place, SOUGHT)
    assert len(ckpt.verify(place).problems) == 2


def test_file_that_is_replaced_by_one_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    place = of_torch_save(tmp_path)
    with ckpt.open(place) as opened:
        assert opened["b"][:].tolist() == [1.0, 1.0, 1.0]
        before = os.stat(place)
        copy = tmp_path / "copy"
        copy.write_bytes(place.read_bytes())
        os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(copy, place)
        with pytest.raises(Corrupt, match="was written to while it was read"):
            opened["w"][:]
