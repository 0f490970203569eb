"""Saves that another process asks for."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dtckpt.checkpoint.manager import demand
from dtckpt.checkpoint.manager.demand import SAVE_NOW, Demand, DemandWatch, request_save
from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, StorageError, Timeout
from dtckpt.storage import (
    Call,
    Fault,
    FaultyStore,
    LocalStore,
    MemoryStore,
    RaiseError,
    Store,
)
from tests.waiting import wait_for

SOON = timedelta(milliseconds=10)
LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "_LOOK_SECONDS", 0.01)


@pytest.fixture(params=["memory", "local"])
def store(request: Any, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else LocalStore(str(tmp_path))


class Training:
    """What asks a watch whenever it is asked for a save."""

    def __init__(self, store: Store) -> None:
        self.asked = threading.Semaphore(0)
        self.reasons: list[str] = []
        self.watch = DemandWatch(store, self._ask, SOON)

    def _ask(self, reason: str) -> None:
        self.reasons.append(reason)
        self.asked.release()

    def wait(self) -> tuple[str, ...]:
        assert self.asked.acquire(timeout=20)
        return self.watch.begin_save()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc: object) -> None:
        self.watch.close()


def test_a_request_is_answered_once_and_nothing_is_left(store: Store) -> None:
    with Training(store) as training, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(request_save, store, wait=LONG)
        ids = training.wait()
        assert len(ids) == 1
        assert training.watch.begin_save() == ()
        assert not asking.done()
        training.watch.answer(ids, "s3://run/step-7")
        assert asking.result(20) == "s3://run/step-7"
        assert training.reasons == ["on demand"]
    assert not store.exists(SAVE_NOW)


def test_who_does_not_wait_leaves_nothing_either(store: Store) -> None:
    assert request_save(store) is None
    assert store.exists(SAVE_NOW)
    with Training(store) as training:
        training.watch.answer(training.wait(), "url")
    assert not store.exists(SAVE_NOW)


def test_a_save_that_began_before_a_request_does_not_answer_it(store: Store) -> None:
    with Training(store) as training, ThreadPoolExecutor(1) as pool:
        request_save(store)
        first = training.wait()
        asking = pool.submit(request_save, store, wait=LONG)
        second = training.wait()
        assert first != second
        training.watch.answer(first, "older")
        training.watch.answer(second, "newer")
        assert asking.result(20) == "newer"


def test_a_failure_is_told_to_who_waits(store: Store) -> None:
    with Training(store) as training, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(request_save, store, wait=LONG)
        training.watch.answer(training.wait(), problem="the disk is full")
        with pytest.raises(CheckpointError, match="the save failed: the disk is full"):
            asking.result(20)
    assert not store.exists(SAVE_NOW)


def test_who_waits_in_vain_is_told_and_the_request_stands(store: Store) -> None:
    with pytest.raises(Timeout, match=r"within 0.05 s; the request stands"):
        request_save(store, wait=timedelta(seconds=0.05))
    with Training(store) as training:
        assert len(training.wait()) == 1


def test_answers_that_nobody_comes_for_go_after_a_while() -> None:
    asked = Demand.from_bytes(
        b'{"requests": [{"id": "a", "time": 1.0, "waits": true}, '
        b'{"id": "b", "time": 1.0, "waits": true}], "answers": []}'
    )
    first = asked.answered(["a"], "url", "", 10.0)
    assert [each.id for each in first.answers] == ["a"]
    second = first.answered(["b"], "url", "", 10_000.0)
    assert [each.id for each in second.answers] == ["b"]
    assert second.requests == ()
    assert Demand.from_bytes(second.to_bytes()) == second


def test_many_ask_at_the_same_time(store: Store) -> None:
    with Training(store) as training, ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(request_save, store, wait=LONG) for _ in range(8)]
        while not all(each.done() for each in asking):
            training.watch.answer(training.watch.begin_save(), "url")
        assert [each.result() for each in asking] == ["url"] * 8
    assert not store.exists(SAVE_NOW)


def test_a_request_that_another_writer_undoes_is_made_again(store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(request_save, store, wait=LONG)
        wait_for(lambda: store.exists(SAVE_NOW))
        store.delete([SAVE_NOW])
        wait_for(lambda: store.exists(SAVE_NOW))
        with Training(store) as training:
            training.watch.answer(training.wait(), "url")
            assert asking.result(20) == "url"


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted, match="no such directory"):
        request_save(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_can_be_asked_before_its_first_save(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "run"
    with Training(LocalStore(root)) as training:
        wait_for(root.exists)
        request_save(root)
        assert len(training.wait()) == 1


def test_what_is_no_list_of_requests_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong in (b"{", b"[1]", b'{"requests": [{"id": 1}], "answers": []}', b" " * (1 << 21)):
        (tmp_path / SAVE_NOW).write_bytes(wrong)
        with pytest.raises(Corrupt, match="delete it"):
            request_save(tmp_path)
        assert (tmp_path / SAVE_NOW).read_bytes() == wrong
    caplog.clear()
    with Training(LocalStore(str(tmp_path))) as training:
        wait_for(lambda: caplog.messages)
        (tmp_path / SAVE_NOW).unlink()
        request_save(tmp_path)
        assert len(training.wait()) == 1
    assert len(caplog.messages) == 1


def test_a_storage_that_fails_is_told_once_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = MemoryStore()
    fails = threading.Event()
    fails.set()

    def plan(call: Call) -> Fault | None:
        return RaiseError(StorageError("503")) if fails.is_set() else None

    with Training(FaultyStore(inner, plan)) as training:
        wait_for(lambda: caplog.messages)
        request_save(inner)
        fails.clear()
        ids = training.wait()
        fails.set()
        training.watch.answer(ids, "url")
        assert json.loads(inner.read(SAVE_NOW))["requests"]
    assert any("is not told that it is there" in text for text in caplog.messages)
    with pytest.raises(StorageError):
        request_save(FaultyStore(inner, plan))
