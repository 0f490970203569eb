"""Ranks that want different parts of the same blocks read each block once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.reading import limits
from dtckpt.checkpoint.sharing import exchanging
from dtckpt.checkpoint.sharing.exchanging import StripeExchange
from dtckpt.checkpoint.sharing.stripe_memory import reads_into
from dtckpt.checkpoint.sharing.stripes import StripedTensor, deal, times_read
from dtckpt.checkpoint.tensors.dtypes import DTYPES, items_of
from dtckpt.dtensor import (
    Box,
    DeviceMesh,
    DTensor,
    IrregularLayout,
    Layout,
    Mesh,
    Placement,
    Ragged,
    Replicate,
    Shard,
)
from dtckpt.dtensor.comm import collectives, packing, transports
from dtckpt.dtensor.comm.message_parts import ViewPart
from dtckpt.dtensor.geometry.box import run_boxes
from dtckpt.errors import CheckpointError, Corrupt, StorageError
from dtckpt.storage import FaultyStore, FlipBit, MemoryStore, RaiseError, Rule, Store, open_store

from ...dtensor.oracle import local_array
from ...dtensor.strategies import layouts, meshes, shapes
from ...ranks import run_ranks
from ..simulate import Given, items, save_all
from ..test_together import SIZE, same_error

BLOCK = 64


def gloo_rounds(round_bytes: int) -> transports.Transport:
    """Gloo, of which a round moves so much."""
    costs = replace(transports.GLOO.costs, round_bytes=round_bytes)
    return replace(transports.GLOO, costs=costs)


@pytest.fixture(autouse=True)
def tiny_units() -> Iterator[None]:
    """Stripes, rounds and exchanges so small that there are many of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BLOCK_BYTES", BLOCK)
        patch.setattr(limits, "STRIPE_BYTES", 4 * BLOCK)
        patch.setattr(limits, "ROUND_BYTES", 8 * BLOCK)
        patch.setattr(transports, "GLOO", gloo_rounds(3 * BLOCK))
        yield


def zeros(layout: Layout, dtype: torch.dtype, rank: int) -> tuple[DTensor, torch.Tensor]:
    """A DTensor to be filled, without process groups of its own, and its local tensor."""
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    sizes = layout.box(coordinate).sizes
    as_bytes = torch.zeros((*sizes, dtype.itemsize), dtype=torch.uint8)
    local = as_bytes.view(dtype).reshape(sizes)
    mesh = DeviceMesh("cpu", layout.mesh, rank=rank)
    return DTensor.from_local(local, mesh, layout.placements, shape=layout.shape), local


def load_all(
    store: Store, wanted: dict[str, Layout], *, read_once: bool | None = True
) -> list[dcp.LoadReport]:
    """Load tensors on all ranks of their meshes, and compare them with what was saved."""
    whole = {name: dcp.open(store)[name][...] for name in wanted}
    num_ranks = next(iter(wanted.values())).mesh.size

    def load(rank: int, group: Any) -> dcp.LoadReport:
        made = {n: zeros(layout, whole[n].dtype, rank) for n, layout in wanted.items()}
        state = {name: tensor for name, (tensor, _) in made.items()}
        report = dcp.load(state, store, process_group=group, read_once=read_once, strict=False)
        for name, (_, local) in made.items():
            here = wanted[name].mesh.coordinate(rank)
            assert here is not None
            expected = local_array(wanted[name], here, as_items(whole[name]))
            assert np.array_equal(as_items(local), expected), name
        return report

    reports = run_ranks(num_ranks, load)
    assert len({(report.read_once, report.read_once_reason) for report in reports}) == 1
    return reports


