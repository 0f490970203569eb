"""The benchmark of redistribute counts right and measures everything; its times are not tested."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtckpt.dtensor import Layout, Mesh
from tests.python import run_python
from tools.bench.redistribute.layouts import (
    Held,
    Transition,
    boxes_of,
    lacking,
    numels,
    ordered_transitions,
    transitions,
)
from tools.bench.redistribute.planned import Side
from tools.bench.redistribute.tables import miscounted, summary_grid, wall_grid
from tools.bench.redistribute.wall import BAR, SHARD_TO_SHARD_BAR, Timed

MESHES = ((4,), (2, 3), (2, 2, 2))
SHAPES = ((7, 4), (1, 3), (0, 5), (8, 8))


def held_indices(held: Held, mesh: tuple[int, ...], shape: tuple[int, ...]) -> list[set[int]]:
    """What every rank holds, as positions in the flat tensor, by cutting it with torch."""
    whole = torch.arange(math.prod(shape)).view(*shape)
    found: list[set[int]] = []
    for coordinate in itertools.product(*map(range, mesh)):
        part = whole
        for dim in range(len(shape)):
            for axis in held.cuts(dim):
                pieces = part.chunk(mesh[axis], dim)
                index = coordinate[axis]
                part = pieces[index] if index < len(pieces) else part.narrow(dim, 0, 0)
        found.append(set(part.flatten().tolist()))
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_what_ranks_lack_is_found_by_cutting_a_tensor(mesh: tuple[int, ...]) -> None:
    changes = [*transitions(mesh, 2), *ordered_transitions(mesh, 2)]
    for change, shape in zip(changes[::5], itertools.cycle(SHAPES)):
        old = held_indices(change.source, mesh, shape)
        new = held_indices(change.target, mesh, shape)
        expected = [len(wanted - had) for had, wanted in zip(old, new, strict=True)]
        assert lacking(change.source, change.target, mesh, shape).tolist() == expected, change
        held = numels(boxes_of(change.target, mesh, shape)).tolist()
        assert held == [len(wanted) for wanted in new], change


def test_pairs_are_all_there_and_different() -> None:
    found = transitions((2, 4), 2)
    assert len(found) == len({str(change) for change in found}) == 9 * 8
    assert len(transitions((2, 2), 2, partial=True)) == 9 * 8 + 7 * 9
    ordered = ordered_transitions((2, 4), 2)
    # Two layouts cut one dim along both axes, so that two of eleven have another order.
    assert len(ordered) == len({str(change) for change in ordered}) == 11 * 10 - 9 * 8
    assert {change.target.cuts(0)[:2] == [1, 0] for change in ordered} == {True, False}


def test_shards_that_change_their_dim_are_told_apart() -> None:
    def is_one(source: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
        change = Transition(mesh=(2, 2), source=Held(axes=source), target=Held(axes=target))
        return change.is_shard_to_shard

    assert is_one((0, None), (1, 0))
    assert is_one(("sum", 0), (None, 1))
    assert not is_one((0, None), (None, 0))
    assert not is_one((None, 1), (0, 1))


def test_local_transitions_are_those_that_only_cut() -> None:
    def is_local(source: tuple[Any, ...], target: tuple[Any, ...]) -> bool:
        change = Transition(mesh=(2, 2), source=Held(axes=source), target=Held(axes=target))
        return change.is_local((8, 8))

    assert is_local((None, 1), (0, 1))
    assert not is_local((0, None), (None, None))
    assert not is_local(("sum", 0), (None, 0))


def test_orders_mean_what_the_library_means() -> None:
    held = Held(axes=(0, 0), order=(1, 0))
    layout = Layout(Mesh((2, 4)), held.placements(), (16, 3))
    boxes = boxes_of(held, (2, 4), (16, 3))
    for rank in range(8):
        box = layout.box(layout.mesh.coordinate(rank) or ())
        assert boxes[rank].tolist() == [[a, b] for a, b in zip(box.offsets, box.ends, strict=True)]


def test_a_pair_is_above_if_one_rank_is() -> None:
    side = Side()
    bound, extra = np.array([4, 0]), np.array([-2, 3])
    side.add(bound, np.array([4, 0]), extra, 1)
    assert (side.above, side.ratios, side.extra) == (0, [1.0], 3)
    side.add(bound, np.array([4, 4]), extra - 1, 2)
    assert (side.above, side.ratios, side.extra) == (1, [1.0, 1.0], 3)
    side.add(bound, np.array([4, 6]), extra, 2)
    assert (side.above, side.ratios) == (2, [1.0, 1.0, 1.5])


def timed(change: str, ours: list[float], *, shards: bool = False, told: int = 64) -> Timed:
    return Timed(
        name=change,
        bar=SHARD_TO_SHARD_BAR if shards else BAR,
        mesh=(4,),
        size="small",
        is_shard_to_shard=shards,
        times={"torch": [1.0, 10.0, 2.0], "dtckpt": ours},
        received_bytes=64,
        told_bytes=told,
    )


def test_ratios_are_those_of_single_rounds_and_bars_depend_on_the_kind() -> None:
    shards = timed("[S0] -> [S1]", [0.6, 9.0, 1.2], shards=True)
    assert (shards.ratio, shards.bar) == (0.6, 0.5)
    gather = timed("[S0] -> [R]", [0.6, 9.0, 1.2])
    assert (gather.ratio, gather.bar) == (0.6, 1.0)
    summary = summary_grid([shards, gather]).rows
    assert [(row[1], row[2], row[-1]) for row in summary] == [
        ("all", "2", "pass"),
        ("Shard to Shard", "1", "1 MISS"),
    ]
    rows = wall_grid([shards, gather]).rows
    assert [(row[0], row[-1]) for row in rows] == [
        ("(4,) [S0] -> [R]", "0.60"),
        ("(4,) [S0] -> [S1]", "0.60 MISS"),
    ]


def test_bytes_that_explain_did_not_tell_are_named() -> None:
    right, wrong = timed("[S0] -> [R]", [1.0, 1.0, 1.0]), timed("[P] -> [R]", [1.0] * 3, told=32)
    assert miscounted([right]) == []
    assert miscounted([right, wrong]) == ["(4,) [P] -> [R], small: 64 bytes came, 32 were told"]


def test_a_tiny_run_measures_everything(tmp_path: Path) -> None:
    """It makes the job of its process a fake one, so it gets a process of its own."""
    found, tables = tmp_path / "all.json", tmp_path / "all.md"
    command = ["-m", "tools.bench.redistribute", "--every", "40"]
    command += ["--samples", "40", "--sizes", "small", "--rounds", "1"]
    files = ["--json", str(found), "--markdown", str(tables)]
    run = run_python(*command, *files)
    assert run.returncode == 0, run.stderr
    document = json.loads(found.read_text())
    assert {(link["ranks"], link["num_bytes"]) for link in document["links"]} == {
        (ranks, 4 << 10) for ranks in (2, 4)
    }
    changes = [one["name"] for one in document["timed"]]
    assert len(changes) == len(set(changes)) >= 3
    for one in document["timed"]:
        assert {name: len(times) for name, times in one["times"].items()} == {
            "torch": 1,
            "dtckpt": 1,
        }
        assert one["name"] in tables.read_text()
        if "P" not in one["name"]:
            assert one["received_bytes"] == one["told_bytes"], one["name"]
    assert document["plans"]["cold_median"] > document["plans"]["cached_median"] > 0
    for setting in document["bytes"]:
        assert setting["pairs"] >= setting["moving"], setting["name"]
        assert setting["below"] == setting["needless"] == setting["over_memory"] == 0
        ours = setting["sides"].get("dtckpt", {"above": 0})
        assert ours["above"] == len(setting["whys"])
        assert all(setting["whys"].values())
        for name, side in setting["sides"].items():
            assert side["max"] >= side["mean"] >= 1, (setting["name"], name)
    assert any(s["sides"].get("torch", {}).get("above") for s in document["bytes"])
