"""The local store: durability, crashes, full disks, permissions and odd file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError
from dtckpt.storage import LocalStore, ReadRequest, Store, open_store
from dtckpt.storage.local.posix import locked_directory

from ..conformance import DATA, Raw, StoreTests, names, race, write


class RawDirectory:
    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "root"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


@pytest.fixture
def raw(root: Path) -> Raw:
    return RawDirectory(root)


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, root: Path) -> Store:
        return LocalStore(root)


class TestLocalStoreWithoutHardLinks(StoreTests):
    """As on FAT and some network file systems."""

    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def refuse(*_: object) -> NoReturn:
            raise PermissionError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
        return LocalStore(root)

    def test_a_stale_claim_is_named(self, store: Store, root: Path) -> None:
        root.mkdir(parents=True)
        (root / ".x.lock").touch()
        with pytest.raises(ObjectExists, match=r"remove .*\.x\.lock"):
            write(store, "x", b"1")
        assert names(store) == []
        store.delete(store.leftovers())
        write(store, "x", b"1")


def test_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert LocalStore("a/../b").url == str(tmp_path / "b")
    assert LocalStore("~/c").url == "/home/someone/c"
    assert LocalStore(tmp_path).url == str(tmp_path)


def test_opening_makes_nothing(store: LocalStore, root: Path) -> None:
    assert names(store) == []
    store.delete(["x"])
    assert not root.exists()


def test_modes_follow_the_umask(store: LocalStore, root: Path) -> None:
    before = os.umask(0o022)
    try:
        write(store, "d/x", DATA)
        store.publish("d/y", DATA, overwrite=True)
    finally:
        os.umask(before)
    assert {(root / "d" / name).stat().st_mode & 0o777 for name in "xy"} == {0o644}
    assert (root / "d").stat().st_mode & 0o777 == 0o755


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log the calls that matter for durability, with the paths they concern."""
    log: list[str] = []
    fsync, link, unlink, rename = os.fsync, os.link, os.unlink, os.rename

    def logged_fsync(fd: int) -> None:
        log.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
        fsync(fd)

    def logged_link(source: str, target: str) -> None:
        log.append(f"link {os.path.basename(target)}")
        link(source, target)

    def logged_unlink(path: str) -> None:
        log.append(f"unlink {os.path.basename(path)}")
        unlink(path)

    def logged_rename(source: str, target: str) -> None:
        log.append(f"rename {os.path.basename(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "link", logged_link)
    monkeypatch.setattr(os, "unlink", logged_unlink)
    monkeypatch.setattr(os, "rename", logged_rename)
    return log


def hide_nonces(log: Sequence[str]) -> list[str]:
    return ["TEMP".join([line.split(".")[0], ""]) if ".tmp" in line else line for line in log]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_order_of_flushes(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record(monkeypatch)
    write(store, "d/x", DATA)
    top = tmp_path.name
    made = [f"fsync {top}", "fsync new", "fsync root"]
    completed = ["fsync TEMP", "link x", "unlink TEMP", "fsync d"]
    shown = hide_nonces(log)
    assert [line for line in made if line not in shown] == []
    assert shown[-4:] == completed
    assert set(shown[:-4]) == set(made)

    log.clear()
    write(store, "d/y", DATA)  # the directories are known to be durable
    assert hide_nonces(log) == ["fsync TEMP", "link y", "unlink TEMP", "fsync d"]

    log.clear()
    store.publish("d/y", DATA, overwrite=True)
    assert hide_nonces(log) == ["fsync TEMP", "rename y", "fsync d"]

    log.clear()
    store.delete(["d/x", "d/y"])
    assert log == ["unlink x", "unlink y", "fsync root"]


def test_delete_removes_empty_directories(store: LocalStore, root: Path) -> None:
    for name in ("a/b/x", "a/c/y"):
        write(store, name, DATA)
    store.delete(["a/b/x"])
    assert [path.name for path in (root / "a").iterdir()] == ["c"]
    store.delete(["a/c/y"])
    assert list(root.iterdir()) == []
    child = store.substore("s")
    write(child, "x", DATA)
    child.delete(["x"])
    assert (root / "s").is_dir()


def test_a_directory_that_vanished_is_made_again(store: LocalStore, root: Path) -> None:
    write(store, "d/x", DATA)
    (root / "d" / "x").unlink()
    (root / "d").rmdir()
    write(store, "d/x", DATA)
    assert store.read("d/x") == DATA


def test_writers_beside_a_deleter(store: LocalStore) -> None:
    def cycle(number: int) -> None:
        for turn in range(15):
            name = f"a/b/c/{number}-{turn}"
            write(store, name, b"1")
            store.delete([name])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cycle, range(4)))
    assert names(store) == list(store.leftovers()) == []


