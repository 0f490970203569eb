"""A run is watched as it saves: on a screen, line by line, as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.runs.watching import RunWatch, changes
from dtckpt.errors import StorageError
from dtckpt.storage import LocalStore
from dtckpt.tools.cli.common.console import iec
from dtckpt.tools.cli.look.watch_text import ScreenTeller

from .conftest import Run

Meanwhile = Callable[..., None]


def save(root: Path, step: int, size: int = 2) -> None:
    dcp.save({"a": torch.ones(size)}, root / f"step-{step}", overwrite=True)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Have things happen in place of the pauses between looks; then Ctrl-C is pressed."""

    def during(*actions: Callable[[], object]) -> None:
        left = iter(actions)

        def sleep(_seconds: float) -> None:
            action = next(left, None)
            if action is None:
                raise KeyboardInterrupt
            action()

        monkeypatch.setattr("dtckpt.tools.cli.look.watch.time.sleep", sleep)

    return during


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def unfinished(root: Path, step: int, num_bytes: int) -> None:
    """Leave what a save looks like that has written so much of its file."""
    folder = root / f"step-{step}" / "data" / ("0" * 16)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".00000.safetensors.{'1' * 16}.tmp", "wb") as file:
        file.write(bytes(num_bytes))
        file.truncate(1 << 20)  # as space is reserved


def test_each_change_is_a_line(run: Run, root: Path, meanwhile: Meanwhile) -> None:
    meanwhile(
        lambda: unfinished(root, 3, 8192),
        lambda: unfinished(root, 3, 16384),
        lambda: (shutil.rmtree(root / "step-3"), save(root, 3)),
        lambda: (root / "step-2.pinned").touch(),
        lambda: dcp.delete(root / "step-1"),
        lambda: (root / "step-3" / "manifest.json").write_bytes(b"{"),
    )
    result = run("watch", root)
    assert result.exit_code == 130
    head, last, *lines = result.stdout.splitlines()
    assert head == f"2 committed checkpoints in {root}"
    assert last.startswith("last save: step-2, ")
    told = [line.partition("  ")[2] for line in lines]
    size = sum(path.stat().st_size for path in (root / "step-2").rglob("*.safetensors"))
    assert told[0] == f"step-3: being saved, 8.0 KiB so far (last one: {iec(size)})"
    assert told[1].startswith("step-3: being saved, 16.0 KiB so far at ")
    assert told[2:5] == [
        f"step-3: committed, {iec(size)}",
        "step-2: pinned",
        "step-1: deleted",
    ]
    assert told[5].startswith("step-3: damaged: ")
    assert len(told) == 6


def test_each_change_is_a_document(run: Run, root: Path, meanwhile: Meanwhile) -> None:
    meanwhile(lambda: None, lambda: save(root, 10), lambda: None)
    documents = [json.loads(line) for line in run("watch", root, "--json").stdout.splitlines()]
    assert [(d["schema_version"], d["kind"]) for d in documents] == [(1, "run"), (1, "change")]
    first, change = documents
    assert [step["name"] for step in first["steps"]] == ["step-1", "step-2"]
    assert first["seconds_between"] >= 0
    assert (change["what"], change["step"]["name"]) == ("committed", "step-10")


def test_quiet_leaves_out_progress(run: Run, root: Path, meanwhile: Meanwhile) -> None:
    meanwhile(*(lambda size=size: unfinished(root, 3, size) for size in (0, 4096, 8192)))
    lines = run("watch", root, "--quiet").stdout.splitlines()[2:]
    assert [line.partition("  ")[2].partition(",")[0] for line in lines] == ["step-3: being saved"]


def test_once(run: Run, root: Path) -> None:
    result = run("watch", root, "--once")
    assert result.exit_code == 0
    assert "last save: step-2, " in result.stdout
    documents = run("watch", root, "--once", "--json").stdout.splitlines()
    assert len(documents) == 1


def test_a_run_that_has_not_begun_is_waited_for(
    run: Run, tmp_path: Path, meanwhile: Meanwhile
) -> None:
    meanwhile(lambda: save(tmp_path / "run", 1))
    result = run("watch", tmp_path / "run")
    assert "does not exist" in result.stderr
    assert "waiting for the first save" in result.stderr
    assert "step-1: committed" in result.stdout
    result = run("watch", tmp_path / "none", "--once")
    assert result.exit_code == 3
    result = run("watch", tmp_path / "run" / "step-1")
    assert result.exit_code == 3
    assert "is a checkpoint itself" in result.stderr


def test_a_storage_that_fails_is_asked_again(
    run: Run, root: Path, meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = LocalStore.level
    outage: Iterator[bool] = iter([False, True, False])

    def failing(self: LocalStore, prefix: str = "") -> object:
        if self.url == str(root) and next(outage, False):
            raise StorageError("the network is down")
        return level(self, prefix)

    monkeypatch.setattr(LocalStore, "level", failing)
    meanwhile(lambda: None, lambda: save(root, 3))
    result = run("watch", root)
    assert "the network is down; asking again" in result.stderr
    assert "step-3: committed" in result.stdout


def test_what_is_committed_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = RunWatch(LocalStore(root))
    first = runs.look()
    read: list[str] = []
    inner = LocalStore.read_start

    def counted(self: LocalStore, name: str, most: int) -> bytes:
        read.append(self.url)
        return inner(self, name, most)

    monkeypatch.setattr(LocalStore, "read_start", counted)
    assert not list(changes(first, runs.look()))
    assert read == []
    save(root, 2, size=1000)  # in place of the one that was there
    found = list(changes(first, runs.look()))
    assert [(change.what, change.step.name) for change in found] == [("committed", "step-2")]
    assert {Path(url).name for url in read} == {"step-2"}


@pytest.mark.parametrize("width", [60, 120])
def test_a_screen_shows_the_newest(tmp_path: Path, width: int) -> None:
    for step in range(1, 31):
        save(tmp_path, step)
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=width, height=24, color_system=None)
    screen = ScreenTeller(console)
    screen.begin(RunWatch(LocalStore(tmp_path)).look())
    try:
        screen.fail(StorageError("the network is down"))
    finally:
        screen.end()
    shown = text.getvalue()
    assert "30 committed checkpoints in " in shown
    assert "step-30" in shown
    assert "step-1 " not in shown
    assert " older" in shown
    assert "the network is down; asking again" in shown


def test_the_interval_is_a_time(run: Run, root: Path) -> None:
    assert run("watch", root, "--interval", "0").exit_code == 2
