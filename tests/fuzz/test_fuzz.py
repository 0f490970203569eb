"""The fuzzer itself: the same programs for a seed, and what is planted is found and made small."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dtckpt.checkpoint.state.collector import paused_collector
from dtckpt.dtensor import Shard, register_sharding
from dtckpt.dtensor.ops.engine.table import RULES

from . import comparison, session
from .comparison import Finding, compare, examine
from .executors import Executor, Helpers, RankHelpers, Trace, run_plain
from .generator import program_of
from .program import Input, Program
from .session import Settings, Worker
from .shrinker import shortest_prefix, shrink

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, for values that programs have


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with paused_collector():
        yield Executor()


def test_program_of_returns_the_same_program_for_a_seed() -> None:
    programs = [program_of(3, number) for number in range(40)]
    assert [program_of(3, number) for number in range(40)] == programs
    assert len({repr(program) for program in programs}) == 40
    assert program_of(4, 0) != programs[0]


def test_a_printed_program_is_python_that_makes_it_again() -> None:
    names = {"Program": Program, "Input": Input, "inf": float("inf"), "nan": float("nan")}
    for number in range(40):
        program = program_of(3, number)
        assert repr(eval(repr(program), names)) == repr(program)


def test_examine_finds_nothing_where_ranks_are_right(executor: Executor) -> None:
    program = Program(
        mesh=(2, 2),
        inputs={
            "a": Input(shape=(5, 3), placements="S(0), P(sum)", grad=True),
            "b": Input(shape=(3,), placements="R, S(0)", strides="stepped"),
            "c": Input(shape=(), dtype="float64"),
        },
        lines=(
            "x = a * s0 + b",
            "y = redistribute(x, 'S(1), S(0)')",
            "c.mul_(s0)",
            "z = whole(y).sum(0)",
            "g = gradients([y], [a])",
        ),
        runs=({"s0": 2}, {"s0": 2.5}),
    )
    verdict = examine(program, executor)
    assert verdict.finding is None, verdict
    assert verdict.refusal is None, verdict


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    """Plant a rule that takes each part of a cumulative sum for one of the whole."""
    op = torch.ops.aten.cumsum.default
    known, by_users = dict(RULES), set(RULES.by_users)

    @register_sharding(op)
    def rule(x: Any, *_: Any, **__: Any) -> Any:
        return [([Shard(dim)], [Shard(dim), None]) for dim in range(len(x.shape))]

    assert callable(rule)
    yield
    RULES.clear()
    RULES.update(known)
    RULES.by_users = by_users


@pytest.mark.usefixtures("wrong_rule")
def test_a_planted_wrong_rule_is_found_and_made_small(executor: Executor) -> None:
    def again(candidate: Program) -> Finding | None:
        return examine(candidate, executor).finding

    for number in range(400):
        program = program_of(1, number, frozenset({"scans"}))
        if not any("cumsum(" in line for line in program.lines):
            continue
        finding = again(program)
        if finding is not None and finding.kind == "value":
            start, finding = shortest_prefix(program, finding, again)
            if re.search(r"= torch.cumsum\(\w+, -?\d\)$", start.lines[-1]):
                break
    else:
        pytest.fail("400 programs of scans do not show it")
    small, found = shrink(start, finding, again, executor, trials=100)
    assert found.kind == "value"
    assert len(small.lines) == 1
    assert "cumsum" in small.lines[0]
    assert len(small.inputs) == 1
    assert small.mesh == (2,)
    assert small.runs == ({},)


def test_a_rank_that_others_wait_for_is_a_finding(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(self: RankHelpers, x: Any) -> Any:
        return x.full_tensor() if self.mesh.get_rank() == 0 else x.to_local()

    monkeypatch.setattr(RankHelpers, "whole", alone)
    program = Program(inputs={"a": Input(shape=(4,), placements="S(0)")}, lines=("b = whole(a)",))
    finding = examine(program, executor).finding
    assert finding is not None
    assert (finding.kind, finding.line) == ("hang", 0)


def test_a_rank_that_raises_alone_is_a_finding(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(self: RankHelpers, x: Any) -> Any:
        if self.mesh.get_rank() == 1:
            raise ValueError("only here")
        return x

    monkeypatch.setattr(RankHelpers, "rewrap", alone)
    program = Program(inputs={"a": Input(shape=(4,), placements="S(0)")}, lines=("b = rewrap(a)",))
    finding = examine(program, executor).finding
    assert finding is not None
    assert finding.kind == "ranks differ"


def test_an_error_of_one_device_that_ranks_lack_is_a_finding(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Helpers, x: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(Helpers, "rewrap", refused)
    program = Program(inputs={"a": Input(shape=(4,), placements="S(0)")}, lines=("b = rewrap(a)",))
    finding = examine(program, executor).finding
    assert finding is not None
    assert finding.kind == "no error"


def test_a_write_beside_a_part_is_a_finding(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beyond(self: RankHelpers, x: Any) -> Any:
        local = x.to_local()
        local.as_strided((local.numel() * 2 - 1,), (1,)).fill_(1)
        return x

    def filled(self: Helpers, x: Any) -> Any:
        return x.fill_(1)

    monkeypatch.setattr(Helpers, "rewrap", filled)
    monkeypatch.setattr(RankHelpers, "rewrap", beyond)
    given = Input(shape=(6,), placements="S(0)", strides="stepped")
    finding = examine(Program(inputs={"a": given}, lines=("rewrap(a)",)), executor).finding
    assert finding is not None
    assert finding.kind == "memory"


def test_a_worker_that_stands_still_is_a_finding_and_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(command)
        code = "import time; print('{\"at\": 7}', flush=True); time.sleep(60)"
        return _popen([sys.executable, "-c", code], **options)

    _popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(session, "STUCK_SECONDS", -1)
    events: queue.Queue[Any] = queue.Queue()
    worker = Worker(0, Settings(seed=3), 0, events)
    job, entry = events.get(timeout=30)
    assert entry == {"at": 7}
    worker.at = 7
    worker.look(until=float("inf"))
    worker.stop()
    job, entry = events.get(timeout=30)
    assert (job, entry["ran"], entry["found"]["kind"]) == (0, 7, "stuck")
    assert entry["found"]["program"] == repr(program_of(3, 7))
    assert started[1][started[1].index("--start") + 1] == "8"


def test_terms_times_infinite_elements_are_no_finding_and_finite_ones_are(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(
        inputs={
            "a": Input(shape=(2,), placements="P(sum)"),
            "b": Input(shape=(6,), placements="R", values="special"),
        },
        lines=("x = torch.outer(a, b)",),
    )
    expected = run_plain(program, {})
    seen = [trace.env["x"] for trace in executor.run(program)[0]]
    assert compare(seen, expected.env["x"], 1e-6) is not None
    assert examine(program, executor).finding is None
    values = expected.env["x"]
    values[values == 0] = 1

    def changed(*_: object) -> Trace:
        return expected

    monkeypatch.setattr(comparison, "run_plain", changed)
    finding = examine(program, executor).finding
    assert finding is not None
    assert finding.kind == "value"
