"""Direct I/O: the same bytes, whatever is aligned and whatever the file system can do."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage import LocalStore, open_store
from dtckpt.storage.arena import Arena, address_of
from dtckpt.storage.local import direct as direct_module
from dtckpt.storage.local.direct import ALIGNMENT, DirectWriter, direct_io_pays

MIB = 1 << 20

direct: Any = direct_module  # its imports are looked at and replaced


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtckpt.storage.local.store._DIRECT_BYTES", 1)
    monkeypatch.setattr(direct, "_known", {})


def has_direct_io(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def test_an_arena_is_aligned_and_large_enough() -> None:
    with Arena(5 * MIB) as arena:
        assert arena.size == len(arena.view) == 6 * MIB
        assert arena.address % mmap_page() == 0
        assert arena.address == address_of(arena.view)
        arena.view[-1] = 7
        held = arena.view[-2:]
    assert bytes(held) == b"\0\7", "a view that somebody holds stays valid"
    with Arena(0) as empty:
        assert empty.size > 0
    with pytest.raises(ValueError, match="bad arena size"):
        Arena(-1)


def mmap_page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("direct_io", [True, False, "auto"])
def test_any_pieces_make_the_same_object(tmp_path: Path, direct_io: Any) -> None:
    rng = random.Random(str(direct_io))
    store = LocalStore(tmp_path, direct_io=direct_io)
    with Arena(MIB) as arena:
        arena.view[:] = rng.randbytes(len(arena.view))
        whole = arena.view[:MIB]
        for number in range(60):
            cuts = sorted(rng.randrange(MIB + 1) for _ in range(rng.randrange(6)))
            if rng.random() < 0.7:
                cuts = [cut - cut % ALIGNMENT for cut in cuts]
            end = MIB - rng.choice([0, 0, 1, 512, 4095])
            cuts = [0, *(cut for cut in cuts if cut < end), end]
            with store.create(f"o{number}", end) as stream:
                for start, stop in itertools.pairwise(cuts):
                    piece = whole[start:stop]
                    stream.write(bytes(piece) if rng.random() < 0.2 else piece)
            assert store.read(f"o{number}") == bytes(whole[:end])


def test_aligned_pieces_are_written_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no direct I/O")
    modes: list[tuple[int, bool]] = []
    write_at = direct.write_at

    def note(fd: int, view: memoryview, offset: int) -> None:
        modes.append((view.nbytes, bool(os.get_blocking(fd)) and is_direct(fd)))
        write_at(fd, view, offset)

    monkeypatch.setattr(direct, "write_at", note)
    store = LocalStore(tmp_path, direct_io=True)
    with Arena(MIB) as arena, store.create("x", MIB + 10) as stream:
        assert stream.alignment == ALIGNMENT
        stream.write(arena.view[:MIB])
        stream.write(b"0123456789")
    assert modes == [(MIB, True), (10, False)]


def is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_a_device_that_refuses_a_write_gets_it_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_at = direct.write_at

    def refuse(fd: int, view: memoryview, offset: int) -> None:
        if is_direct(fd):
            raise OSError(errno.EINVAL, "wants more than 4096")
        write_at(fd, view, offset)

    monkeypatch.setattr(direct, "write_at", refuse)
    with Arena(MIB) as arena:
        arena.view[:5] = b"hello"
        store = LocalStore(tmp_path, direct_io=True)
        with store.create("x", MIB) as stream:
            stream.write(arena.view[:MIB])
    assert store.read("x", 0, 6) == b"hello\0"


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, view: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct, "write_at", full)
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no direct I/O")
    store = LocalStore(tmp_path, direct_io=True)
    with (
        Arena(MIB) as arena,
        pytest.raises(
            StorageError, match=r"write 1048576 bytes at 0 of .*bytes are free"
        ) as failure,
        store.create("x", MIB) as stream,
    ):
        stream.write(arena.view[:MIB])
    assert failure.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["open", "fsync"])
def test_a_probe_that_fails_means_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EINVAL, "no such thing")

    monkeypatch.setattr(direct.os, broken, fail)
    assert not direct_io_pays(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[str] = []

    def probe(directory: str) -> bool:
        probes.append(directory)
        return True

    monkeypatch.setattr(direct, "_probe", probe)
    assert direct_io_pays(str(tmp_path))
    assert direct_io_pays(str(tmp_path))
    assert probes == [str(tmp_path)]
    assert not direct_io_pays(str(tmp_path / "absent"))


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    direct_io_pays(str(tmp_path))
    assert list(direct._known) == [tmp_path.stat().st_dev], "it did probe"
    assert list(tmp_path.iterdir()) == []


def test_the_choice_goes_with_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, direct_io=False)
    for other in (store, store.substore("a"), store.sibling("b")):
        with other.create("x", 1) as stream:
            assert stream.alignment == 1
            stream.write(b"1")
    with pytest.raises(ValueError, match="direct_io is True, False or 'auto'"):
        open_store(tmp_path, direct_io="perhaps")


def test_a_writer_needs_a_file_that_can(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        DirectWriter(write)