def test_a_directory_that_is_gone_again_is_made_anew(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process had made it and has removed it since."""
    mkdir, late = os.mkdir, ["a"]

    def made_by_others(path: str, *args: Any) -> None:
        if os.path.basename(path) in late:
            late.clear()
            raise FileExistsError(errno.EEXIST, "File exists", path)
        mkdir(path, *args)

    monkeypatch.setattr(os, "mkdir", made_by_others)
    write(store, "a/b/x", DATA)
    assert store.read("a/b/x") == DATA
    assert not late


def test_a_file_where_a_directory_is_needed(store: LocalStore) -> None:
    write(store, "x", DATA)
    with pytest.raises(StorageError, match="directory") as caught:
        store.create("x/y", 1)
    assert caught.value.errno == errno.ENOTDIR
    assert not isinstance(caught.value, ObjectExists)
    store.delete(["x/y"])


def test_a_link_that_was_made_is_ours(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lost(source: str, target: str) -> NoReturn:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lost)
    store.publish("x", DATA, overwrite=False)
    assert store.read("x") == DATA
    assert list(store.leftovers()) == []


@pytest.mark.parametrize("num_bytes", [1, 7])
def test_short_system_calls(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    pread, preadv, pwrite = os.pread, os.preadv, os.pwrite

    def short_pread(fd: int, count: int, offset: int) -> bytes:
        return pread(fd, min(count, num_bytes), offset)

    def short_preadv(fd: int, views: list[memoryview], offset: int) -> int:
        return preadv(fd, [views[0][:num_bytes]], offset)

    def short_pwrite(fd: int, view: memoryview, offset: int) -> int:
        return pwrite(fd, view[:num_bytes], offset)

    monkeypatch.setattr(os, "pread", short_pread)
    monkeypatch.setattr(os, "preadv", short_preadv)
    monkeypatch.setattr(os, "pwrite", short_pwrite)
    write(store, "x", DATA)
    assert store.read("x", 3, 50) == DATA[3:50]
    buffers = [bytearray(10), bytearray(13)]
    store.read_into("x", [ReadRequest(5, buffers[0]), ReadRequest(15, buffers[1])])
    assert buffers[0] + buffers[1] == DATA[5:28]


def test_many_adjacent_buffers(store: LocalStore) -> None:
    data = os.urandom(3000)
    write(store, "x", data)
    buffers = [bytearray(1) for _ in data]
    requests = [ReadRequest(offset, buffer) for offset, buffer in enumerate(buffers)]
    store.read_into("x", requests[::-1])
    assert b"".join(buffers) == data


def test_a_file_that_shrinks_while_it_is_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, "x", DATA)
    monkeypatch.setattr(os, "pread", lambda *_: b"")  # pyright: ignore
    monkeypatch.setattr(os, "preadv", lambda *_: 0)  # pyright: ignore
    with pytest.raises(StorageError, match="0 bytes"):
        store.read("x")
    with pytest.raises(StorageError, match="0 bytes"):
        store.read_into("x", [ReadRequest(0, bytearray(1))])


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """The system refuses files beyond 1 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files_only")
def test_lack_of_space_shows_early(store: LocalStore) -> None:
    with pytest.raises(StorageError, match="reserve 2097152 bytes") as caught:
        store.create("x", 2 << 20)
    assert caught.value.errno == errno.EFBIG
    assert isinstance(caught.value.__cause__, OSError)
    assert names(store) == list(store.leftovers()) == []


@pytest.mark.usefixtures("small_files_only")
def test_lack_of_space_without_preallocation(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr("dtckpt.storage.local.posix.fallocate", unsupported)
    with store.create("none", 1 << 20) as stream:
        (unfinished,) = store.leftovers()
        assert (root / unfinished).stat().st_blocks == 0, "nothing is written in its place"
        stream.abort()
    write(store, "small", DATA)
    with pytest.raises(StorageError, match=r"cannot write .*/x"):
        write(store, "x", bytes(2 << 20))
    assert names(store) == ["small"]
    assert list(store.leftovers()) == []


def test_failing_flush(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> NoReturn:
        raise OSError(errno.EIO, "disk on fire")

    stream = store.create("x", 3)
    stream.write(b"123")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="disk on fire") as caught:
        stream.close()
    assert caught.value.errno == errno.EIO
    assert names(store) == list(store.leftovers()) == []


def test_file_systems_that_cannot_flush_directories(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_only(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "not a file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    write(store, "d/x", DATA)
    assert store.read("d/x") == DATA


def test_a_dropped_stream_leaves_nothing(store: LocalStore, root: Path) -> None:
    stream = store.create("x", 3)
    stream.write(b"123")
    del stream
    assert list(root.iterdir()) == []


def test_stat_tells_when_a_file_was_written(store: LocalStore, root: Path) -> None:
    store.publish("x", DATA, overwrite=False)
    os.utime(root / "x", ns=(0, 1_700_000_000_123_456_789))
    assert store.stat("x").modified == pytest.approx(1_700_000_000.123456789, abs=1e-6)
    with (root / "x").open("r+b") as file:
        file.write(b"?")
    assert (store.stat("x").modified or 0) > 1_700_000_001


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_directory(store: LocalStore, root: Path) -> None:
    write(store, "x", DATA)
    root.chmod(0o555)
    try:
        assert store.read("x") == DATA
        assert names(store) == ["x"]
        with pytest.raises(StorageError, match="denied"):
            store.create("y", 1)
    finally:
        root.chmod(0o755)


def test_read_only_mount(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, "x", DATA)

    def read_only(path: str, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *rest)

    real = os.open
    monkeypatch.setattr(os, "open", read_only)
    again = LocalStore(store.url)
    buffer = bytearray(4)
    again.read_into("x", [ReadRequest(0, buffer)])
    assert (again.read("x"), bytes(buffer)) == (DATA, DATA[:4])
    with pytest.raises(StorageError, match="Read-only") as caught:
        again.create("y", 1)
    assert caught.value.errno == errno.EROFS


def test_links(store: LocalStore, root: Path) -> None:
    write(store, "d/x", DATA)
    (root / "loop").symlink_to(root)
    (root / "file").symlink_to(root / "d" / "x")
    (root / "dangling").symlink_to(root / "nowhere")
    assert names(store) == ["d/x", "file"]
    assert store.read("file") == DATA
    assert not store.exists("dangling")
    with pytest.raises(ObjectExists):
        store.create("dangling", 1)
    linked = LocalStore(root / "loop")
    assert linked.read("d/x") == DATA


def test_errors_name_the_path(store: LocalStore) -> None:
    with pytest.raises(ObjectNotFound) as caught:
        store.read("d/x")
    assert f"{store.url}/d/x" in str(caught.value)
    assert caught.value.errno == errno.ENOENT
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_racing_publishers_often(store: LocalStore) -> None:
    assert [len(race(store, f"{turn}")) for turn in range(10)] == [1] * 10


def test_shared_memory_is_a_file_system_too() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs /dev/shm")
    store = open_store(f"/dev/shm/dtckpt-test-{os.getpid()}")
    write(store, "d/x", DATA)
    assert store.read("d/x") == DATA
    store.delete(["d/x"])
    os.rmdir(store.url)


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_a_forked_process_does_not_keep_the_lock_of_a_directory(tmp_path: Path) -> None:
    end_of_child, end_of_parent = os.pipe()
    with locked_directory(str(tmp_path)):
        pid = os.fork()
        if pid == 0:
            os.close(end_of_parent)
            os.read(end_of_child, 1)  # until the parent closes its end
            os._exit(0)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
        os.close(end_of_parent)
        os.close(end_of_child)
        os.waitpid(pid, 0)


def test_a_file_that_another_host_replaced_is_read_anew(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, "x", DATA)
    preadv, fstat, times = os.preadv, os.fstat, [0, 0]

    def gone_once(fd: int, views: Sequence[memoryview], offset: int) -> int:
        times[0] += 1
        if times[0] == 1:
            raise OSError(errno.ESTALE, "gone")
        return preadv(fd, views, offset)

    def nameless_once(fd: int) -> os.stat_result:
        times[1] += 1
        if times[1] == 2:
            raise FileNotFoundError(errno.ENOENT, "no name")
        return fstat(fd)

    monkeypatch.setattr(os, "preadv", gone_once)
    monkeypatch.setattr(os, "fstat", nameless_once)
    found = bytearray(len(DATA))
    store.read_into("x", [ReadRequest(0, found)])
    assert (found, times) == (DATA, [2, 3])


def test_a_file_that_is_always_gone_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    write(store, "x", DATA)
    monkeypatch.setattr(os, "pread", gone)
    with pytest.raises(StorageError, match=r"cannot read .*/x: Stale") as caught:
        store.read("x")
    assert caught.value.errno == errno.ESTALE


def test_unfinished_writes_are_told_by_what_is_written(store: LocalStore) -> None:
    write(store, "a/done", DATA)
    with store.create("a/x", 1 << 20) as stream:  # for which space is reserved
        stream.write(bytes(8192))
        (found,) = store.underway("a")
        assert found.size == 8192
        assert found.name in store.leftovers()
        assert list(store.underway("b")) == []
        stream.shorten()
    assert list(store.underway()) == []
