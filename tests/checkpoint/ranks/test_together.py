"""The rule that ranks fail together, without any other rank: what follows from what is decided."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dtckpt.checkpoint.ranks import base as ranks_module
from dtckpt.checkpoint.ranks.base import Answers, Round, Solo
from dtckpt.checkpoint.ranks.failing import FAILED, OK, CalledOff, Departure, told
from dtckpt.checkpoint.ranks.together import closing, ranks_of, together
from dtckpt.checkpoint.state.limits import METADATA_VARIABLE
from dtckpt.errors import CheckpointError, Corrupt, RankFailed


class Among(Solo):
    """A rank that coordinates two others, of whom it is known what they answer."""

    def __init__(
        self, answers: Iterable[Answers] = (), lost: Mapping[int, str] | None = None, rank: int = 0
    ) -> None:
        super().__init__(rank)
        self.all = (0, 1, 2)
        self._answers = iter(answers)
        self._lost = lost or {}
        self.fatal: list[Callable[[bytes], bool]] = []
        self.without: list[frozenset[int]] = []

    def consult(self, answer: bytes, asked: Round) -> bytes:
        self.fatal.append(asked.fatal)
        self.without.append(asked.without)
        answers = next(self._answers, None)
        if answers is None:
            raise RankFailed("rank 0, which coordinates, is lost")
        return asked.decide({self.rank: answer, **answers}, self._lost)


def called_off() -> bytes:
    raise CalledOff


def bad() -> bytes:
    raise ValueError("bad")


def failed(error: BaseException) -> bytes:
    return FAILED + told(error)


def test_work_that_gets_on_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    alone = Solo()

    asked = Round(decide=lambda answers, _: b"".join(answers.values()), fatal=bool)

    def consult() -> None:
        assert alone.consult(b"x", asked) == b"x"

    for step in (lambda: alone.begin("save: plan"), consult, alone.tell_alive):
        now[0] += 5.0
        assert alone.stalled_seconds() == 5.0
        step()
        assert alone.stalled_seconds() == 0.0


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5.0, None])
def test_a_timeout_that_is_none_fails_the_first_phase(timeout: Any) -> None:
    for alone in (ranks_of(no_dist=True, timeout=timeout), ranks_of(timeout=timeout)):
        with pytest.raises(CheckpointError, match=r"timeout is a datetime.timedelta above zero"):
            alone.begin("save: plan")
    ranks_of(timeout=timedelta(microseconds=1)).begin("save: plan")


def test_what_is_wrong_first_is_told() -> None:
    none: Any = timedelta(0)
    with pytest.raises(CheckpointError, match=r"^base is no path$"):
        ranks_of(timeout=none, wrong="base is no path").begin("save: plan")
    with pytest.raises(CheckpointError, match=r"^base is no path$"):
        ranks_of("workers", wrong="base is no path").begin("save: plan")


def test_a_phase_is_begun_before_its_work() -> None:
    done: list[str] = []

    def body() -> bytes:
        done.append("written")
        return b""

    with pytest.raises(CheckpointError, match=r"^save: plan: base is no path$"):
        together(Solo(wrong="base is no path"), "save: plan", body)
    assert not done


def test_what_is_no_group_is_told_apart() -> None:
    with pytest.raises(CheckpointError, match="process_group is no process group: 'workers'"):
        ranks_of("workers").begin("save: plan")
    with pytest.raises(CheckpointError, match="not a member of the process group"):
        ranks_of(dist.GroupMember.NON_GROUP_MEMBER)


def test_others_learn_how_a_call_ended() -> None:
    ends: list[BaseException | None] = []

    class Closed(Solo):
        def close(self, error: BaseException | None = None) -> None:
            ends.append(error)

    with closing(Closed()):
        pass
    assert ends == [None]
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), closing(Closed()):
        raise interrupt
    assert ends == [None, interrupt]


def test_only_a_failure_is_fatal_and_only_where_nothing_is_overwritten() -> None:
    for touched, is_fatal in ((None, True), (list[str], False)):
        among = Among([{1: OK, 2: OK}])
        together(among, "phase", bytes, touched=touched)
        assert [among.fatal[0](given) for given in (OK, failed(ValueError()))] == [False, is_fatal]


def test_who_left_because_of_another_is_no_cause() -> None:
    off, cause = failed(CalledOff()), failed(Corrupt("a block is damaged"))
    with pytest.raises(Corrupt) as caught:
        together(Among([{1: off, 2: cause}]), "load: read", bytes)
    assert str(caught.value) == "load: read failed on rank 2: a block is damaged"
    with pytest.raises(RankFailed) as lost:
        together(Among([{1: off}], {2: "it has given up"}), "load: read", bytes)
    assert str(lost.value) == "load: read failed: rank 2 is lost: it has given up"


def test_who_left_is_a_cause_where_there_is_no_other() -> None:
    with pytest.raises(RankFailed, match=r"^save: write failed on rank 1: another rank failed$"):
        together(Among([{1: failed(CalledOff()), 2: OK}]), "save: write", bytes)


@pytest.mark.parametrize(
    ("answers", "lost", "named"),
    [
        ({1: OK}, {2: "it died"}, (2,)),
        ({}, {2: "it died", 1: "it fell silent"}, (1, 2)),
        ({1: failed(CalledOff())}, {2: "it died"}, (2,)),
        ({1: OK}, {2: Departure("it has given up: MemoryError: ")}, ()),
        ({}, {2: "it died", 1: Departure("it has given up: MemoryError: ")}, ()),
        ({1: failed(RankFailed("gone"))}, {2: "it died"}, ()),
    ],
)
def test_an_error_names_the_lost_where_nothing_else_was_wrong(
    answers: Answers, lost: dict[int, str], named: tuple[int, ...]
) -> None:
    with pytest.raises(RankFailed) as caught:
        together(Among([answers], lost), "phase", lambda: b"")
    assert caught.value.lost == named


def test_who_is_known_to_be_lost_is_not_asked() -> None:
    ranks = Among([{1: OK + b"1"}])
    told = together(
        ranks, "phase", lambda: b"0", lambda a: b"".join(a.values()), without=frozenset({2})
    )
    assert (told, ranks.without) == (b"01", [frozenset({2})])


def test_errors_lead_back_to_those_of_this_rank() -> None:
    with pytest.raises(CheckpointError) as caught:
        together(Among([{1: OK, 2: OK}]), "phase", bad)
    assert repr(caught.value.__cause__) == "ValueError('bad')"
    with pytest.raises(CheckpointError) as caught:
        together(Among([{1: OK, 2: OK}]), "phase", bytes, lambda _: bad())
    assert repr(caught.value.__cause__) == "ValueError('bad')"
    with pytest.raises(CheckpointError) as caught:
        together(Among([{1: failed(ValueError("bad")), 2: OK}]), "phase", bytes)
    assert caught.value.__cause__ is None


def test_a_lost_coordinator_is_told_with_the_failure_of_this_rank() -> None:
    with pytest.raises(RankFailed) as caught:
        together(Among(), "save: plan", bad)
    text = "save: plan: rank 0, which coordinates, is lost. This rank had failed itself: ValueError"
    assert str(caught.value).startswith(text)
    assert repr(caught.value.__cause__) == "ValueError('bad')"
    with pytest.raises(RankFailed) as caught:
        together(Among(), "save: plan", bytes)
    assert str(caught.value) == "save: plan: rank 0, which coordinates, is lost."
    assert isinstance(caught.value.__cause__, RankFailed)


def test_what_is_too_long_to_be_told_fails_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, "1")
    for answer, decision in ((bytes(1 << 20), b""), (b"", bytes(1 << 20))):
        among = Among([{1: OK, 2: OK}])
        with pytest.raises(CheckpointError, match=rf"rank 0: .*{METADATA_VARIABLE}"):
            together(among, "phase", lambda a=answer: a, lambda _, d=decision: d)


@pytest.mark.parametrize("count", [0, 20, 21])
def test_what_was_overwritten_on_all_ranks_is_named(count: int) -> None:
    names = [f"w{number}" for number in range(count)]
    half = count // 2
    told_by = [f'["{name}"]'.encode() for name in names[half:]] or [b"[]"]
    found = dict(enumerate(told_by, start=1))
    among, seen = Among([{1: failed(Corrupt("damaged")), 2: OK}, found]), list[CheckpointError]()
    with pytest.raises(Corrupt) as caught:
        together(among, "load: read", bytes, touched=lambda: names[:half], on_failure=seen.append)
    assert caught.value.overwritten == tuple(names)
    assert seen == [caught.value]
    text = str(caught.value)
    assert ("Destinations already overwritten on some rank: w0, w1" in text) == (count > 0)
    assert text.endswith({0: "damaged", 20: "w18, w19", 21: "w19 and 1 more"}[count])


def test_a_rank_that_is_given_up_is_not_asked_what_it_has_overwritten() -> None:
    among = Among([{1: OK}], {2: "it has given up"}, rank=2)
    with pytest.raises(RankFailed) as caught:
        together(among, "load: read", bytes, touched=lambda: ["w"])
    assert len(among.fatal) == 1
    assert caught.value.overwritten == ()


def test_the_names_of_this_rank_are_told_where_the_coordinator_is_lost_since() -> None:
    among = Among([{1: failed(Corrupt("damaged")), 2: OK}])
    with pytest.raises(Corrupt) as caught:
        together(among, "load: read", bytes, touched=lambda: ["w"])
    assert caught.value.overwritten == ("w",)


def test_a_forked_process_does_not_wait_for_saves_of_its_parent() -> None:
    memory = Solo(12345).memory
    memory["save"] = "under way"
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(len(Solo(12345).memory))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert memory.pop("save") == "under way"