def as_items(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements as ``DType.items``."""
    size = tensor.element_size()
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(items_of(size)).reshape(tuple(tensor.shape))


def flat(num_ranks: int, placement: Placement, shape: tuple[int, ...]) -> Layout:
    """A layout on a mesh of one axis."""
    return Layout(Mesh((num_ranks,)), (placement,), shape)


def saved(**given: tuple[str, Layout | IrregularLayout]) -> Store:
    """A checkpoint of random tensors, in small blocks."""
    tensors = {n: Given(items(lay.shape, code), code, lay) for n, (code, lay) in given.items()}
    store, _ = save_all(tensors, range(8), block_bytes=BLOCK)
    return store


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), max_size=3))
def test_runs_of_a_box_make_up_its_elements(data: st.DataObject, sizes: list[int]) -> None:
    box = Box(tuple(range(len(sizes))), tuple(sizes))
    cuts = sorted(data.draw(st.lists(st.integers(0, box.numel), max_size=4)))
    numbers = np.arange(box.numel).reshape(box.sizes)
    found: list[int] = []
    for start, stop in itertools.pairwise([0, *cuts, box.numel]):
        boxes = list(run_boxes(box, start, stop))
        assert sum(part.numel for part in boxes) == stop - start
        assert len(boxes) <= max(2 * len(sizes) - 1, 1)
        for part in boxes:
            found += numbers[part.relative_to(box).slices].reshape(-1).tolist()
    assert found == list(range(box.numel))


def test_stripes_are_whole_blocks_and_evenly_dealt() -> None:
    stored = [
        StoredTensor(
            name="a", dtype=DTYPES["F32"], shape=(90, 33), layout=flat(3, Shard(0), (90, 33))
        ),
        StoredTensor(
            name="b", dtype=DTYPES["BF16"], shape=(7, 5), layout=flat(3, Shard(1), (7, 5))
        ),
        StoredTensor(name="c", dtype=DTYPES["F64"], shape=(), layout=flat(3, Replicate(), ())),
    ]
    total = sum(tensor.num_bytes for tensor in stored)
    rounds = deal([StripedTensor(t, flat(5, Replicate(), t.shape)) for t in stored], 5, 8 * BLOCK)
    assert len(rounds) > 2
    read = [0] * 5
    count = {tensor.name: np.zeros(tensor.shape, dtype=int) for tensor in stored}
    for dealt in rounds:
        in_round = [0] * 5
        for stripe in dealt:
            tensor = stripe.tensor.stored
            read[stripe.reader] += stripe.num_bytes
            in_round[stripe.reader] += stripe.num_bytes
            for box in stripe.boxes:
                count[tensor.name][box.slices] += 1
            [(_, chunk, _)] = tensor.chunks_meeting(stripe.boxes[0])
            first = stripe.boxes[0].relative_to(chunk).offsets
            at = sum(
                o * s
                for o, s in zip(first, np.cumprod((1, *chunk.sizes[:0:-1]))[::-1], strict=False)
            )
            assert at * tensor.dtype.itemsize % BLOCK == 0
        assert max(in_round) <= limits.ROUND_BYTES
    assert all((n == 1).all() for n in count.values()), "every element is read by one rank"
    assert sum(read) == total
    assert max(read) - min(read) <= 4 * limits.STRIPE_BYTES


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), meshes(max_axes=3, max_size=6), meshes(max_axes=2, max_size=8))
def test_any_layout_to_any_other(data: st.DataObject, mesh: Mesh, old_mesh: Mesh) -> None:
    """Uneven and empty shards, several axes, ragged and ordered shards, irregular chunks."""
    wanted: dict[str, Layout] = {}
    given: dict[str, tuple[str, Layout | IrregularLayout]] = {}
    for name in data.draw(st.sampled_from(["a", "ab", "abc"])):
        shape = data.draw(shapes(max_size=14))
        wanted[name] = data.draw(layouts(mesh=mesh, shape=shape))
        old = data.draw(layouts(mesh=old_mesh, shape=shape))
        if data.draw(st.booleans()) and old.numel:
            boxes = [(old_mesh.rank(c), old.box(c)) for c in old_mesh.coordinates()]
            given[name] = (
                data.draw(st.sampled_from(sorted(DTYPES.keys() - {"F4"}))),
                (IrregularLayout(shape, tuple(boxes))),
            )
        else:
            given[name] = data.draw(st.sampled_from(sorted(DTYPES.keys() - {"F4"}))), old
    load_all(saved(**given), wanted)


def test_row_shards_as_column_shards_are_read_once() -> None:
    rows = flat(4, Shard(0), (256, 16))
    store = saved(w=("F32", rows), v=("BF16", flat(3, Shard(0), (50, 64))))
    wanted = {"w": flat(4, Shard(1), (256, 16)), "v": flat(4, Shard(1), (50, 64))}
    total = (256 * 16 * 4) + (50 * 64 * 2)
    direct = load_all(store, wanted, read_once=False)
    assert sum(report.bytes_read for report in direct) > 2 * total
    reports = load_all(store, wanted)
    assert reports[0].read_once
    read = [report.bytes_read for report in reports]
    assert total <= sum(read) <= 1.1 * total
    assert max(read) <= 0.3 * sum(read), "the work is shared"
    for report in reports:
        assert 0 < report.bytes_received < report.bytes_needed
    assert sum(report.bytes_needed for report in reports) == total


def test_replicas_of_column_shards_cost_no_more_reads() -> None:
    store = saved(w=("F32", flat(4, Shard(0), (256, 16))))
    layout = Layout(Mesh((3, 2)), (Replicate(), Shard(1)), (256, 16))
    reports = load_all(store, {"w": layout})
    assert sum(report.bytes_read for report in reports) == 256 * 16 * 4


def test_what_is_read_about_once_anyway_is_not_exchanged() -> None:
    layout = flat(4, Shard(0), (256, 16))
    assert times_read(stored_as(layout), layout) == 1
    assert times_read(stored_as(layout), flat(4, Shard(1), (256, 16))) == 4
    store = saved(w=("F32", layout))
    assert not load_all(store, {"w": layout})[0].read_once
    reports = load_all(store, {"w": flat(3, Shard(0), (256, 16))})
    assert sum(report.bytes_received for report in reports) == 0


def stored_as(layout: Layout) -> StoredTensor:
    """A stored tensor of float32."""
    return StoredTensor(name="w", dtype=DTYPES["F32"], shape=layout.shape, layout=layout)


def test_it_is_chosen_by_itself_where_reading_is_dear() -> None:
    remote = open_store("memory://dtckpt-shared-reading-test/step-1")
    local = saved(w=("F32", flat(4, Shard(0), (256, 16))))
    for info in local.list():
        remote.publish(info.name, local.read(info.name), overwrite=False)
    wanted = {"w": flat(4, Shard(1), (256, 16))}
    chosen = load_all(remote, wanted, read_once=None)[0]
    assert chosen.read_once
    assert chosen.read_once_reason == "blocks would be read 4.0 times from an object store"
    assert not load_all(local, wanted, read_once=None)[0].read_once
    assert not load_all(remote, wanted, read_once=False)[0].read_once
    halves = {"w": flat(2, Ragged(1, (16, 0)), (256, 16))}  # one rank wants all
    assert not load_all(remote, halves, read_once=None)[0].read_once


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2, 2), (Replicate(), Shard(1))), ((4,), (Ragged(1, (9, 1, 1, 1)),)), ((4,), (Shard(1),))],
)
def test_exchanges_and_rounds_are_bounded(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """Also where several ranks want all that one reads, or one rank most of what all read."""
    monkeypatch.setattr(limits, "STRIPE_BYTES", 16 * BLOCK)
    monkeypatch.setattr(limits, "ROUND_BYTES", 64 * BLOCK)
    monkeypatch.setattr(transports, "GLOO", gloo_rounds(16 * BLOCK))
    moved: list[int] = []
    staged: list[int] = []
    all_to_all = collectives.start_all_to_all

    def measure(sent: torch.Tensor, send_bytes: Any, received: torch.Tensor, *rest: Any) -> Any:
        moved.extend((sent.numel(), received.numel()))
        return all_to_all(sent, send_bytes, received, *rest)

    def measure_stage(memory: memoryview, *rest: Any) -> Any:
        staged.append(memory.nbytes)
        return reads_into(memory, *rest)

    monkeypatch.setattr(exchanging, "reads_into", measure_stage)
    monkeypatch.setattr(packing, "start_all_to_all", measure)
    shape = (900, 12)
    layout = Layout(Mesh(mesh), placements, shape)
    load_all(saved(w=("F32", flat(5, Shard(0), shape))), {"w": layout})
    rounded_up = 4 * 3  # an item for each of the other ranks
    assert len(moved) > 4 * 2 * 2
    assert 8 * BLOCK < max(moved) <= transports.GLOO.costs.round_bytes + rounded_up
    assert 0 < max(staged) <= limits.ROUND_BYTES


def test_incremental_checkpoints_and_other_block_sizes() -> None:
    """Blocks of 1 MiB, of which the stripes know nothing, and files of an earlier checkpoint."""
    root = MemoryStore()
    values = {name: torch.randn(60, 40) for name in "ab"}
    dcp.save({**values, "n": 0}, root.substore("first"))
    values["b"] = values["b"] + 1
    dcp.save({**values, "n": 1}, root.substore("second"), base=root.substore("first"))
    store = root.substore("second")
    assert dcp.read_manifest(store).borrowed
    reports = load_all(store, {name: flat(3, Shard(1), (60, 40)) for name in "ab"})
    assert reports[0].read_once
    assert sum(report.bytes_received for report in reports) > 0


def test_conversion_strides_and_meta_tensors_go_together_with_it() -> None:
    layout = flat(SIZE, Shard(0), (30, 40))
    store = saved(w=("F32", layout), v=("BF16", layout), m=("F32", layout))
    wanted = flat(SIZE, Shard(1), (30, 40))
    whole = {name: dcp.open(store)[name][...] for name in "wvm"}

    def load(rank: int, group: Any) -> dcp.LoadReport:
        mesh = DeviceMesh("cpu", wanted.mesh, rank=rank)
        box = wanted.box((rank,))
        narrow = torch.zeros(box.sizes, dtype=torch.bfloat16)
        strided = torch.zeros(box.sizes[1], 2 * box.sizes[0], dtype=torch.float64)[:, ::2].T
        state: dict[str, Any] = {
            name: DTensor.from_local(local, mesh, wanted.placements, shape=wanted.shape)
            for name, local in (
                ("w", narrow),
                ("v", strided),
                ("m", torch.empty(box.sizes, device="meta")),
            )
        }
        report = dcp.load(state, store, process_group=group, read_once=True, dtype_policy="cast")
        for name, tensor in state.items():
            local = tensor.to_local()
            expected = whole[name][box.slices].to(local.dtype)
            assert np.array_equal(as_items(local), as_items(expected)), name
        return report

    reports = run_ranks(SIZE, load)
    assert all(report.cast.keys() == {"w", "v"} for report in reports)
    assert sum(report.bytes_read for report in reports) == 1200 * 10
    received = sum(report.bytes_received for report in reports)
    assert 0 < received < 1200 * (2 + 8 + 4), "counted in bytes of the destinations"


def test_tied_tensors_and_what_ranks_keep_for_themselves_are_left_out() -> None:
    store = MemoryStore()
    layout = flat(SIZE, Shard(1), (8, 9))

    def body(rank: int, group: Any) -> dcp.LoadReport:
        def state(value: float) -> dict[str, Any]:
            tied, shared = (zeros(layout, torch.float32, rank) for _ in range(2))
            own = dcp.PerRank(torch.full((3,), value * (rank + 1)))
            for _, local in (tied, shared):
                local.fill_(value)
            return {"a": tied[0], "b": tied[0], "own": own, "c": shared[0]}

        dcp.save(state(1.0), store, process_group=group)
        into = state(0.0)
        report = dcp.load(into, store, process_group=group, read_once=True)
        assert into["own"].value.tolist() == [rank + 1.0] * 3
        assert into["a"].to_local().tolist() == into["c"].to_local().tolist() == [[1.0] * 3] * 8
        return report

    def other(rank: int, group: Any) -> dcp.LoadReport:
        wanted = flat(SIZE, Shard(0), (8, 9))
        tied, shared = (zeros(wanted, torch.float32, rank) for _ in range(2))
        own = dcp.PerRank(torch.zeros(3))
        into: dict[str, Any] = {"a": tied[0], "b": tied[0], "own": own, "c": shared[0]}
        report = dcp.load(into, store, process_group=group, read_once=True)
        assert own.value.tolist() == [rank + 1.0] * 3
        assert all((local == 1).all() for _, local in (tied, shared))
        return report

    assert not run_ranks(SIZE, body)[0].read_once, "it is laid out as it was"
    reports = run_ranks(SIZE, other)
    assert reports[0].read_once
    assert 0 < sum(report.bytes_received for report in reports) <= 8 * 9 * 4, "only c"


@pytest.mark.parametrize("case", ["placements", "names", "mesh"])
def test_ranks_that_do_not_know_of_each_other_read_for_themselves(case: str) -> None:
    store = saved(w=("F32", flat(4, Shard(0), (8, 24))), v=("F32", flat(4, Shard(0), (8, 24))))
    whole = dcp.open(store)["w"][...]

    def load(rank: int, group: Any) -> dcp.LoadReport:
        mesh = Mesh((2,), ranks=(rank, 5)) if case == "mesh" else Mesh((2,))
        placement = Ragged(1, (4 + 2 * rank, 20 - 2 * rank)) if case == "placements" else Shard(1)
        layout = Layout(mesh, (placement,), (8, 24))
        tensor, local = zeros(layout, torch.float32, rank)
        state: dict[str, Any] = {"w": tensor}
        if case == "names" and rank:
            state["v"] = zeros(layout, torch.float32, rank)[0]
        report = dcp.load(state, store, process_group=group, read_once=True, strict=False)
        here = mesh.coordinate(rank)
        assert here is not None
        assert np.array_equal(as_items(local), as_items(whole[layout.box(here).slices]))
        return report

    reports = run_ranks(2, load)
    assert not any(report.read_once for report in reports)
    told = "no tensor is wanted" if case == "mesh" else "different tensors or layouts"
    assert told in reports[0].read_once_reason


def failing_load(store: Store, victim: int, rule: Rule) -> CheckpointError:
    """Load with faults on one rank; all must raise the same error."""
    wanted = flat(SIZE, Shard(1), (200, 12))

    def load(rank: int, group: Any) -> None:
        mine = FaultyStore(store, [rule] if rank == victim else [])
        tensor, _ = zeros(wanted, torch.float32, rank)
        dcp.load({"w": tensor}, mine, process_group=group, read_once=True)

    return same_error(load)


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("nth", [2, 5])  # after header and table
@pytest.mark.parametrize("fault", [RaiseError(StorageError("disk on fire")), FlipBit(77)])
def test_a_read_that_fails_in_any_round_fails_all(
    victim: int, nth: int, fault: RaiseError | FlipBit
) -> None:
    store = saved(w=("F32", flat(1, Shard(0), (200, 12))))
    error = failing_load(store, victim, Rule(fault, op="read_into", nth=nth))
    assert isinstance(error, StorageError if isinstance(fault, RaiseError) else Corrupt)
    assert f"load: read failed on rank {victim}" in str(error)
    assert error.overwritten == (() if nth == 2 else ("w",))


@pytest.mark.parametrize("victim", range(SIZE))
def test_a_damaged_file_is_found_before_anything_changes(victim: int) -> None:
    store = saved(w=("F32", flat(SIZE, Shard(0), (200, 12))))
    error = failing_load(store, victim, Rule(FlipBit(999), op="read_into", nth=1))
    assert isinstance(error, Corrupt)
    assert f"load: check failed on rank {victim}" in str(error)
    assert error.overwritten == ()


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize(
    ("cls", "step", "nth"),
    [
        (ViewPart, "view", 1),
        (ViewPart, "view", 5),
        (StripeExchange, "put", 1),
        (StripeExchange, "put", 20),
    ],
)
def test_a_rank_that_fails_while_it_sends_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, victim: int, cls: type, step: str, nth: int
) -> None:
    store = saved(w=("F32", flat(1, Shard(0), (200, 12))))
    original = getattr(cls, step)
    ranks: dict[int, int] = {}
    calls = itertools.count(1)

    def fail(*args: Any) -> Any:
        if ranks[threading.get_ident()] == victim and next(calls) == nth:
            raise MemoryError("no more")
        return original(*args)

    monkeypatch.setattr(cls, step, fail)
    wanted = flat(SIZE, Shard(1), (200, 12))

    def load(rank: int, group: Any) -> None:
        ranks[threading.get_ident()] = rank
        tensor, _ = zeros(wanted, torch.float32, rank)
        dcp.load({"w": tensor}, store, process_group=group, read_once=True)

    error = same_error(load)
    assert type(error) is CheckpointError
    assert f"failed on rank {victim}: MemoryError: no more" in str(error)
    assert error.overwritten == ("w",)
