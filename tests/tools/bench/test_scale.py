"""The simulation of planning at scale agrees with what ranks would do; its speed is not tested."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtckpt.checkpoint.saving.merging import merge_tensors
from dtckpt.checkpoint.saving.outlines import Outline, Speakers, Told
from dtckpt.checkpoint.saving.writers import assign_writers
from tools.bench.scale.__main__ import main, missed
from tools.bench.scale.jobs import JOBS, transformer
from tools.bench.scale.plan import Scale, simulate

RANKS, TENSORS = 64, 60


def scales() -> list[Scale]:
    weights = transformer(TENSORS // 3)
    return [simulate(save(RANKS, weights), load(RANKS, weights)) for save, load in JOBS]


def test_a_small_simulation_finds_plausible_plans() -> None:
    for scale in scales():
        assert (scale.ranks, scale.tensors) == (RANKS, TENSORS)
        assert scale.busiest >= 0.999
        assert scale.forced >= 1
        assert 1 <= scale.load_files <= RANKS
        assert scale.load_ranges >= TENSORS, "every tensor has a part for every rank"
        assert 0 < scale.manifest_bytes < 1 << 20
        assert scale.sent_bytes > 0
        assert (scale.told_bytes > 0) == (
            "PP" in scale.job or "joined" in scale.job or "sib" in scale.job
        )
        assert scale.coordinator_bytes > scale.manifest_bytes


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_what_ranks_are_said_to_say_is_what_they_say(number: int) -> None:
    job = JOBS[number][0](RANKS, transformer(TENSORS // 3))
    for stage in job.stages:
        assert all(Outline.of(job.describe(rank)) == told for rank, told in stage.outlines())


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_all_ranks_together_write_every_byte_once(number: int) -> None:
    job = JOBS[number][0](RANKS, transformer(TENSORS // 3))
    outlines = {rank: told for stage in job.stages for rank, told in stage.outlines()}
    speakers = Speakers.of({rank: outline.prints() for rank, outline in outlines.items()})
    told = Told.joined(speakers.told_by(rank, outline) for rank, outline in outlines.items())
    for tensor in assign_writers(merge_tensors(speakers.reports(told))):
        boxes = [box for rank in range(RANKS) for box in tensor.chunks_of(rank)]
        assert len(set(boxes)) == len(boxes)
        assert sum(box.numel for box in boxes) * tensor.dtype.itemsize == tensor.num_bytes


def test_the_command_prints_and_writes_all_jobs(tmp_path: Path) -> None:
    files = {"--json": tmp_path / "all.json", "--markdown": tmp_path / "all.md"}
    arguments = [str(part) for pair in files.items() for part in pair]
    arguments += ["--ranks", str(RANKS), "--tensors", str(TENSORS)]
    run = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    rows = json.loads(files["--json"].read_text())["rows"]
    assert [row["ranks"] for row in rows] == [RANKS] * len(JOBS)
    assert all(row["job"] in files["--markdown"].read_text() for row in rows)


@pytest.mark.parametrize("ranks", ["63", "0", "many"])
def test_numbers_of_ranks_that_no_job_has_are_refused(ranks: str) -> None:
    assert CliRunner().invoke(main, ["--ranks", ranks]).exit_code == 2


def test_missed_bars_are_named() -> None:
    good = replace(scales()[0], plan_seconds=0.5, manifest_bytes=1 << 20, busiest=1.3, forced=1.25)
    assert missed(good) == []
    assert len(missed(replace(good, plan_seconds=1.5))) == 1
    assert missed(replace(good, sent_bytes=1 << 30)) == ["one rank sends over 32.0 MiB"]
    assert len(missed(replace(good, manifest_bytes=5 << 20, busiest=1.5))) == 2
