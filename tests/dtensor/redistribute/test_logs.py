"""``DTCKPT_LOGS`` and what the loggers say."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, Replicate, Shard
from dtckpt.dtensor.redistribute.logs import logs_redistributes
from dtckpt.logs import levels_of, logger_of

from ...python import run_python
from ..rank_meshes import run_on_mesh, scattered


@torch.library.custom_op("dtckpt_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody has a rule for."""
    return x * 2


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == f"dtckpt.{name}"]


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("dtensor", {"dtensor": logging.INFO}),
        ("+dtensor,redistribute", {"dtensor": logging.DEBUG, "redistribute": logging.INFO}),
        (" -checkpoint , +redistribute,", {"checkpoint": logging.WARNING, "redistribute": 10}),
    ],
)
def test_prefixes_are_levels(text: str, levels: dict[str, int]) -> None:
    assert levels_of(text) == levels


@pytest.mark.parametrize("text", ["dtensr", "+", "dtensor,++checkpoint", "all"])
def test_unknown_names_say_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"DTCKPT_LOGS.*checkpoint: .*dtensor: .*redistribute: "):
        levels_of(text)


def test_saves_and_loads_tell_bytes_of_every_rank(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def body(mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        whole = torch.arange(1000.0)
        state = {
            "sharded": scattered(whole, mesh, [Shard(0)]),
            "replicated": scattered(whole, mesh, [Replicate()]),
        }
        dcp.save(state, tmp_path / "c", process_group=group)
        dcp.load(state, tmp_path / "c", process_group=group)

    with caplog.at_level(logging.INFO, "dtckpt.checkpoint"):
        run_on_mesh((2,), body)
    texts = logged(caplog, "checkpoint")
    for rank in (0, 1):
        (saved,) = [text for text in texts if f"/c: rank {rank} wrote" in text]
        assert "it holds 6000, " in saved
        assert "2 tensors of 8000 bytes in all" in saved
        (loaded,) = [text for text in texts if f"/c: rank {rank} filled" in text]
        assert "filled 6000 bytes of 2 tensors in 0." in loaded
        assert "it read " in loaded
    stored = [int(t.split("stores ")[1].split()[0]) for t in texts if "stores " in t]
    assert sum(stored) == 8000
    ratios = [float(t.split("dedup ratio ")[1].split(")")[0]) for t in texts if "stores " in t]
    assert ratios == [pytest.approx(6000 / n, abs=0.005) for n in stored]


def test_incremental_saves_tell_what_the_base_has(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    state = {"a": torch.ones(1000)}
    dcp.save(state, tmp_path / "base")
    with caplog.at_level(logging.INFO, "dtckpt.checkpoint"):
        dcp.save(state, tmp_path / "next", base=tmp_path / "base")
    (text,) = logged(caplog, "checkpoint")
    assert "stores 0 of them (dedup ratio infinite) and finds 4000 in the base" in text


def test_a_redistribute_tells_layouts_bytes_steps_and_at_debug_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(mesh: DeviceMesh) -> None:
        source = scattered(torch.ones(8, 4), mesh, [Shard(0)])
        for _ in range(2):
            source.redistribute(placements=[Replicate()])

    for level, has_line in ((logging.INFO, False), (logging.DEBUG, True)):
        caplog.clear()
        with caplog.at_level(level, "dtckpt.redistribute"):
            run_on_mesh((4,), body)
        texts = logged(caplog, "redistribute")
        assert len(texts) == 8
        for text in texts:
            assert text.startswith("torch.float32 [8, 4] (S(0)) on axis0=4 -> (R): ")
            assert "96 bytes received, 96 sent; " in text
            assert ("test_logs.py:" in text) == has_line


def test_redistributes_within_operators_are_told_of_quick_calls_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(mesh: DeviceMesh) -> int:
        left = scattered(torch.ones(4, 4), mesh, [Shard(0)])
        right = scattered(torch.ones(4, 4), mesh, [Shard(1)])
        for _ in range(3):
            left.add(right)
        return len(mesh.quick_calls)

    with caplog.at_level(logging.INFO, "dtckpt.redistribute"):
        assert logs_redistributes()
        assert run_on_mesh((2,), body) == [1, 1]
    assert len(logged(caplog, "redistribute")) == 6


def test_operators_tell_plans_and_fallbacks(caplog: pytest.LogCaptureFixture) -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.rand(4, 4) + torch.eye(4), mesh, [Shard(0)])
        for _ in range(2):
            tensor.relu()
        with pytest.warns(UserWarning, match="no sharding rule"):
            twice(tensor)

    with caplog.at_level(logging.DEBUG, "dtckpt.dtensor"):
        run_on_mesh((1,), body)
    texts = logged(caplog, "dtensor")
    (made,) = [text for text in texts if text.startswith("aten.relu.default")]
    assert made.endswith("redistributing nothing")
    (whole,) = [text for text in texts if "gathered and run whole" in text]
    assert whole.startswith("dtckpt_test.twice.default(")
    assert "test_logs.py:" in whole


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.rand(4, 4), mesh, [Shard(0)])
        (tensor + 1).full_tensor()

    run_on_mesh((2,), body)
    assert not [record for record in caplog.records if record.name.startswith("dtckpt")]
    assert not logs_redistributes()


PROGRAM = """
import logging, sys, tempfile, torch
import dtckpt.checkpoint as dcp
from dtckpt.dtensor.redistribute.logs import logs_redistributes
dcp.save({"w": torch.ones(4)}, tempfile.mkdtemp() + "/c")
print(logs_redistributes(), logging.getLogger("dtckpt.dtensor").level)
logging.basicConfig(stream=sys.stdout, format="mine %(message)s", force=True)
dcp.save({"w": torch.ones(4)}, tempfile.mkdtemp() + "/d")
"""


def program(logs: str) -> Any:
    return run_python("-c", PROGRAM, env={**os.environ, "DTCKPT_LOGS": logs})


def test_environment_shows_messages_once() -> None:
    run = program("-dtensor,redistribute,+checkpoint")
    out, err = run.stdout.splitlines(), run.stderr.splitlines()
    assert out[0] == "True 30", run
    assert [line for line in err if "saved" in line and "/c: rank 0 wrote" in line] == err
    assert " dtckpt.checkpoint INFO: saved" in err[0]
    assert [line.startswith("mine saved") for line in out[1:]] == [True]


def test_environment_with_a_wrong_name_is_an_error() -> None:
    run = program("chekpoint")
    assert run.returncode != 0
    assert "there is no 'chekpoint' to be logged" in run.stderr
    assert logger_of("checkpoint").level == logging.NOTSET
