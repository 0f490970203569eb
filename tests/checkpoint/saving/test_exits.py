"""Saves in the background whose process ends, and processes that are forked during saves."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.saving import exiting
from dtckpt.checkpoint.saving.exiting import AtExit
from dtckpt.checkpoint.state.collector import paused_collector
from dtckpt.errors import NotCommitted
from dtckpt.storage import LocalStore
from dtckpt.storage.local import direct

from ...conftest import S3
from ...forked import Ended, run_forked

# What a script ends with is run while its save has not ended: the storage waits for the exit.
SCRIPT = """
import atexit, multiprocessing, sys, threading, time, torch
import dtckpt.checkpoint as dcp
from dtckpt.storage import Fault, FaultyStore, LocalStore, Rule, open_store

class UntilTheEnd(Fault):
    def before(self):
        threading.main_thread().join(0.5)  # the longest that it holds up a save that is waited for

class Fail(UntilTheEnd):
    def before(self):
        super().before()
        raise OSError("disk on fire")

STATE = {"big": torch.ones(10 << 20), "small": torch.ones(100)}

def save(path, fault=UntilTheEnd(), **options):
    store = FaultyStore(LocalStore(path, direct_io=True), [Rule(fault, op="create", nth=1)])
    return dcp.async_save(STATE, store, no_dist=True, **options)

atexit.register(print, "handlers have run")
path = sys.argv[1]
"""

ENDS = {
    "wait": """
save(path, Fail()).exception()  # what somebody knows does no harm
save(path)
""",
    "abort": "save(path, at_exit='abort')",
    "fails": "save(path, Fail())",
    "failed": """
handle = save(path, Fail())
while not handle.done():
    time.sleep(0.01)
""",
    "forked": """
child = multiprocessing.get_context("fork").Process(target=save, args=(path,))
child.start()
child.join()
sys.exit(child.exitcode)
""",
    "by name": """
options = dict(key="test", secret="test", client_kwargs=dict(
    endpoint_url=sys.argv[3], region_name="us-east-1"))
store = FaultyStore(open_store(sys.argv[2], **options), [Rule(UntilTheEnd(), op="create", nth=1)])
dcp.async_save(STATE, store)
""",
}


@dataclass(frozen=True, slots=True)
class Outcome(Ended):
    """How a script ended, and where it saved."""

    path: Path


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, s3_endpoint: str) -> dict[str, Outcome]:
    """Every script of ENDS, all run at the same time."""
    root = tmp_path_factory.mktemp("exits")
    url = "s3://dtckpt-tests/exits"
    endpoint = s3_endpoint.replace("127.0.0.1", "localhost")  # a name has to be looked up
    ended = run_forked(
        {name: (SCRIPT + end, str(root / name), url, endpoint) for name, end in ENDS.items()},
        tmp_path_factory.mktemp("outputs"),
        imports="import torch, dtckpt.checkpoint as dcp; dcp.async_save",
    )
    return {
        name: Outcome(end.code, end.out, end.errors, root / name) for name, end in ended.items()
    }


@pytest.fixture(scope="module", autouse=True)
def bucket(s3_client: Any) -> None:
    """The bucket is there before the scripts run."""


@pytest.mark.parametrize("name", ["wait", "forked"])
def test_a_save_is_brought_to_its_end(outcomes: dict[str, Outcome], name: str) -> None:
    done = outcomes[name]
    assert (done.code, done.errors) == (0, "")
    assert dcp.verify(done.path).problems == ()
    assert dcp.open(done.path)["small"][...].sum() == 100


def test_a_save_may_be_aborted(outcomes: dict[str, Outcome]) -> None:
    done = outcomes["abort"]
    assert (done.code, done.errors) == (0, "")
    with pytest.raises(NotCommitted):
        dcp.open(done.path)
    assert [path for path in done.path.rglob("*") if path.is_file()] == []


def test_a_driver_may_look_up_names_until_the_end(outcomes: dict[str, Outcome], s3: S3) -> None:
    """For which it wants a pool of threads."""
    done = outcomes["by name"]
    assert (done.code, done.errors) == (0, "")
    with dcp.open("s3://dtckpt-tests/exits", storage_options=s3.options) as checkpoint:
        assert checkpoint["small"][...].sum() == 100


@pytest.mark.parametrize("name", ["fails", "failed"])
def test_a_failure_that_nobody_asked_for_is_an_exit_code(
    outcomes: dict[str, Outcome], name: str
) -> None:
    done = outcomes[name]
    assert done.code == 1
    assert "failed, and nobody asked for it: save: write: OSError: disk on fire" in done.errors
    assert done.out == "handlers have run\n"


class Told:
    """A save that notes that it was to end."""

    def __init__(self, at_exit: AtExit) -> None:
        self.at_exit: AtExit = at_exit
        self.was_told = False

    def end_with_process(self) -> bool:
        self.was_told = True
        return True


def test_saves_of_other_threads_are_aborted_when_these_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A main thread that has ended says nothing of threads that go on training."""
    monkeypatch.setattr(exiting, "_unsettled", set[Any]())
    monkeypatch.setattr(exiting, "_has_failed", False)
    saves = [Told("wait"), Told("abort")]
    for save in saves:
        exiting.remember(save)
    vars(exiting)["_when_main_thread_ends"]()
    assert [save.was_told for save in saves] == [True, False]
    vars(exiting)["_when_process_ends"]()
    assert [save.was_told for save in saves] == [True, True]


@pytest.mark.parametrize("in_background", [True, False])
def test_files_are_written_without_a_thread_where_none_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dtckpt-write":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store, state = LocalStore(tmp_path, direct_io=True), {"x": torch.randn(17 << 20)}
    if in_background:
        dcp.async_save(state, store).result(60)
    else:
        dcp.save(state, store)
    with dcp.open(store) as checkpoint:
        assert torch.equal(checkpoint["x"][...], state["x"])


@pytest.fixture
def at_work() -> Iterator[None]:
    """Another thread is planning, and asks whether direct I/O pays."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        with paused_collector(), vars(direct)["_lock"]:
            begun.set()
            ended.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("paused", [False, True])
def test_a_forked_process_collects_garbage_and_saves(tmp_path: Path, paused: bool) -> None:
    """Also where the thread that forks has paused the collector, too."""

    def child() -> int:
        with paused_collector():
            inside = gc.isenabled()
        return 0 if gc.isenabled() and not inside and direct.direct_io_pays("/") in (0, 1) else 3

    assert not gc.isenabled()
    pid = 0
    try:
        if paused:
            with paused_collector():
                pid = os.fork()
                inside = gc.isenabled()
        else:
            pid = os.fork()
            inside = gc.isenabled()
        if pid == 0:
            os._exit(child() if inside else 2)
    finally:
        if pid == 0:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not gc.isenabled(), "of the parent it is still paused"
