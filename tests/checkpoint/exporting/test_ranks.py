"""Ranks that export together: each writes some of the files, and they fail as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed import ProcessGroup

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.exporting import dcp_files
from dtckpt.errors import CheckpointError, ObjectExists, StorageError
from dtckpt.storage import FaultyStore, Rule, open_store
from dtckpt.storage.testing.faults import RaiseError
from tests.ranks import run_ranks

Formats = Literal["safetensors", "dcp"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dcp_files, "_FILE_BYTES", 1000)
    ckpt.save({f"w{i}": torch.full((64,), float(i)) for i in range(12)}, tmp_path / "run")
    return tmp_path / "run"


def files_of(place: Path) -> dict[str, bytes]:
    names = sorted(path for path in place.rglob("*") if path.is_file() and path.name[0] != ".")
    return {path.name: path.read_bytes() for path in names}


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_they_write_what_one_would(saved: Path, tmp_path: Path, format: Formats) -> None:
    alone = ckpt.export(saved, tmp_path / "one", format=format, max_file_bytes=600)
    wrote: dict[int, int] = {}

    def export(rank: int, group: ProcessGroup) -> ckpt.ExportReport:
        def count(done: int, total: int) -> None:
            wrote[rank] = done

        return ckpt.export(
            saved,
            tmp_path / "three",
            format=format,
            max_file_bytes=600,
            process_group=group,
            on_progress=count,
        )

    reports = run_ranks(3, export)
    assert all(report.files == alone.files for report in reports)
    assert files_of(tmp_path / "three") == files_of(tmp_path / "one")
    assert sum(wrote.values()) == alone.num_bytes
    assert len(wrote) == 3
    opened = ckpt.open(tmp_path / "three")
    assert all(opened[f"w{i}"][...].equal(torch.full((64,), float(i))) for i in range(12))


@pytest.mark.parametrize(("format", "nth"), [("safetensors", 2), ("dcp", 1)])
def test_one_that_fails_leaves_nothing_of_all(
    saved: Path, tmp_path: Path, format: Formats, nth: int
) -> None:
    def export(rank: int, group: ProcessGroup) -> None:
        place: Any = tmp_path / "out"
        if rank == 1:
            full = Rule(RaiseError(StorageError("full")), op="write", nth=nth)
            place = FaultyStore(open_store(place), [full])
        with pytest.raises(StorageError, match=r"rank 1: .*full"):
            ckpt.export(saved, place, format=format, max_file_bytes=600, process_group=group)

    run_ranks(3, export)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"format": "hdf5"}, "expected 'safetensors' or 'dcp'"),
        ({"max_file_bytes": 0}, "a number of bytes above zero"),
        ({"part": "nothing"}, "were not given the same part: this rank has nothing, and rank 0"),
        ({"target": "elsewhere"}, "were not given the same target: this rank has .*elsewhere"),
        ({"target": "out/a.safetensors"}, "same target: this rank has .*out/a.safetensors"),
        ({"max_file_bytes": 300}, "were not given the same max_file_bytes: this rank has 300"),
        ({"format": "dcp"}, "were not given the same format: this rank has dcp"),
        ({"overwrite": True}, "were not given the same overwrite: this rank has True"),
        ({"mapping": [ckpt.Drop("{x*}")]}, "were not given the same mapping: this rank has that"),
    ],
)
def test_all_hear_what_is_wrong_on_one(
    saved: Path, tmp_path: Path, wrong: dict[str, Any], match: str
) -> None:
    def export(rank: int, group: ProcessGroup) -> None:
        given = wrong if rank == 1 else {}
        target = tmp_path / given.get("target", "out")
        options = {name: value for name, value in given.items() if name != "target"}
        with pytest.raises(CheckpointError, match=match):
            ckpt.export(saved, target, process_group=group, **options)

    run_ranks(2, export)
    assert not (tmp_path / "out").exists()


def test_all_hear_that_something_is_there(saved: Path, tmp_path: Path) -> None:
    ckpt.export(saved, tmp_path / "out")
    before = files_of(tmp_path / "out")

    def export(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(ObjectExists, match="overwrite=True"):
            ckpt.export(saved, tmp_path / "out", process_group=group)

    run_ranks(2, export)
    assert files_of(tmp_path / "out") == before
