"""What a load is said to cost, beside what loads cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import LoadCosts, load_costs, parse_rules, with_layouts
from dtckpt.checkpoint.reading import limits
from dtckpt.dtensor import Layout, Mesh
from dtckpt.errors import LayoutMismatch

MESH = Mesh((2, 2), ("dp", "tp"))
RULES = parse_rules("w=R,S(1); v=S(0),R")
SHAPES = {"w": (512, 2048), "v": (1001, 7)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    dcp.save(state | {"own": dcp.PerRank({"x": torch.ones(3)})}, tmp_path / "one")
    dcp.reshard(tmp_path / "one", tmp_path / "saved", Mesh((8,)), parse_rules("?=S(0)"))
    return tmp_path / "saved"


def cost_of(costs: LoadCosts, rank: int) -> dcp.RankCost:
    [found] = [cost for cost in costs.ranks if rank in cost.ranks]
    return found


def test_each_rank_reads_what_it_was_said_to(saved: Path) -> None:
    costs = load_costs(saved, MESH, RULES)
    assert sorted(rank for cost in costs.ranks for rank in cost.ranks) == [0, 1, 2, 3]
    assert costs.stored_bytes == 4 * (512 * 2048 + 1001 * 7)
    read = 0
    for rank in range(4):
        layouts = {
            name: Layout(MESH, rule.placements, SHAPES[name])
            for name, rule in zip("wv", RULES, strict=True)
        }
        shards = {n: torch.zeros(layout.held_by(rank)[0].sizes) for n, layout in layouts.items()}
        state = with_layouts(shards, layouts, rank=rank)
        report = dcp.load(state, saved, no_dist=True, strict=False)
        cost = cost_of(costs, rank)
        assert cost.read_bytes == report.bytes_read
        assert cost.state_bytes == sum(tensor.nbytes for tensor in shards.values())
        assert cost.num_files == 8 if rank == 0 else cost.num_files <= 8
        assert cost.num_requests >= cost.num_files
        assert (cost.shared_read_bytes, cost.received_bytes) == (cost.read_bytes, 0)
        read += report.bytes_read
    assert costs.read_bytes == read
    assert costs.slowest.read_bytes == max(cost.read_bytes for cost in costs.ranks)


def test_shared_each_byte_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MIN_SHARED_BYTES", 0)
    costs = load_costs(saved, MESH, RULES)
    shared = sum(cost.shared_read_bytes * len(cost.ranks) for cost in costs.ranks)
    assert shared == costs.stored_bytes
    for cost in costs.ranks:
        assert cost.received_bytes <= cost.state_bytes
        assert cost.received_bytes >= cost.state_bytes - cost.shared_read_bytes


def test_rules_that_fit_nothing(saved: Path) -> None:
    with pytest.raises(LayoutMismatch, match="'x'"):
        load_costs(saved, MESH, parse_rules("x=R,R"))
