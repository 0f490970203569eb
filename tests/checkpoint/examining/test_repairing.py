from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import repair
from dtckpt.dtensor import Mesh
from dtckpt.errors import Corrupt, LayoutMismatch, NotCommitted, StorageError
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
    assert "not known to have been the same" in "".join(caught.value.__notes__)
    assert _contents(ours) == damaged
    (ours / "manifest.json").unlink()
    with pytest.raises(NotCommitted):
        repair(ours, other)


@pytest.mark.parametrize("edited", ["ours", "copy"])
def test_edits_are_neither_lost_nor_gained(pair: tuple[Path, Path], edited: str) -> None:
    ours, copy = pair
    dcp.edit(ours if edited == "ours" else copy, set_metadata={"loss": 1}, rename={"w0": "v"})
    good = (ours / "manifest.json").read_bytes()
    flip(_files(ours)[0], MIB)
    assert len(repair(ours, copy).repaired) == 1
    assert (ours / "manifest.json").read_bytes() == good
    flip(ours / "manifest.json", 900)
    damaged = _contents(ours)
    with pytest.raises(Corrupt) as caught:
        repair(ours, copy)
    assert "edited since" in "".join(caught.value.__notes__)
    assert _contents(ours) == damaged


@pytest.mark.parametrize("cut", [slice(0, 44), slice(100, None), slice(44, 4096)])
def test_a_manifest_that_is_known_to_be_the_same(pair: tuple[Path, Path], cut: slice) -> None:
    """Of which the digest alone, or anything but the digest, is damaged."""
    ours, copy = pair
    dcp.edit(ours, set_metadata={"loss": 1})
    shutil.copyfile(ours / "manifest.json", copy / "manifest.json")
    good = (ours / "manifest.json").read_bytes()
    data = bytearray(good)
    data[cut] = bytes(len(data[cut])) if cut.stop else b""
    (ours / "manifest.json").write_bytes(data)
    assert repair(ours, copy).repaired == ("manifest.json",)
    assert (ours / "manifest.json").read_bytes() == good


def test_header_of_one_and_blocks_of_the_other(pair: tuple[Path, Path]) -> None:
    ours, copy = pair
    good = _contents(ours)
    for damaged, other in ((ours, copy), (copy, ours)):
        flip(_files(damaged)[0], 50)
        flip(_files(damaged)[0], -1)
        flip(_files(other)[0], 3 * MIB)
        if damaged is copy:
            flip(_files(ours)[0], MIB)
        assert len(repair(ours, copy).repaired) == 1
        assert _contents(ours) == good
        shutil.copytree(ours, copy, dirs_exist_ok=True)


def test_what_is_no_copy(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ours, _ = pair
    with pytest.raises(LayoutMismatch, match="does not repair itself"):
        repair(ours, ours)
    with pytest.raises(NotCommitted, match="nothing does not exist"):
        repair(ours, tmp_path / "nothing")


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
