"""Who is told of costs: callbacks of a manager, traces, OpenTelemetry."""

from __future__ import annotations

import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import Costs, Occasion, OpenTelemetry, PhaseCost, Tracing, write_trace
from dtckpt.checkpoint.timing.costs import PHASES, Span

from ...ranks import run_ranks

START = 1_700_000_000.0


def costs(rank: int = 0, *, kind: Any = "save", phase: str = "write", at: float = START) -> Costs:
    return Costs(
        kind=kind,
        url="runs/a/step-1",
        rank=rank,
        host=f"host-{rank}",
        num_ranks=2,
        started_at=at,
        seconds=3.0,
        stall_seconds=0.5,
        phases=(PhaseCost(phase=phase, seconds=2.0, waited_seconds=0.5, num_bytes=4000),),
        spans=(Span(phase=phase, started_at=at + 0.25, seconds=2.5, num_bytes=4000),),
        summary=(),
    )


def state(step: int = 0) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_manager_tells_on_every_rank_what_saves_and_restores_cost(
    in_background: bool, tmp_path: Path
) -> None:
    def body(rank: int, group: Any) -> list[tuple[Costs, Occasion, str]]:
        told: list[tuple[Costs, Occasion, str]] = []

        def on_cost(costs: Costs, occasion: Occasion) -> None:
            told.append((costs, occasion, threading.current_thread().name))

        with ckpt.CheckpointManager(
            tmp_path, process_group=group, in_background=in_background, on_cost=on_cost
        ) as manager:
            for step in (1, 2):
                assert manager.save(step, state(step))
            manager.wait()
            manager.restore(state())
        return told

    for rank, told in enumerate(run_ranks(2, body)):
        occasions = [occasion for _, occasion, _ in told]
        assert occasions == [Occasion("save", 1), Occasion("save", 2), Occasion("restore", 2)]
        assert [one.rank for one, _, _ in told] == [rank] * 3
        assert [one.kind for one, _, _ in told] == ["save", "save", "load"]
        assert [one.url.endswith("step-2") for one, _, _ in told] == [False, True, True]
        assert (told[0][2] == "dtckpt-save") == in_background


