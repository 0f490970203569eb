"""Progress: told to whoever asks, and shown on a terminal only."""

from __future__ import annotations

import io
import logging
import sys
import threading
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.manager import saves
from dtckpt.checkpoint.timing.bars import progress, watch
from dtckpt.dtensor import DTensor, Shard
from dtckpt.storage import MemoryStore

from ...dtensor.rank_meshes import rank_mesh
from ...ranks import RanksFailed, run_ranks

_c10d: Any = dist


class Terminal(io.StringIO):
    """What stderr is where somebody looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def loads_of_two(told: dict[int, list[tuple[int, int]]], **options: Any) -> None:
    """Save rows on two ranks and load them as columns."""
    hub, store = _c10d.HashStore(), MemoryStore()

    def body(rank: int, group: Any) -> None:
        mesh = rank_mesh(hub, (2,), rank, group)
        rows = {
            f"w{n}": DTensor.from_local(torch.ones(50, 100), mesh, (Shard(0),)) for n in range(8)
        }
        ckpt.save(rows, store, process_group=group)
        columns = {
            f"w{n}": DTensor.from_local(torch.zeros(100, 50), mesh, (Shard(1),)) for n in range(8)
        }

        def on_progress(done: int, total: int) -> None:
            told.setdefault(rank, []).append((done, total))

        ckpt.load(columns, store, process_group=group, on_progress=on_progress, **options)

    run_ranks(2, body)


@pytest.mark.parametrize("read_once", [False, True])
def test_a_load_tells_how_far_it_is(read_once: bool) -> None:
    told: dict[int, list[tuple[int, int]]] = {}
    loads_of_two(told, read_once=read_once)
    assert sorted(told) == [0, 1]
    for calls in told.values():
        total = calls[0][1]
        assert {of for _, of in calls} == {total}
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1][0] == total > 8 * 50 * 50 * 4


def test_a_load_whose_caller_raises_fails_on_all_ranks() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        ckpt.save({"w": torch.ones(100)}, store, process_group=group)

        def on_progress(done: int, total: int) -> None:
            if rank == 1:
                raise RuntimeError("enough")

        ckpt.load({"w": torch.zeros(100)}, store, process_group=group, on_progress=on_progress)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    for error in failure.value.errors.values():
        assert isinstance(error, ckpt.CheckpointError)
        assert "load: read failed on rank 1: RuntimeError: enough" in str(error)


def run(root: Path, group: Any = None, **options: Any) -> None:
    with ckpt.CheckpointManager(root, process_group=group, **options) as manager:
        manager.save(1, {"w": torch.ones(1000), "step": 1})
        manager.wait()
        manager.restore({"w": torch.zeros(1000), "step": 0})


def test_the_first_rank_shows_bars_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[threading.Thread | None] = []

    def watched(label: str, standing: Any) -> threading.Thread | None:
        bars.append(watch(label, standing))
        return bars[-1]

    monkeypatch.setattr(saves, "watch", watched)
    with redirect_stderr(Terminal()) as terminal:
        run_ranks(2, lambda _, group: run(tmp_path, group, progress=True))
        for bar in bars:
            assert bar is not None
            bar.join(30)
        assert sys.stderr is terminal  # nothing stays in its place
    assert len(bars) == 1
    assert "saving step-1" in terminal.getvalue()
    assert "restoring " in terminal.getvalue()


def test_nothing_is_shown_unless_asked_for(tmp_path: Path) -> None:
    with redirect_stderr(Terminal()) as terminal:
        run(tmp_path)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_in_a_file(tmp_path: Path) -> None:
    with redirect_stderr(io.StringIO()) as log:
        run(tmp_path, progress=True)
        assert watch("saving", lambda: None) is None
    assert log.getvalue() == ""


def test_a_bar_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def standing() -> tuple[int, int]:
        raise RuntimeError("no idea")

    with redirect_stderr(Terminal()):
        thread = watch("saving", standing)
        assert thread is not None
        thread.join(30)
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert logged == ["no progress can be shown of saving"]


def test_a_bar_shows_bytes_and_names_as_they_are() -> None:
    with redirect_stderr(Terminal()) as terminal, progress("saving [bold]step") as tell:
        assert tell is not None
        tell(3 << 20, 12 << 20)
    assert "saving [bold]step" in terminal.getvalue()
    assert "3.0/12.0 MiB" in terminal.getvalue()
