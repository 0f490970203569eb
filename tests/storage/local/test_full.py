"""Disks that are full and places that may not be written to: told at once, nothing left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage import LocalStore

from ..conformance import names, write
from ..small_disks import RDONLY, REMOUNT, mount, small_disk_at

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    with small_disk_at(tmp_path) as disk:
        yield disk


def refused(*_: Any) -> NoReturn:
    raise OSError(errno.EOPNOTSUPP, "not here")


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_full_disk_shows_before_anything_is_written(small_disk: Path, direct_io: bool) -> None:
    store = LocalStore(small_disk, direct_io=direct_io)
    with pytest.raises(
        StorageError, match=r"cannot reserve 67108864 bytes for .*/d/x: .*\d+ bytes are free.*room"
    ) as caught:
        store.create("d/x", 64 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert names(store) == list(store.leftovers()) == []
    write(store, "d/x", bytes(MIB))  # what fits goes on working


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_disk_that_fills_while_it_is_written(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, direct_io: bool
) -> None:
    monkeypatch.setattr("dtckpt.storage.local.posix.fallocate", refused)
    store = LocalStore(small_disk, direct_io=direct_io)
    write(store, "before", b"1")
    with pytest.raises(
        StorageError, match=r"cannot write 67108864 bytes at 0 of .*/x: .*\d+ bytes are free"
    ) as caught:
        write(store, "x", bytes(64 * MIB))
    assert caught.value.errno == errno.ENOSPC
    assert names(store) == ["before"]
    assert list(store.leftovers()) == []


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    write(store, "x", b"1")
    mount(small_disk, REMOUNT | RDONLY, "")
    assert store.read("x") == b"1"
    for call in (
        lambda: store.create("y", 1),
        lambda: store.publish("x", b"2", overwrite=True),
        lambda: store.delete(["x"]),
    ):
        with pytest.raises(StorageError, match=r"Read-only.*choose a place") as caught:
            call()
        assert caught.value.errno == errno.EROFS
    assert store.read("x") == b"1"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_space_that_is_missed_when_it_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(_: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    store = LocalStore(tmp_path)
    stream = store.create("x", 3)
    stream.write(b"123")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        StorageError, match=r"cannot flush 3 bytes of .*/x: .*\d+ bytes are free"
    ) as caught:
        stream.close()
    assert caught.value.errno == number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_place_that_may_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def deny(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *rest)

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(StorageError, match=r"cannot create .*/x: .*permissions") as caught:
        store.create("x", 1)
    assert caught.value.errno == number
    assert list(tmp_path.iterdir()) == []
