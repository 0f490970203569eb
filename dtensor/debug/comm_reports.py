"""A recording as a table, as JSON, and over time as Chrome's trace viewer reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .module_tracker import GLOBAL, PHASES, ModuleInfo, Phase, with_parents
from .recording import Recording, SeenCollective, SeenOperator

_PHASE_KEYS: dict[Phase, tuple[str, str]] = {
    "forward": ("collectives_forward", "operations_forward"),
    "backward": ("collectives_backward", "operations_backward"),
    "recomputation": ("collectives_checkpointing", "operations_checkpointing"),
}


@dataclass(slots=True)
class _Row:
    """What happened in a module and its parts, in one phase."""

    collectives: list[SeenCollective] = field(default_factory=list[SeenCollective])
    operators: list[SeenOperator] = field(default_factory=list[SeenOperator])
    """Those of the module itself: a part's are listed with the part."""


def is_wanted(seen: SeenOperator, noise_level: int) -> bool:
    """Whether an operator is listed at a noise level."""
    if noise_level == 3:
        return True
    return not seen.is_trivial and (seen.is_distributed or noise_level == 2) and noise_level > 0


def _rows(recording: Recording, noise_level: int) -> dict[str, dict[Phase, _Row]]:
    """Return what happened by module, the whole before its parts, and phase."""
    rows: dict[str, dict[Phase, _Row]] = {
        name: {phase: _Row() for phase in PHASES} for name in (GLOBAL, *recording.tracker.modules)
    }
    for seen in list(recording.collectives):
        for name in with_parents(seen.place.module):
            rows[name][seen.place.phase].collectives.append(seen)
    for operator in recording.operators:
        if is_wanted(operator, noise_level):
            rows[operator.place.module][operator.place.phase].operators.append(operator)
    return rows


def table(recording: Recording, noise_level: int) -> str:
    """Return a text with a paragraph for every module."""
    lines: list[str] = []
    for name, phases in _rows(recording, noise_level).items():
        info = recording.tracker.modules.get(name)
        indent = "  " * (0 if info is None else 1 + name.count("."))
        body = [
            f"{indent}  {line}"
            for phase, row in phases.items()
            for line in _phase_lines(recording, phase, row, noise_level)
        ]
        if info is None:
            lines += [name, *body]
            continue
        facts = _parameter_lines(info) if noise_level else []
        lines += [f"{indent}{name} ({info.kind})", *(f"{indent}  {f}" for f in facts), *body]
    if recording.num_forgotten:
        lines.append(f"and {recording.num_forgotten:,} calls of operators more")
    return "\n".join(lines)


def _parameter_lines(info: ModuleInfo) -> Iterator[str]:
    for last, parameter in info.parameters.items():
        placements = getattr(parameter, "placements", None)
        shown = "plain" if placements is None else f"({', '.join(map(str, placements))})"
        yield f"parameter {last}: {list(parameter.shape)} {shown}"


def _phase_lines(recording: Recording, phase: Phase, row: _Row, noise_level: int) -> Iterator[str]:
    if not row.collectives and not row.operators:
        return
    yield phase
    by_kind: dict[tuple[str, str], list[SeenCollective]] = {}
    for seen in row.collectives:
        site = seen.site if noise_level else ""
        by_kind.setdefault((seen.collective.kind, site), []).append(seen)
    for (kind, site), group in sorted(by_kind.items()):
        where = f"  at {site}" if site else ""
        yield f"  {_sums(recording, kind, group)}{where}"
    calls = Counter((o.name, o.inputs) for o in row.operators)
    for (name, inputs), count in calls.items():
        times = f"{count} x " if count > 1 else ""
        yield f"  {times}{name}({', '.join(inputs)})"


def _sums(recording: Recording, kind: str, group: list[SeenCollective]) -> str:
    sent = sum(seen.collective.sent_bytes for seen in group)
    received = sum(seen.collective.received_bytes for seen in group)
    seconds = sum(recording.seconds(seen) or 0.0 for seen in group)
    return (
        f"{kind}: {len(group):,}, {sent:,} bytes sent, {received:,} bytes received, "
        f"{seconds * 1e3:.3f} ms"
    )


def json_report(recording: Recording, noise_level: int) -> dict[str, Any]:
    """Return a tree of modules: collectives with those of parts, operators without them."""
    rows = _rows(recording, noise_level)
    nodes: dict[str, dict[str, Any]] = {}
    for name, phases in rows.items():
        info = recording.tracker.modules.get(name)
        node: dict[str, Any] = {
            "fqn": name,
            "module_type": "" if info is None else info.kind,
            "parameters": [] if info is None or not noise_level else list(_parameters(info)),
        }
        for phase, row in phases.items():
            collectives, operations = _PHASE_KEYS[phase]
            node[collectives] = list(_collective_entries(recording, row.collectives))
            node[operations] = [_operator_entry(o) for o in row.operators]
        node["children"] = []
        nodes[name] = node
        if info is not None:
            parent = next(p for p in list(with_parents(name))[1:] if p in nodes)
            nodes[parent]["children"].append(node)
    return nodes[GLOBAL] | {"operations_not_remembered": recording.num_forgotten}


def _parameters(info: ModuleInfo) -> Iterator[dict[str, Any]]:
    for last, parameter in info.parameters.items():
        placements = getattr(parameter, "placements", None)
        yield {
            "name": last,
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype),
            "placements": None if placements is None else [str(p) for p in placements],
        }


def _collective_entries(
    recording: Recording, seen: Iterable[SeenCollective]
) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[SeenCollective]] = {}
    for one in seen:
        c = one.collective
        groups.setdefault((c.kind, c.reduce_op, c.ranks, one.site), []).append(one)
    for (kind, reduce_op, ranks, site), group in groups.items():
        yield {
            "kind": kind,
            "reduce_op": reduce_op,
            "ranks": list(ranks),
            "call_site": site,
            "count": len(group),
            "sent_bytes": sum(one.collective.sent_bytes for one in group),
            "received_bytes": sum(one.collective.received_bytes for one in group),
            "seconds": sum(recording.seconds(one) or 0.0 for one in group),
        }


def _operator_entry(seen: SeenOperator) -> dict[str, Any]:
    return {"name": seen.name, "inputs": list(seen.inputs), "seconds": seen.seconds}


def chrome_trace(recording: Recording, rank: int) -> dict[str, Any]:
    """Return the events of the recording, in microseconds from its start."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "collectives"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "operators"}},
    ]
    for seen in list(recording.collectives):
        c = seen.collective
        args = {
            "module": seen.place.module,
            "phase": seen.place.phase,
            "ranks": list(c.ranks),
            "reduce_op": c.reduce_op,
            "sent_bytes": c.sent_bytes,
            "received_bytes": c.received_bytes,
            "call_site": seen.site,
        }
        seconds = recording.seconds(seen) or 0.0
        events.append(_event(c.kind, rank, 0, c.started - recording.started, seconds, args))
    for operator in recording.operators:
        args = {
            "module": operator.place.module,
            "phase": operator.place.phase,
            "inputs": list(operator.inputs),
        }
        start = operator.started - recording.started
        events.append(_event(operator.name, rank, 1, start, operator.seconds, args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    name: str, rank: int, line: int, start: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "pid": rank,
        "tid": line,
        "args": args,
    }
