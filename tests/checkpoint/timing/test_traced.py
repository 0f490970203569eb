from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtckpt.checkpoint import Costs, Occasion, PhaseCost, Tracing, write_trace
from dtckpt.checkpoint.timing.costs import Span
from dtckpt.checkpoint.timing.traced import read_traces


def costs(rank: int, *, at: float, stall: float = 0.5, url: str = "runs/a/step-1") -> Costs:
    """What a save cost a rank: 1 s of planning and twice 2 s of writing."""
    spans = (
        Span(phase="plan", started_at=at, seconds=1.0),
        Span(phase="write", started_at=at + 1, seconds=2.0 + rank),
        Span(phase="write", started_at=at + 4 + rank, seconds=2.0),
    )
    return Costs(
        kind="save",
        url=url,
        rank=rank,
        host="h",
        num_ranks=2,
        started_at=at,
        seconds=8.0 + rank,
        stall_seconds=stall,
        phases=(PhaseCost(phase="plan", seconds=1.0),),
        spans=spans,
        summary=(),
    )


def test_the_traces_of_a_run_are_calls_of_all_ranks(tmp_path: Path) -> None:
    for rank in (1, 0):
        tracing = Tracing(tmp_path)
        tracing(costs(rank, at=2_000.0, url="runs/a/step-2"), Occasion("save", 2))
        tracing(costs(rank, at=1_000.0, stall=0.25 + rank), Occasion("save", 1))
    first, second = read_traces(tmp_path)
    assert (first.kind, first.step, second.step, second.url) == ("save", 1, 2, "runs/a/step-2")
    assert (first.seconds, first.stall_seconds, first.phases) == (9.0, 1.25, ("plan", "write"))
    assert [rank.rank for rank in first.ranks] == [0, 1]
    assert [rank.phases for rank in first.ranks] == [
        {"plan": 1.0, "write": 4.0},
        {"plan": 1.0, "write": 5.0},
    ]


def test_a_call_that_was_made_again_counts_once(tmp_path: Path) -> None:
    tracing = Tracing(tmp_path)
    tracing(costs(0, at=1_000.0), Occasion("save", 1))
    tracing(costs(0, at=1_020.0, stall=3.0), Occasion("save", 1))
    [call] = read_traces(tmp_path)
    assert call.stall_seconds == 3.0
    assert call.ranks[0].phases == {"plan": 1.0, "write": 4.0}  # not of both


def test_calls_without_steps_are_told_by_their_time(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [costs(0, at=1.0, url="a"), costs(0, at=50.0, url="b")])
    assert [call.ranks[0].phases["write"] for call in read_traces(tmp_path / "t.json")] == [
        4.0,
        4.0,
    ]


EVENT: dict[str, object] = {
    "ph": "X",
    "cat": "save",
    "name": "save",
    "pid": 0,
    "tid": 0,
    "ts": 1,
    "dur": 2,
}
ARGS: dict[str, object] = {"url": "a", "stall_seconds": 1.0}


def trace_of(*events: dict[str, object]) -> str:
    return json.dumps({"traceEvents": list(events)})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "\xff",
        trace_of({}),
        trace_of(EVENT),
        trace_of({"ph": "X", "name": "aten::add", "pid": 3, "tid": 3, "ts": 1, "dur": 2}),
        trace_of(EVENT | {"args": ARGS, "pid": "python"}),
        trace_of(EVENT | {"args": ARGS, "ts": "1"}),
        trace_of(EVENT | {"args": ARGS | {"step": [1]}}),
        trace_of(EVENT | {"args": ARGS | {"url": 3}}),
        trace_of(EVENT | {"args": ARGS | {"stall_seconds": "long"}}),
        trace_of(EVENT | {"args": ARGS}, EVENT | {"tid": 1, "name": ["plan"]}),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, "latin-1")
    with pytest.raises(ValueError, match=r"x\.json: this file is no trace"):
        read_traces(tmp_path)
