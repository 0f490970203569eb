"""Saves to disks that are full and places that may not be written to: all ranks learn why."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.errors import CheckpointError, StorageError
from dtckpt.storage import LocalStore

from ...ranks import run_ranks
from ...storage.local.test_full import mount
from ..test_together import SIZE, same_error

MIB = 1 << 20
_RDONLY, _REMOUNT = 1, 32


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    mount(tmp_path, 0, "size=8m")
    yield tmp_path
    ctypes.CDLL(None).umount2(os.fsencode(tmp_path), 2)


def state(size: int, value: float) -> dict[str, Any]:
    """A state of some MiB, of which every rank writes a part."""
    return {f"t{i}": torch.full((MIB // 4,), value) for i in range(size)}


def files(root: Path) -> list[str]:
    store = LocalStore(root)
    return sorted([*(info.name for info in store.list()), *store.leftovers()])


def value_of(path: Path) -> float:
    """The value of all tensors of a checkpoint, every byte of which is verified."""
    with dcp.open(path) as checkpoint:
        (value,) = {float(x) for name in checkpoint for x in checkpoint[name][...].unique()}
    return value


def failure(path: Path, *, background: bool, overwrite: bool) -> CheckpointError:
    """Have ranks save 20 MiB, which must fail on all of them, and return their common error."""

    def save(_: int, group: Any) -> None:
        options: dict[str, Any] = {"process_group": group, "overwrite": overwrite}
        if background:
            dcp.async_save(state(20, 2.0), path, **options).result(30)
        else:
            dcp.save(state(20, 2.0), path, **options)

    return same_error(save)


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["beside", "instead"])
def test_a_full_disk_is_told_and_left_as_it_was(
    small_disk: Path, background: bool, overwrite: bool
) -> None:
    old = small_disk / "old"
    dcp.save(state(3, 1.0), old)
    before = files(small_disk)
    place = old if overwrite else small_disk / "new"
    error = failure(place, background=background, overwrite=overwrite)
    assert isinstance(error, StorageError)
    assert re.search(r"save: write failed on ranks? .*cannot reserve \d{7} bytes", str(error))
    assert re.search(r"\d+ bytes are free there; make room", str(error))
    assert files(small_disk) == before, "nothing is left behind"
    assert value_of(old) == 1.0
    run_ranks(SIZE, lambda _, g: dcp.save(state(2, 3.0), small_disk / "small", process_group=g))
    assert value_of(small_disk / "small") == 3.0, "what fits can still be saved"


def refused(*_: Any) -> NoReturn:
    raise OSError(errno.EOPNOTSUPP, "not here")


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_disk_that_fills_while_ranks_write_to_it(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setattr("dtckpt.storage.local.posix.fallocate", refused)
    old = small_disk / "old"
    dcp.save(state(1, 1.0), old)
    before = files(small_disk)
    error = failure(small_disk / "new", background=background, overwrite=False)
    assert isinstance(error, StorageError)
    assert re.search(r"save: write failed on ranks? .*cannot write \d+ bytes", str(error))
    assert re.search(r"\d+ bytes are free there; make room", str(error))
    assert files(small_disk) == before
    assert value_of(old) == 1.0


def test_a_quota_that_shows_when_data_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save(state(1, 1.0), tmp_path / "old")
    before = files(tmp_path)

    flush = os.fsync

    def exceeded(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        flush(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", exceeded)
        error = failure(tmp_path / "new", background=False, overwrite=False)
    assert isinstance(error, StorageError)
    assert re.search(r"save: write failed on rank.* cannot flush \d+ bytes", str(error))
    assert re.search(r"\d+ bytes are free there; make room", str(error))
    assert files(tmp_path) == before
    assert value_of(tmp_path / "old") == 1.0


def check_read_only(root: Path, number: int, background: bool) -> None:
    """Saves beside and in place of an earlier checkpoint fail alike, and it still loads."""
    before = files(root)
    for name, overwrite in (("new", False), ("old", True)):
        error = failure(root / name, background=background, overwrite=overwrite)
        assert isinstance(error, StorageError)
        for rank in range(SIZE):
            assert f"save: write failed on rank {rank}: [Errno {number}] cannot" in str(error)
        assert "choose a place that this process may write to" in str(error)
    assert files(root) == before
    assert value_of(root / "old") == 1.0


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_disk_that_is_read_only(small_disk: Path, background: bool) -> None:
    dcp.save(state(3, 1.0), small_disk / "old")
    mount(small_disk, _REMOUNT | _RDONLY, "")
    check_read_only(small_disk, errno.EROFS, background)


@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
def test_a_directory_without_permission_to_write(tmp_path: Path, background: bool) -> None:
    dcp.save(state(3, 1.0), tmp_path / "old")
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        check_read_only(tmp_path, errno.EACCES, background)
    finally:
        for folder in folders:
            folder.chmod(0o755)
