"""From targets to stores, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import pytest
import torch

import dtckpt.checkpoint as ckpt
import dtckpt.storage
from dtckpt.errors import CheckpointError, StorageError
from dtckpt.storage import FsspecStore, LocalStore, MemoryStore, open_store
from dtckpt.storage.open import split_target


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
import dtckpt.checkpoint as ckpt
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


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        (Path("s3://bucket/run/step-1"), "s3://bucket/run/step-1"),
        (Path("gs://bucket"), "gs://bucket"),
        (Path("memory://a/b"), "memory://a/b"),
        (Path("peers://job"), "peers://job"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("S3:bucket/x", "S3://bucket/x"),
        ("dbfs:/x", "dbfs://x"),
        ("runs:/abc/model", "runs://abc/model"),
        (Path("s3://bucket/run").absolute(), "s3://bucket/run"),
        ("./a/../gs:/b", None),
    ],
)
def test_what_pathlib_leaves_of_urls_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any, meant: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="left of a URL" if meant is None else meant):
        open_store(target)
    assert not list(tmp_path.iterdir())


def test_paths_of_windows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in ("C:\\runs\\x", "D:/runs/x"):
        with pytest.raises(ValueError, match="path of Windows"):
            open_store(target)


def test_directories_that_look_like_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "b").mkdir(parents=True)
    assert open_store(tmp_path / "s3:" / "b").url == str(tmp_path / "s3:/b")
    assert open_store("./s3:/b").url == str(tmp_path / "s3:/b")
    assert open_store("step:10").url == str(tmp_path / "step:10")


def test_file_urls_are_decoded(tmp_path: Path) -> None:
    place = tmp_path / "a b#c%d?e"
    for target in (place.as_uri(), place.as_uri().replace("file://", "file:"), str(place)):
        assert open_store(target).url == str(place)
    (tmp_path / "x%20y").mkdir()
    with pytest.raises(ValueError, match="without file://"):
        open_store(f"file://{tmp_path}/x%20y")


class OfUpath:
    """What universal_pathlib's UPath of a remote place has: it is no os.PathLike."""

    protocol = "memory"
    storage_options: ClassVar = {"skip_instance_cache": True}

    def __str__(self) -> str:
        return "memory://u/step-1"


class LocalUpath(PurePosixPath):
    """What its UPath of a file URL has."""

    protocol = "file"
    storage_options: ClassVar = {"auto_mkdir": True}


def test_upaths(tmp_path: Path) -> None:
    target: Any = OfUpath()
    store = open_store(target)
    assert isinstance(store, FsspecStore)
    assert store.url == "memory://u/step-1"
    assert split_target(target, {"a": 1}) == (
        "memory://u/step-1",
        {"skip_instance_cache": True, "a": 1},
    )
    assert open_store(LocalUpath(tmp_path)).url == str(tmp_path)


def test_no_save_goes_to_what_is_left_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(2)}
    ckpt.save(state, "ours")
    place = Path("s3://bucket/run")
    for call in (
        lambda: ckpt.save(state, place / "step-1"),
        lambda: ckpt.async_save(state, place / "step-1").result(),
        lambda: ckpt.latest(place),
        lambda: ckpt.CheckpointManager(place),
        lambda: ckpt.export("ours", place),
        lambda: ckpt.export("ours", place / "w.safetensors"),
        lambda: ckpt.open(place / "model.safetensors"),
    ):
        with pytest.raises((ValueError, CheckpointError), match="s3://bucket"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_checkpoint_in_a_upath() -> None:
    place: Any = OfUpath()
    ckpt.save({"w": torch.ones(2)}, place, overwrite=True)
    with ckpt.open(place) as opened:
        assert opened["w"][...].equal(torch.ones(2))
