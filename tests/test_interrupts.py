"""Exceptions of signal handlers come out of the library as they are."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.state import values
from dtckpt.errors import StorageError
from dtckpt.interrupts import raised_by_signal_handler
from dtckpt.storage.failures import translated


class Alarm(Exception):
    pass


def on_alarm(*_: object) -> None:
    raise Alarm


def with_text(text: str, *_: object) -> None:
    raise Alarm(text)


class Handler:
    def on_alarm(self, *_: object) -> None:
        raise Alarm

    def __call__(self, *_: object) -> None:
        raise Alarm


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, on_alarm)
    yield
    signal.signal(signal.SIGALRM, before)


def ring() -> None:
    signal.raise_signal(signal.SIGALRM)


def error_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    "handler",
    [on_alarm, Handler().on_alarm, Handler(), partial(with_text, "late")],
    ids=["function", "method", "object", "partial"],
)
def test_errors_of_handlers_are_found(handler: Any) -> None:
    signal.signal(signal.SIGALRM, handler)
    assert raised_by_signal_handler(error_of(ring))


def test_other_errors_are_none_of_handlers() -> None:
    def fail() -> None:
        raise Alarm

    assert not raised_by_signal_handler(error_of(fail))
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert not raised_by_signal_handler(error_of(fail))


def test_threads_run_no_handlers() -> None:
    found: list[bool] = []
    error = error_of(ring)
    thread = threading.Thread(target=lambda: found.append(raised_by_signal_handler(error)))
    thread.start()
    thread.join()
    assert found == [False]


def test_storage_errors_are_of_storage() -> None:
    with pytest.raises(Alarm), translated("write", "somewhere"):
        ring()
    expected = pytest.raises(StorageError, match="cannot write somewhere: ValueError")
    with expected, translated("write", "somewhere"):
        raise ValueError


class Ringing:
    """State that is interrupted while it is asked for."""

    def state_dict(self) -> dict[str, Any]:
        ring()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ring()


def test_an_interrupted_save_or_load_raises_what_the_handler_raised(tmp_path: Path) -> None:
    with pytest.raises(Alarm):
        ckpt.save({"a": Ringing()}, tmp_path / "one")
    with pytest.raises(ckpt.NotCommitted):
        ckpt.load({"a": torch.zeros(2)}, tmp_path / "one")
    ckpt.save({"a": torch.ones(2)}, tmp_path / "one")
    state = {"a": torch.zeros(2)}
    ckpt.load(state, tmp_path / "one")
    assert state["a"].tolist() == [1.0, 1.0]


def test_an_interrupted_read_of_a_value_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_: object) -> None:
        ring()

    monkeypatch.setitem(vars(values)["_DECODERS"], "float", decode)
    with pytest.raises(Alarm):
        values.decode_value({"float": "inf"}, "value", allow_pickle=False)
