"""Handlers of signals, beside those of others."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from dtckpt.checkpoint.agreement.agreement import Agreement
from dtckpt.checkpoint.manager.signals import Signals

USED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
WITHIN = timedelta(seconds=25)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Put back what was there, whatever a test does."""
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in USED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Asked(list[tuple[str, timedelta | None]]):
    """What was asked."""

    def __call__(self, reason: str, within: timedelta | None) -> None:
        self.append((reason, within))


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signals_ask_for_a_save() -> None:
    asked = Asked()
    signals = Signals(asked, within=WITHIN)
    send(signal.SIGUSR1)
    send(signal.SIGTERM)
    assert asked == [("SIGUSR1", None), ("SIGTERM", WITHIN)]
    assert signals.stops(["on demand", "SIGTERM"])
    assert not signals.stops(["SIGUSR1"])
    signals.close()


def nothing(number: int, frame: object) -> None:
    """A handler of somebody else."""


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, nothing])
def test_the_handlers_before_stand_again_at_the_end(before: Any) -> None:
    signal.signal(signal.SIGTERM, before)
    signals = Signals(Asked())
    assert signal.getsignal(signal.SIGTERM) is not before
    signals.close()
    signals.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handlers_before_are_called_too() -> None:
    called: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: called.append(number))
    asked = Asked()
    signals = Signals(asked)
    send(signal.SIGUSR1)
    send(signal.SIGTERM)
    assert called == [signal.SIGUSR1, signal.SIGTERM]
    assert len(asked) == 2
    signals.close()


def exits(number: int, frame: object) -> None:
    raise SystemExit(number)


def test_who_exits_at_a_signal_to_stop_does_so_after_the_save() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, exits)
    asked = Asked()
    signals = Signals(asked)
    signals.raise_held()
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        signals.raise_held()
    assert caught.value.code == signal.SIGTERM
    signals.raise_held()
    with pytest.raises(SystemExit):
        send(signal.SIGUSR1)  # nothing of ours ends the loop there
    assert [name for name, _ in asked] == ["SIGTERM", "SIGTERM", "SIGUSR1"]
    signals.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_of_them_end_in_any_order(order: tuple[int, int]) -> None:
    called: list[int] = []

    def before(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGTERM, before)
    asked = [Asked(), Asked()]
    both = [Signals(each) for each in asked]
    send(signal.SIGTERM)
    assert [len(each) for each in asked] == [1, 1]
    both[order[0]].close()
    send(signal.SIGTERM)
    assert len(asked[order[0]]) == 1
    assert len(asked[order[1]]) == 2
    both[order[1]].close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(called) == 2


def test_handlers_of_others_that_came_later_are_left() -> None:
    called: list[str] = []
    ours = Signals(Asked())
    inner: Any = signal.getsignal(signal.SIGTERM)

    def later(number: int, frame: Any) -> None:
        called.append("later")
        inner(number, frame)

    signal.signal(signal.SIGTERM, later)
    ours.close()
    assert signal.getsignal(signal.SIGTERM) is later
    send(signal.SIGTERM)  # which would end this process if ours were what is left of the default
    assert called == ["later"]


def test_other_threads_install_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made: list[Signals] = []
    thread = threading.Thread(target=lambda: made.append(Signals(Asked())))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM, SIGUSR1 are not handled: only the main thread" in caplog.text
    made[0].close()


def test_another_thread_that_closes_leaves_handlers_that_pass_on() -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    asked = Asked()
    signals = Signals(asked)
    thread = threading.Thread(target=signals.close)
    thread.start()
    thread.join()
    send(signal.SIGTERM)
    assert called == [signal.SIGTERM]
    assert asked == []


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_handlers_that_python_does_not_know_of_are_left(caplog: pytest.LogCaptureFixture) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGUSR1, nowhere)
        try:
            asked = Asked()
            signals = Signals(asked)
            assert "SIGUSR1 is not handled: a handler stands there" in caplog.text
            send(signal.SIGUSR1)
            send(signal.SIGTERM)
            signals.close()
            send(signal.SIGUSR1)
            assert [name for name, _ in asked] == ["SIGTERM"]
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def how_a_child_ends(body: Callable[[], None]) -> int:
    """Fork, run, send SIGTERM to oneself; return what the child ended with."""
    child = os.fork()
    if child == 0:
        try:
            body()
            send(signal.SIGTERM)
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_processes_end_as_they_would() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked = Asked()
    signals, second = Signals(asked), Signals(asked)
    assert how_a_child_ends(lambda: None) == -signal.SIGTERM
    assert how_a_child_ends(second.close) == -signal.SIGTERM
    send(signal.SIGTERM)
    assert len(asked) == 2
    second.close()
    signals.close()


def test_a_closed_handler_that_cannot_be_taken_away_does_what_the_system_does() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals = Signals(Asked())
    thread = threading.Thread(target=signals.close)
    thread.start()
    thread.join()
    assert how_a_child_ends(lambda: None) == -signal.SIGTERM


def test_signals_come_at_any_point_of_a_call() -> None:
    agreement = Agreement()
    asked = Asked()

    def ask(reason: str, within: timedelta | None) -> None:
        asked(reason, within)
        agreement.ask(reason, within)

    signals = Signals(ask, save=[signal.SIGALRM], stop=[])
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    answered = 0
    try:
        while answered < 100:
            if (agreed := agreement.at_call()) is not None:
                assert agreed.reasons == ("SIGALRM",)
                answered += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(asked) >= 100
    signals.close()
    agreement.close()


def test_none_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    before = [signal.getsignal(number) for number in USED]
    with caplog.at_level(logging.WARNING):
        signals = Signals(Asked(), save=(), stop=())
    assert [signal.getsignal(number) for number in USED] == before
    assert caplog.messages == []
    signals.close()
