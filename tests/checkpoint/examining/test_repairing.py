from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import repair
from dtckpt.dtensor import Mesh
from dtckpt.errors import Corrupt, NotCommitted, StorageError
from dtckpt.storage import FaultyStore, LocalStore, RaiseError, Rule

from .test_verifying import flip

MIB = 1 << 20


@pytest.fixture(params=["plain", "compressed"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of two files, and a copy of it."""
    is_compressed = request.param == "compressed"
    dcp.save({f"w{i}": torch.rand(256, 2048) for i in range(4)}, tmp_path / "whole")
    dcp.reshard(
        tmp_path / "whole",
        tmp_path / "ours",
        Mesh((2,)),
        dcp.parse_rules("*=S(0)"),
        compress="zstd" if is_compressed else None,
    )
    dcp.copy(tmp_path / "ours", tmp_path / "copy")
    return tmp_path / "ours", tmp_path / "copy"


def _files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("data/*/*"))


def _contents(checkpoint: Path) -> dict[str, bytes]:
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


def test_every_kind_of_damage_is_repaired(pair: tuple[Path, Path]) -> None:
    ours, copy = pair
    good = _contents(ours)
    first, second = _files(ours)
    for damage in ("block", "header", "table", "missing", "truncated", "manifest", "all"):
        if damage in ("block", "all"):
            flip(first, 5 * MIB // 4)
        if damage in ("header", "all"):
            flip(second, 50)
        if damage == "table":
            flip(second, -1)
        if damage in ("missing", "all"):
            first.unlink()
        if damage == "truncated":
            first.write_bytes(first.read_bytes()[:-MIB])
        if damage in ("manifest", "all"):
            flip(ours / "manifest.json", 700)
        report = repair(ours, copy)
        assert report.repaired
        assert not report.failed
        assert not report.after.problems
        assert _contents(ours) == good, damage
    assert repair(ours, copy).repaired == ()


def test_both_may_be_damaged_but_not_in_one_block(pair: tuple[Path, Path]) -> None:
    ours, copy = pair
    good = _contents(ours)
    flip(_files(ours)[0], 3 * MIB // 2)
    flip(_files(copy)[0], 3 * MIB)
    before = _contents(copy)
    assert repair(ours, copy).repaired == (str(_files(ours)[0].relative_to(ours)),)
    assert _contents(ours) == good
    assert _contents(copy) == before

    flip(_files(ours)[0], 3 * MIB)
    flip(_files(ours)[1], 3 * MIB)
    damaged = _contents(ours)
    report = repair(ours, copy)
    [(name, why)] = report.failed.items()
    assert "intact" in why
    assert [problem.file for problem in report.after.problems] == [name]
    assert _contents(ours)[name] == damaged[name]
    assert report.repaired == (str(_files(ours)[1].relative_to(ours)),)


def test_another_checkpoint_repairs_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ours, _ = pair
    other = tmp_path / "whole"
    flip(_files(ours)[0], MIB)
    damaged = _contents(ours)
    assert len(repair(ours, other).failed) == 1
    assert _contents(ours) == damaged
    flip(ours / "manifest.json", 700)
    damaged = _contents(ours)
    with pytest.raises(Corrupt) as caught:
        repair(ours, other)
    assert "not known to be of" in "".join(caught.value.__notes__)
    assert _contents(ours) == damaged
    (ours / "manifest.json").unlink()
    with pytest.raises(NotCommitted):
        repair(ours, other)


def test_a_manifest_of_a_later_save_stands_for_none(pair: tuple[Path, Path]) -> None:
    """Of a copy that was saved over since, though files of that save are here by chance."""
    ours, copy = pair
    dcp.save({"w": torch.ones(2)}, copy, overwrite=True)
    shutil.copytree(copy / "data", ours / "data", dirs_exist_ok=True)
    flip(ours / "manifest.json", 700)
    with pytest.raises(Corrupt):
        repair(ours, copy)


def test_a_repair_that_fails_leaves_what_was_there(pair: tuple[Path, Path]) -> None:
    ours, copy = pair
    flip(_files(ours)[0], MIB)
    damaged = _contents(ours)
    for op in ("create", "write", "close"):
        store = FaultyStore(LocalStore(ours), [Rule(RaiseError(StorageError("no")), op=op)])
        report = repair(store, copy)
        assert len(report.failed) == 1, op
        assert _contents(ours) == damaged
    assert len(repair(ours, copy).repaired) == 1
