"""The benchmarks run and tell everything; how fast anything is, is not tested."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import DeviceMesh

from tools.bench.__main__ import main
from tools.bench.frame.contest import Contestant, compete, prepare
from tools.bench.frame.report import Result, grids
from tools.bench.frame.row import Bar, Column, Outcome, Row
from tools.bench.frame.team import Team
from tools.bench.peers.base import Missing
from tools.bench.peers.torch_checkpointing import TorchCheckpointing
from tools.bench.rows import ROWS
from tools.bench.state import ShardedState, transformer

OPTIONAL = {"torch_checkpointing", "raw O_DIRECT", "raw obstore", "dtckpt, s3fs"}
"""A package that may not be installed; what not all file systems can do."""


def test_a_tiny_run_measures_every_row(tmp_path: Path) -> None:
    files = {"--json": tmp_path / "all.json", "--markdown": tmp_path / "all.md"}
    work = tmp_path / "work"
    arguments = ["--size", "1MiB", "--ranks", "1", "--rounds", "1", "--tensors", "20"]
    arguments += ["--dir", str(work), *(str(part) for pair in files.items() for part in pair)]
    run = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    found = json.loads(files["--json"].read_text())
    assert list(found["rows"]) == [row.name for row in ROWS]
    assert found["machine"]["cores"] > 0
    for row in ROWS:
        check_row(row, found["rows"][row.name])
        assert f"**{row.title}**" in files["--markdown"].read_text()
    assert not list(work.iterdir()), "checkpoints are removed"


def check_row(row: Row, found: dict[str, Any]) -> None:
    assert set(row.systems) == set(found["medians"]) | set(found["skipped"])
    assert set(found["skipped"]) <= OPTIONAL, found["skipped"]
    for system, medians in found["medians"].items():
        for column in row.columns:
            may_be_0 = column.kind == "bytes" or column.metric == "lost_seconds"
            value = medians[column.metric]
            assert may_be_0 or value > 0, (row.name, system, column.metric, value)
    for bar in found["bars"]:
        assert bar["holds"] == (bar["measured"] <= bar["limit"])


def test_unknown_rows_and_sizes_are_refused() -> None:
    run = CliRunner().invoke(main, ["--only", "save,nothing"])
    assert run.exit_code == 2
    assert "nothing" in run.output
    assert CliRunner().invoke(main, ["--size", "much"]).exit_code == 2


class Alone:
    """A team of one rank without processes."""

    rank = 0
    size = 1

    def barrier(self) -> None: ...

    def say(self, text: str) -> None: ...

    def gather(self, value: object) -> list[object]:
        return [value]


TEAM = cast(Team, Alone())


def test_systems_take_turns_and_go_first_in_turn() -> None:
    calls: list[str] = []
    contestants = [
        Contestant(name=name, call=lambda name=name: calls.append(name)) for name in "abc"
    ]
    outcome = compete(TEAM, contestants, 3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(v["seconds"]) for name, v in outcome.values.items()} == dict.fromkeys(
        "abc", 3
    )


def test_slow_systems_may_run_fewer_rounds() -> None:
    contestants = [
        Contestant(name="slow", call=lambda: None, max_rounds=1),
        Contestant(name="fast", call=lambda: None),
    ]
    values = compete(TEAM, contestants, 3, warm_up=False).values
    assert len(values["slow"]["seconds"]) == 1
    assert len(values["fast"]["seconds"]) == 3


def test_a_system_that_fails_is_left_out_by_name() -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the disk is on fire")

    contestants = [
        Contestant(name="bad", call=fail),
        Contestant(name="good", call=lambda: None),
        Contestant(name="absent", call=fail),
    ]
    outcome = compete(TEAM, contestants, 3, skipped={"absent": "not installed"})
    assert outcome.skipped["bad"] == "failed on rank 0: OSError: the disk is on fire"
    assert outcome.skipped["absent"] == "not installed"
    assert calls == 2
    assert set(outcome.values) == {"good"}
    calls = 1
    assert set(prepare(TEAM, {"bad": fail, "good": lambda: None})) == {"bad"}


def test_a_peer_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_checkpointing", None)
    with pytest.raises(Missing, match="not installed"):
        TorchCheckpointing()


@pytest.mark.parametrize(
    ("bar", "measured"),
    [
        (Bar(metric="seconds", limit=1.0, against="raw"), 1.5),
        (Bar(metric="seconds", limit=1.0), 3.0),
        (Bar(metric="seconds", limit=1.0, against="absent"), None),
        (Bar(metric="absent", limit=1.0), None),
    ],
)
def test_bars_compare_medians(bar: Bar, measured: float | None) -> None:
    values = {"dtckpt": {"seconds": [9.0, 3.0, 1.0]}, "raw": {"seconds": [2.0]}}
    assert bar.measure(values) == measured


def test_markdown_names_what_was_left_out() -> None:
    row = Row(
        name="row",
        title="A row",
        what="",
        columns=(Column(metric="seconds", heading="time"),),
        bars=(Bar(metric="seconds", limit=1.0, against="raw"),),
        systems=("dtckpt", "raw", "absent"),
        run=lambda team, setting: Outcome(),
    )
    values = {"dtckpt": {"seconds": [3.0]}, "raw": {"seconds": [2.0]}}
    outcome = Outcome(values=values, skipped={"absent": "not installed"})
    text = "".join(table.markdown() for table in grids([Result(row=row, outcome=outcome)]))
    assert "| dtckpt | 3.000 s |" in text
    assert "| absent | not installed |" in text
    assert "| row | time / raw | 1.50 | 1.00 | MISS |" in text


@pytest.fixture
def mesh() -> Generator[DeviceMesh]:
    store: Any = dist
    dist.init_process_group("gloo", store=store.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_states_have_their_size_and_tell_wrong_values(mesh: DeviceMesh) -> None:
    state = ShardedState(mesh, transformer(4 << 20, 2), 0, fill=True)
    assert 0.7 * (4 << 20) < state.global_bytes <= 4 << 20
    state.check()
    for tensor in list(state.locals.values())[::7]:
        kept = tensor.reshape(-1)[-1].clone()
        tensor.reshape(-1)[-1] += 1
        with pytest.raises(ValueError, match="other values"):
            state.check()
        tensor.reshape(-1)[-1] = kept
    state.check()
    rows = ShardedState(mesh, transformer(4 << 20, 2), 1, fill=True)
    assert all(torch.equal(a, rows.locals[name]) for name, a in state.locals.items())
    state.clear()
    with pytest.raises(ValueError, match="other values"):
        state.check()
