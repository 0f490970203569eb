"""The local store on real file systems of other kinds, and with a quota."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtckpt.checkpoint import load, save, verify
from dtckpt.errors import StorageError
from dtckpt.storage import LocalStore, Store

from ..conformance import Raw, StoreTests, names, write
from .mounts import KINDS, mounted
from .test_local import RawDirectory

MIB = 1 << 20


@pytest.fixture(scope="module", params=KINDS)
def mount(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with mounted(request.param, tmp_path_factory.mktemp(request.param)) as target:
        yield target


@pytest.fixture
def root(mount: Path, tmp_path: Path) -> Path:
    return mount / tmp_path.name


class TestFileSystems(StoreTests):
    @pytest.fixture
    def store(self, root: Path) -> Store:
        return LocalStore(root)

    @pytest.fixture
    def raw(self, root: Path) -> Raw:
        return RawDirectory(root)

    def test_readers_see_old_or_new(self, store: Store) -> None:
        if "/linkless" in store.url:
            pytest.skip("libfuse loses a name for a moment where another file takes it")
        super().test_readers_see_old_or_new(store)


@pytest.mark.parametrize("direct_io", [False, True, "auto"])
def test_a_checkpoint(root: Path, direct_io: bool) -> None:
    options = {"direct_io": direct_io}
    state = {"w": np.arange(9 * MIB // 4, dtype=np.int32), "b": np.ones(3, np.float32), "n": 7}
    save(state, root, no_dist=True, storage_options=options)
    with pytest.raises(FileExistsError):
        save(state, root, no_dist=True, storage_options=options)
    save({**state, "n": 8}, root, no_dist=True, overwrite=True, storage_options=options)
    verify(root)
    found = {"w": np.zeros_like(state["w"]), "b": np.zeros(3, np.float32), "n": 0}
    load(found, root, no_dist=True)
    assert np.array_equal(found["w"], state["w"])
    assert np.array_equal(found["b"], state["b"])
    assert found["n"] == 8


@pytest.fixture
def with_quota(tmp_path: Path) -> Iterator[Path]:
    """A directory for 8 MiB in a file system that has room for more."""
    if shutil.which("btrfs") is None:
        pytest.skip("btrfs is not installed")
    with mounted("btrfs", tmp_path) as target:
        place = target / "limited"
        for command in (
            ["subvolume", "create", place],
            ["quota", "enable", target],
            ["qgroup", "limit", "8M", place],
        ):
            subprocess.run(["btrfs", *map(str, command)], check=True, capture_output=True)
        yield place


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_quota_that_is_used_up(with_quota: Path, direct_io: bool) -> None:
    store = LocalStore(with_quota, direct_io=direct_io)
    write(store, "before", b"1")
    with pytest.raises(StorageError, match=r"64 ?MiB|67108864.*quota.*room") as caught:
        write(store, "x", bytes(64 * MIB))
    assert caught.value.errno == errno.EDQUOT
    assert names(store) == ["before"]
    assert list(store.leftovers()) == []
    write(store, "y", bytes(MIB))


def test_a_save_beyond_its_quota_leaves_the_checkpoint_before(with_quota: Path) -> None:
    small = {"w": np.ones(MIB, np.uint8)}
    save(small, with_quota / "one", no_dist=True)
    with pytest.raises(StorageError, match=r"quota"):
        save({"w": np.ones(64 * MIB, np.uint8)}, with_quota / "two", no_dist=True)
    verify(with_quota / "one")
    assert not list(LocalStore(with_quota / "two").list())
