"""What is told of a redistribute beside what it does, and that it is the least."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from dtckpt.dtensor import (
    CostModel,
    DeviceMesh,
    Layout,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    explain,
)
from dtckpt.dtensor.comm.costs import GLOO, NCCL
from dtckpt.errors import PlacementError

from ..geometry.test_flows import MESHES, random_layouts
from ..rank_meshes import collectives, run_on_mesh, scattered
from .test_redistribute import SHAPES, random_placements


def all_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return [Layout(mesh, found, shape) for found in itertools.product(kinds, repeat=mesh.ndim)]


@pytest.mark.parametrize(
    ("mesh_shape", "shape"),
    [
        ((8,), (64, 64)),
        ((2, 4), (64, 64)),
        ((4, 4), (64, 64)),
        ((2, 2, 2), (16, 16)),
        ((2, 2), (5, 7)),
    ],
)
def test_nobody_receives_more_than_it_lacks_or_holds_more_than_both(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    for source, target in itertools.permutations(all_layouts(Mesh(mesh_shape), shape), 2):
        told = explain(source, target)
        assert told.received_bytes == told.needed_bytes, str(told)
        assert sum(told.sent_bytes.values()) == sum(told.received_bytes.values())
        for rank in told.ranks:
            at = source.mesh.coordinate(rank) or ()
            both = 4 * (source.box(at).numel + target.box(at).numel)
            assert told.peak_bytes[rank] <= both + told.buffer_bytes


def test_buffers_are_bounded_whatever_the_size() -> None:
    mesh = Mesh((8,))
    rows, columns = (
        Layout(mesh, (Shard(0),), (1 << 16, 1 << 16)),
        Layout(mesh, (Shard(1),), (1 << 16, 1 << 16)),
    )
    whole = Layout(mesh, (Replicate(),), (1 << 16, 1 << 16))
    for costs, (source, target) in itertools.product(
        (GLOO, NCCL), [(rows, columns), (rows, whole), (columns, whole)]
    ):
        told = explain(source, target, costs=costs, ranks=[0, 7])
        in_place = costs is NCCL and source is rows and target is whole
        assert (told.buffer_bytes == 0) == in_place
        assert told.buffer_bytes <= 10 * costs.round_bytes
        assert told.ranks == (0, 7)


@pytest.mark.parametrize("meshes", MESHES)
def test_bytes_between_meshes(meshes: tuple[Mesh, Mesh]) -> None:
    rng = random.Random(8)
    for _ in range(60):
        source, target = random_layouts(rng, meshes)
        if not source.is_partial:
            told = explain(source, target)
            if all(step.startswith(("exchange", "local", "one term")) for step in told.steps):
                assert told.received_bytes == told.needed_bytes, str(told)


@pytest.mark.parametrize(
    ("mesh_shape", "costs"),
    [
        ((4,), GLOO),
        ((2, 2), GLOO),
        ((4,), replace(GLOO, few_bytes=64)),
        ((2, 2), replace(GLOO, ranks_per_host=2, host_link_gb_s=1e-5)),
    ],
)
def test_what_is_told_is_what_happens(mesh_shape: tuple[int, ...], costs: CostModel) -> None:
    def body(mesh: DeviceMesh) -> None:
        mesh.costs = costs
        rng = random.Random(9)
        for shape in SHAPES * 8:
            whole = torch.ones(shape, dtype=torch.float64)
            source = random_placements(rng, mesh.shape, shape)
            target = random_placements(rng, mesh.shape, shape)
            tensor = scattered(whole, mesh, source)
            result_layout = Layout(mesh.layout_mesh, target, shape)
            told = explain(tensor.global_layout, result_layout, torch.float64, costs=costs)
            with collectives() as seen:
                tensor.redistribute(placements=target)
            here = mesh.get_rank()
            assert sum(c.received_bytes for c in seen) == told.received_bytes[here], str(told)
            assert sum(c.sent_bytes for c in seen) == told.sent_bytes[here], str(told)

    run_on_mesh(mesh_shape, body)


def test_a_dtensor_stands_for_its_layout() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(8, 6, dtype=torch.float64), mesh, (Shard(0),))
        target = Layout(mesh.layout_mesh, (Shard(1),), (8, 6))
        told = explain(tensor.global_layout, target, torch.float64)
        assert explain(tensor, target) == explain(tensor, [Shard(1)]) == told
        assert explain(tensor, scattered(torch.ones(8, 6), mesh, (Shard(1),))) == told

    run_on_mesh((2,), body)


def test_terms_are_reduced_first_and_into_shards() -> None:
    mesh, shape = Mesh((2, 4)), (64, 64)

    def steps(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> tuple[str, ...]:
        return explain(Layout(mesh, source, shape), Layout(mesh, target, shape)).steps

    total = (Partial(), Partial())
    assert steps(total, (Replicate(), Replicate())) == ("all-reduce(sum) over 8 ranks to (R, R)",)
    assert steps(total, (Shard(0), Shard(1))) == (
        "reduce-scatter(sum) over 8 ranks to (S(0), S(1))",
    )
    assert steps(total, (Replicate(), Shard(0))) == (
        "reduce-scatter(sum) over 4 ranks to (P(sum), S(0))",
        "all-reduce(sum) over 2 ranks to (R, S(0))",
    )
    assert steps((Partial(), Replicate()), (Replicate(), Shard(1))) == (
        "local slice to (P(sum), S(1))",
        "all-reduce(sum) over 2 ranks to (R, S(1))",
    )
    assert steps((Partial("max"), Replicate()), (Shard(0), Shard(0))) == (
        "reduce-scatter(max) over 2 ranks to (S(0), S(0))",
    )
    assert steps((Replicate(), Shard(0)), (Partial(), Shard(0))) == (
        "one term of sum to (P(sum), S(0))",
    )


def test_the_cost_model_says_why() -> None:
    mesh, shape = Mesh((4,)), (4096, 4096)
    rows, whole = Layout(mesh, (Shard(0),), shape), Layout(mesh, (Replicate(),), shape)
    assert explain(rows, whole, costs=GLOO).steps == ("exchange over 4 ranks to (R)",)
    told = explain(rows, whole, costs=NCCL)
    assert told.steps == ("all-gather over 4 ranks to (R)",)
    assert told.why.startswith("gather")
    assert "; exchange" in told.why
    assert told.received_bytes == told.needed_bytes
    assert "all-gather over 4 ranks" in str(told)


def test_every_round_is_launched_anew() -> None:
    mesh, shape = Mesh((4,)), (4096, 4096)
    rows, columns = (Layout(mesh, (Shard(dim),), shape) for dim in (0, 1))
    at_once = replace(NCCL, round_bytes=1 << 30)
    in_rounds = replace(NCCL, round_bytes=1 << 20)  # of 16 MiB
    lacking = explain(rows, columns, costs=in_rounds).seconds
    more = lacking - explain(rows, columns, costs=at_once).seconds
    assert more == pytest.approx(15 * (NCCL.launch_us + 3 * NCCL.message_us) * 1e-6)
    whole = Layout.replicated(mesh, shape)  # rows are gathered in place: no rounds
    gathers = [explain(rows, whole, costs=costs) for costs in (in_rounds, at_once)]
    assert gathers[0].seconds == gathers[1].seconds
    assert explain(columns, whole, costs=in_rounds).seconds > 64 * NCCL.launch_us * 1e-6


def test_slow_links_between_hosts_are_used_once() -> None:
    """Of what all ranks of a host want, each takes a part from afar and the rest at home."""
    mesh, shape = Mesh((2, 8)), (8192, 8192)
    source = Layout(mesh, (Shard(0), Replicate()), shape)
    target = Layout(mesh, (Replicate(), Replicate()), shape)
    near = explain(source, target, costs=NCCL)
    assert near.steps == ("all-gather over 2 ranks to (R, R)",)
    hosts = CostModel(
        launch_us=20,
        message_us=2,
        exchange_gb_s=150,
        hop_us=1,
        gather_gb_s=200,
        copy_gb_s=1000,
        ranks_per_host=8,
        host_link_gb_s=5,
    )
    far = explain(source, target, costs=hosts)
    assert far.steps == (
        "local slice to (S(0), S(0))",
        "all-gather over 16 ranks to (R, R)",
    )
    assert "exchange" in far.why


def test_layouts_of_different_shapes_are_refused() -> None:
    mesh = Mesh((2,))
    with pytest.raises(PlacementError, match="different shapes"):
        explain(Layout(mesh, (Shard(0),), (4,)), Layout(mesh, (Shard(0),), (5,)))


def test_axes_of_one_rank_cost_nothing_between_hosts() -> None:
    mesh = Mesh((2, 1))
    source = Layout(mesh, (Replicate(), Shard(0)), (4, 4))
    told = explain(source, Layout.replicated(mesh, (4, 4)), costs=replace(NCCL, ranks_per_host=2))
    assert set(told.received_bytes.values()) == {0}


def test_a_tensor_is_told_of_by_the_costs_of_its_mesh() -> None:
    def body(mesh: DeviceMesh) -> list[tuple[str, ...]]:
        tensor = scattered(torch.zeros(4, 4), mesh, [Shard(0)])
        usual = explain(tensor, [Replicate()])
        mesh.costs = NCCL
        return [usual.steps, explain(tensor, [Replicate()]).steps]

    for steps in run_on_mesh((2,), body):
        assert steps == [
            ("exchange over 2 ranks to (R)",),
            ("all-gather over 2 ranks to (R)",),
        ]