@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_callback_raises_is_logged_and_no_more(
    in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def on_cost(costs: Costs, occasion: Occasion) -> None:
        raise RuntimeError(f"no metrics server for {occasion.kind}")

    with ckpt.CheckpointManager(tmp_path, in_background=in_background, on_cost=on_cost) as manager:
        assert manager.save(1, state(1))
        manager.wait()
        assert manager.restore(state()).url.endswith("step-1")
        assert not manager.failures
    logged = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert [r.getMessage() for r in logged] == [
        "on_cost failed at the save of step 1",
        "on_cost failed at the restore of step 1",
    ]
    assert all("no metrics server" in str(r.exc_info) for r in logged)


def test_a_save_that_fails_has_no_costs(tmp_path: Path) -> None:
    told: list[Occasion] = []
    with ckpt.CheckpointManager(
        tmp_path, on_cost=lambda _, occasion: told.append(occasion)
    ) as manager:
        with pytest.raises(ckpt.Unsavable):
            manager.save(1, {"lock": threading.Lock()})
        assert manager.save(2, state(2))
    assert told == [Occasion("save", 2)]


def checked(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace that keeps the rules of the format, by the order of their time.

    The format asks for a JSON object with ``traceEvents``; of each event ``ph``, ``name``, ``pid``
    and ``tid``; of complete events ``ts`` and ``dur`` in microseconds, and on one lane they must
    nest; of metadata one of a few names, with its own argument.
    """
    found = json.loads(path.read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            kind, _, argument = event["name"].partition("_")
            assert kind in ("process", "thread")
            assert set(event["args"]) == {argument}
            assert isinstance(event["args"][argument], str if argument == "name" else int)
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert type(event["ts"]) is int
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort(key=lambda span: (span[0], -span[1]))
        for (_, end), (start, later_end) in pairwise(lane):
            assert start >= end or later_end <= end
    return found["traceEvents"]


def test_a_trace_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an older one")
    write_trace(path, [costs(0), costs(1), costs(1, kind="load", phase="read", at=START + 9)])
    events = checked(path)
    whole = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"]) for e in whole] == [
        ("save", 0),
        ("write", 0),
        ("save", 1),
        ("write", 1),
        ("load", 1),
        ("read", 1),
    ]
    assert (whole[1]["ts"], whole[1]["dur"]) == (int((START + 0.25) * 1e6), 2_500_000)
    assert whole[1]["args"] == {"bytes": 4000}
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["rank 0 (host-0)", "rank 1 (host-1)"]
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_of_nothing_is_one(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [])
    assert checked(tmp_path / "trace.json") == []


def test_every_phase_has_a_lane_of_its_own(tmp_path: Path) -> None:
    write_trace(
        tmp_path / "trace.json",
        [costs(kind=kind, phase=phase) for kind in ("save", "load") for phase in PHASES[kind]],
    )
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X" and event["tid"]:
            assert lanes[event["tid"]] == event["name"]
    assert len(set(lanes.values())) == len(lanes)


def test_tracing_is_whole_after_every_event_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "rank-00000.json"
    number, events = 0, list[dict[str, Any]]()
    for _ in range(3):  # as many processes, one after the other
        tracing = Tracing(tmp_path / "traces")
        for _ in range(3):
            number += 1
            tracing(costs(at=START + 10 * number), Occasion("save", number))
            events = checked(path)
            whole = [e["args"]["step"] for e in events if e["name"].startswith("save ")]
            assert whole == list(range(1, number + 1))
    assert len([e for e in events if e["name"] == "process_name"]) == 1


def test_tracing_leaves_alone_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.json"
    path.write_text('{"what": "else"}')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rank-00000\.json: this file is no trace"):
            Tracing(tmp_path)(costs(), Occasion("save", 1))
    assert path.read_text() == '{"what": "else"}'


def test_a_run_is_traced(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path / "run", on_cost=Tracing(tmp_path / "traces")) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()
        manager.restore(state())
    events = [e for e in checked(tmp_path / "traces/rank-00000.json") if e["ph"] == "X"]
    assert [e["name"] for e in events if not e["tid"]] == ["save 1", "save 2", "restore 2"]
    first = next(e for e in events if e["name"] == "save 1")
    within = [e for e in events if e["args"].get("step") == 1 and e["tid"]]
    assert {e["name"] for e in within} == {"queue", "plan", "stage", "write", "commit"}
    for event in within:
        assert first["ts"] - 1 <= event["ts"]
        assert event["ts"] + event["dur"] <= first["ts"] + first["dur"] + 1


def test_opentelemetry_gets_spans_and_metrics(tmp_path: Path) -> None:
    sdk: Any = pytest.importorskip("opentelemetry.sdk.trace")
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
    metrics: Any = pytest.importorskip("opentelemetry.sdk.metrics")
    metrics_export: Any = pytest.importorskip("opentelemetry.sdk.metrics.export")
    exporter, reader = memory.InMemorySpanExporter(), metrics_export.InMemoryMetricReader()
    tracer_provider = sdk.TracerProvider(shutdown_on_exit=False)
    tracer_provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    meter_provider = metrics.MeterProvider([reader], shutdown_on_exit=False)
    told: list[Costs] = []
    telemetry = OpenTelemetry(tracer_provider, meter_provider)

    def on_cost(costs: Costs, occasion: Occasion) -> None:
        told.append(costs)
        telemetry(costs, occasion)

    with ckpt.CheckpointManager(tmp_path, on_cost=on_cost) as manager:
        manager.save(7, state(7))
        manager.wait()
        manager.restore(state())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = {f"dtckpt.save.{phase.phase}" for phase in told[0].phases}
    names |= {f"dtckpt.restore.{phase.phase}" for phase in told[1].phases}
    assert set(spans) == {"dtckpt.save", "dtckpt.restore", *names}
    whole, write = spans["dtckpt.save"], spans["dtckpt.save.write"]
    assert whole.parent is None
    assert write.parent.span_id == whole.context.span_id
    assert whole.attributes["dtckpt.step"] == 7
    assert write.attributes["dtckpt.bytes"] == told[0].phase("write").num_bytes
    assert whole.end_time - whole.start_time == pytest.approx(told[0].seconds * 1e9, rel=0.01)
    assert whole.start_time - 1000 <= write.start_time <= write.end_time <= whole.end_time + 1000
    found = {
        (metric.name, *sorted(point.attributes.values())): point
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert found["dtckpt.stall", "save"].sum == pytest.approx(told[0].stall_seconds)
    assert found["dtckpt.phase.io", "save", "write"].value == told[0].phase("write").num_bytes
    assert found["dtckpt.phase.duration", "read", "restore"].count == 1
    meter_provider.shutdown()
    tracer_provider.shutdown()


def test_where_opentelemetry_is_missing_its_installation_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.trace", None)
    with pytest.raises(ImportError, match=r'pip install "dtckpt\[otel\]"'):
        OpenTelemetry()
