"""From targets to stores, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dtckpt.storage
from dtckpt.errors import StorageError
from dtckpt.storage import FsspecStore, LocalStore, MemoryStore, open_store


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a", "a", "b/../a/"):
        store = open_store(target)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "a")
    assert open_store(f"file://localhost{tmp_path}").url == str(tmp_path)
    assert open_store("odd:name").url == str(tmp_path / "odd:name")


def test_urls() -> None:
    store = open_store("memory://some/where", option=1)
    assert isinstance(store, FsspecStore)
    assert store.url == "memory://some/where"
    with pytest.raises(StorageError, match="nonesuch"):
        open_store("nonesuch://x")
    for bad in ("file://host/path", "file://", "simplecache::s3://bucket/x"):
        with pytest.raises(ValueError, match="URL"):
            open_store(bad)


def test_stores_pass_through() -> None:
    store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize("target", [MemoryStore(), "/a", "file:///a"])
def test_options_are_refused_by_name(target: Any) -> None:
    with pytest.raises(TypeError, match="anon, key"):
        open_store(target, key=1, anon=True)


def test_public_names() -> None:
    assert dtckpt.storage.__all__ == sorted(dtckpt.storage.__all__)
    assert dir(dtckpt.storage) == dtckpt.storage.__all__
    for name in dtckpt.storage.__all__:
        module = getattr(dtckpt.storage, name).__module__
        assert module.startswith("dtckpt.storage.") or module == "dtckpt.errors"
    assert not hasattr(dtckpt.storage, "nonesuch")


LIGHT = """
import sys
import dtckpt.storage
dtckpt.storage.open_store("/tmp/x")
from dtckpt.storage import FaultyStore, MemoryStore
heavy = {"fsspec", "torch", "numpy", "s3fs", "asyncio"} & set(sys.modules)
assert not heavy, heavy
from dtckpt.storage import FsspecStore
assert "fsspec" not in sys.modules
"""


def test_local_stores_load_no_drivers() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
