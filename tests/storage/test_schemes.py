"""URL schemes that others serve: registered here, or brought by an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dtckpt.checkpoint as ckpt
from dtckpt.errors import StorageError
from dtckpt.storage import (
    LocalStore,
    MemoryStore,
    Store,
    open_store,
    register_scheme,
    unregister_scheme,
)


@pytest.fixture
def registered() -> Iterator[dict[str, Store]]:
    """What was opened by URLs of ``testfs://``, which is registered meanwhile."""
    opened: dict[str, Store] = {}

    def opener(url: str, **options: Any) -> Store:
        opened[url] = MemoryStore(**options)
        return opened[url]

    register_scheme("testfs", opener)
    yield opened
    unregister_scheme("testfs")


def test_registered_schemes_open(registered: dict[str, Store]) -> None:
    objects: dict[str, bytes] = {}
    store = open_store("TestFS://some/where", objects=objects)
    assert store is registered["testfs://some/where"]
    store.publish("x", b"1", overwrite=False)
    assert objects == {"x": b"1"}


def test_checkpoints_at_registered_schemes(registered: dict[str, Store]) -> None:
    objects: dict[str, bytes] = {}
    ckpt.save({"step": 3}, "testfs://run/step-3", storage_options={"objects": objects})
    state = {"step": 0}
    ckpt.load(state, "testfs://run/step-3", storage_options={"objects": objects})
    assert state == {"step": 3}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("scheme", "who"),
    [("testfs", "opener"), ("S3", "dtckpt"), ("file", "dtckpt"), ("ftp", "fsspec")],
)
def test_what_is_taken_is_refused(scheme: str, who: str) -> None:
    with pytest.raises(ValueError, match=rf"(?i){scheme}:// is taken, by .*{who}.*replace=True"):
        register_scheme(scheme, MemoryStore)


def test_what_is_taken_is_replaced_where_asked(tmp_path: Path) -> None:
    def elsewhere(url: str, **_: Any) -> Store:
        return LocalStore(tmp_path / url.removeprefix("memory://"))

    register_scheme("memory", elsewhere, replace=True)
    try:
        assert open_store("memory://a").url == f"{tmp_path}/a"
    finally:
        unregister_scheme("memory")
    assert open_store("memory://a").url == "memory://a"


def test_the_same_opener_may_come_again(registered: dict[str, Store]) -> None:
    register_scheme("again", LocalStore)
    try:
        register_scheme("again", LocalStore)
    finally:
        unregister_scheme("again")
    with pytest.raises(KeyError):
        unregister_scheme("again")


@pytest.mark.parametrize("scheme", ["", "1x", "a b", "a://", "a_b"])
def test_what_cannot_be_a_scheme(scheme: str) -> None:
    with pytest.raises(ValueError, match="bad URL scheme"):
        register_scheme(scheme, LocalStore)


def test_openers_return_stores() -> None:
    def wrong(url: str) -> Any:
        return url

    register_scheme("wrong", wrong)
    try:
        with pytest.raises(TypeError, match=r"wrong:// gave a str"):
            open_store("wrong://x")
    finally:
        unregister_scheme("wrong")


def test_unknown_schemes_say_what_to_do() -> None:
    with pytest.raises(StorageError, match=r"serves nonesuch://.*install .*register_scheme"):
        open_store("nonesuch://x")


PACKAGE = """
from dtckpt.storage import LocalStore

def open_it(url, **options):
    return LocalStore(url.removeprefix("packed://"), **options)
"""


def install(folder: Path, name: str, scheme: str, value: str) -> None:
    """Lay a distribution into a folder, as pip would."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dtckpt.stores]\n{scheme} = {value}\n")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "packed_store.py").write_text(PACKAGE)
    return folder


def run(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(packages), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_installed_packages_serve_the_command_too(packages: Path, tmp_path: Path) -> None:
    install(packages, "packed", "packed", "packed_store:open_it")
    ckpt.save({"step": 3}, tmp_path / "run")
    found = run(packages, "-m", "dtckpt", "inspect", f"packed://{tmp_path}/run")
    assert (found.returncode, found.stderr) == (0, "")
    assert "step" in found.stdout


OPEN = "import dtckpt.storage as s; print(s.open_store('{}://x'))"


def test_packages_that_do_not_load_or_agree(packages: Path) -> None:
    install(packages, "broken", "broken", "no_such_module:open_it")
    install(packages, "one", "both", "packed_store:open_it")
    install(packages, "other", "both", "packed_store:other")
    install(packages, "greedy", "memory", "packed_store:open_it")
    broken = run(packages, "-c", OPEN.format("broken"))
    assert "no_such_module:open_it, which serves broken://, does not load" in broken.stderr
    both = run(packages, "-c", OPEN.format("both"))
    assert "several installed packages serve both://" in both.stderr
    assert run(packages, "-c", OPEN.format("memory")).stdout == "FsspecStore('memory://x')\n"
