"""Replicas that read once and send to each other."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.loading import filling
from dtckpt.checkpoint.sharing import broadcasting
from dtckpt.checkpoint.sharing.read_once import Offer, decide
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Replicate, Shard
from dtckpt.dtensor.comm import message_parts, transports
from dtckpt.errors import CheckpointError, Corrupt
from dtckpt.storage import MemoryStore, Store, open_store

from ...dtensor.rank_meshes import assert_holds, run_on_mesh
from ...ranks import run_ranks
from ..test_together import SIZE, same_error

DTYPES = ["float32", "bfloat16", "bool", "complex64", "float4_e2m1fn_x2", "int64", "float8_e5m2"]


def plain_state(value: int) -> dict[str, Any]:
    """Plain tensors of all kinds and sizes, the same on all ranks."""
    bits = torch.arange(4800).mul(value).remainder(2).to(torch.uint8)
    state: dict[str, Any] = {n: bits.view(getattr(torch, n)).reshape(3, -1) for n in DTYPES}
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["transposed"] = torch.full((40, 30), float(value)).T
    state["empty"] = torch.zeros(0, 4)
    state["scalar"] = torch.tensor(float(value))
    state |= {f"small{i}": torch.full((i + 1,), float(value * i)) for i in range(10)}
    return state | {"n": value}


def items(tensor: torch.Tensor) -> list[int]:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def saved(state: dict[str, Any]) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    dcp.save(state, store)
    return store


@pytest.mark.parametrize("batch_bytes", [16 << 20, 1000])
def test_plain_tensors_are_read_once(monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    costs = replace(transports.GLOO.costs, round_bytes=batch_bytes)
    monkeypatch.setattr(transports, "GLOO", replace(transports.GLOO, costs=costs))
    store = saved(plain_state(1))

    def load(_: int, group: Any) -> Any:
        state = plain_state(0)
        report = dcp.load(state, store, process_group=group, read_once=True)
        return state, report

    results = run_ranks(3, load)
    for state, report in results:
        assert state["n"] == 1
        for name, expected in plain_state(1).items():
            assert name == "n" or items(state[name]) == items(expected), name
        assert report.read_once
        assert report.read_once_reason == "it was asked for (read_once=True)"
        assert report.bytes_read + report.bytes_received == report.bytes_needed
    total = results[0][1].bytes_needed
    read = [report.bytes_read for _, report in results]
    assert sum(read) == total
    assert max(read) < 0.5 * total, "the work is shared"


def test_replicas_along_an_axis_and_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "MIN_TIMES_ASKED", 100)  # else stripes serve most of them
    shapes = {"rows": (16, 6), "norm": (7,), "both": (8, 8), "uneven": (3, 5)}
    wholes = {n: torch.randn(shape) for n, shape in shapes.items()}
    store = saved({"model": dict(wholes), "scale": torch.ones(5)})
    placements = {
        "rows": (Replicate(), Shard(0)),
        "norm": (Replicate(), Replicate()),
        "both": (Shard(0), Shard(1)),
        "uneven": (Replicate(), Shard(0)),
    }

    def load(mesh: DeviceMesh) -> tuple[dcp.LoadReport, int]:
        state: dict[str, Any] = {}
        for name, whole in wholes.items():
            layout = DTensor.from_local(
                torch.zeros(local_shape(mesh, placements[name], whole.shape)),
                mesh,
                placements[name],
                shape=whole.shape,
            )
            state[name] = layout
        scale = torch.zeros(5)
        group = mesh.group_of((0, 1))
        report = dcp.load(
            {"model": state, "scale": scale}, store, process_group=group, read_once=True
        )
        for name, tensor in state.items():
            assert_holds(tensor, wholes[name])
        assert scale.tolist() == [1] * 5
        own = state["both"].to_local().nbytes
        return report, own

    found = run_on_mesh((4, 2), load)
    assert all(report.read_once for report, _ in found)
    size = {name: whole.nbytes for name, whole in wholes.items()}
    received = 3 * (size["rows"] + size["uneven"]) + 7 * (size["norm"] + 20)
    assert sum(report.bytes_received for report, _ in found) == received
    for report, own in found:
        assert report.bytes_needed - report.bytes_received >= own


def local_shape(mesh: DeviceMesh, placements: Any, shape: Any) -> tuple[int, ...]:
    """The shape of this rank's part."""
    from dtckpt.dtensor import Layout

    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return Layout(mesh.layout_mesh, placements, tuple(shape)).box(coordinate).sizes


def test_meshes_without_groups_read_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "MIN_TIMES_ASKED", 100)
    store = saved({"w": torch.ones(4, 4)})

    def load(rank: int, group: Any) -> dcp.LoadReport:
        mesh = DeviceMesh("cpu", Mesh((2, 2)), rank=rank)
        placements = (Replicate(), Shard(0))
        tensor = DTensor.from_local(torch.zeros(2, 4), mesh, placements, shape=(4, 4))
        report = dcp.load({"w": tensor}, store, process_group=group, read_once=True)
        assert tensor.to_local().tolist() == [[1] * 4] * 2
        return report

    for report in run_ranks(4, load):
        assert not report.read_once
        assert "no tensor is wanted by 2 ranks that have a process group" in report.read_once_reason


def test_what_a_rank_keeps_for_itself_and_tied_tensors_are_not_sent() -> None:
    store = MemoryStore()

    def state(rank: int, value: float) -> dict[str, Any]:
        tied = torch.full((6,), value)
        own = dcp.PerRank(torch.full((3,), value * (rank + 1)))
        return {"a": tied, "b": tied, "own": own, "common": torch.full((5,), value)}

    run_ranks(3, lambda r, g: dcp.save(state(r, 1.0), store, process_group=g))

    def load(rank: int, group: Any) -> dcp.LoadReport:
        into = state(rank, 0.0)
        report = dcp.load(into, store, process_group=group, read_once=True)
        assert into["own"].value.tolist() == [rank + 1.0] * 3
        assert into["a"].tolist() == [1.0] * 6
        assert into["common"].tolist() == [1.0] * 5
        return report

    reports = run_ranks(3, load)
    assert all(report.read_once for report in reports)
    assert sum(report.bytes_received for report in reports) == 2 * 20


def test_ranks_that_want_different_things_read_for_themselves() -> None:
    store = saved({"a": torch.ones(3), "b": torch.ones(3)})

    def load(rank: int, group: Any) -> dcp.LoadReport:
        state = {"a": torch.zeros(3)} | ({"b": torch.zeros(3)} if rank else {})
        report = dcp.load(state, store, process_group=group, read_once=True, strict=False)
        assert all(tensor.tolist() == [1] * 3 for tensor in state.values())
        return report

    for report in run_ranks(2, load):
        assert not report.read_once
        assert report.bytes_received == 0
        assert report.read_once_reason == "the ranks load different tensors or layouts"


def test_conversion_meta_and_selection_go_together_with_it() -> None:
    values = torch.randn(6, 4)
    store = saved({"net": {"weight": values, "bias": torch.ones(6)}, "more": 1})

    def load(_: int, group: Any) -> Any:
        net = torch.nn.Linear(4, 6, device="meta", dtype=torch.bfloat16)
        report = dcp.load(
            {"m": net},
            store,
            process_group=group,
            read_once=True,
            select="net",
            rename={"m": "net"},
            dtype_policy="cast",
        )
        assert torch.equal(net.weight, values.bfloat16())
        assert net.bias.tolist() == [1] * 6
        return report

    reports = run_ranks(2, load)
    assert sum(report.bytes_received for report in reports) == 30 * 2


def test_it_is_chosen_for_many_replicas_on_object_stores_only() -> None:
    remote = open_store("memory://dtckpt-read-once-test/step-1")
    states = {"w": torch.ones(1000), "v": torch.ones(1000)}
    dcp.save(states, remote)
    local = saved(states)

    def load(store: Store, size: int, asked: bool | None = None) -> dcp.LoadReport:
        def body(_: int, group: Any) -> dcp.LoadReport:
            state = {name: torch.zeros(1000) for name in states}
            report = dcp.load(state, store, process_group=group, read_once=asked)
            assert all(tensor.sum() == 1000 for tensor in state.values())
            return report

        reports = run_ranks(size, body)
        assert len({(report.read_once, report.read_once_reason) for report in reports}) == 1
        return reports[0]

    assert load(remote, 4).read_once_reason == "4 or more ranks want the same from an object store"
    assert not load(remote, 3).read_once
    assert not load(local, 4).read_once
    assert not load(remote, 4, asked=False).read_once
    assert dcp.load({n: torch.zeros(1000) for n in states}, remote).read_once is False


@pytest.mark.parametrize(
    ("answers", "url", "expected"),
    [
        ([Offer(None, "h", "x")] * 4, "/local", False),
        ([Offer(None, "h", "x")] * 4, "s3://bucket", True),
        ([Offer(None, "h", "x"), Offer(None, "i", "x")], "/local", True),
        ([Offer(None, "h", "x"), Offer(None, "i", "y")], "/local", False),
        ([Offer(None, "h", ""), Offer(None, "i", "")], "/local", False),
        ([Offer(True, "h", "x"), Offer(None, "h", "x")], "s3://bucket", False),
        ([Offer(True, "h", "x"), Offer(True, "h", "x")], "/local", True),
        ([Offer(False, "h", "x"), Offer(False, "i", "x")], "s3://bucket", False),
        ([Offer(None, "h", "x", 4.0, False)] * 2, "/local", False),
        ([Offer(None, "h", "x", 4.0, False)] * 2, "s3://bucket", True),
    ],
)
def test_the_decision(answers: list[Offer], url: str, expected: bool) -> None:
    store = MemoryStore()
    store.url = url
    chosen, reason = decide(answers, store)
    assert chosen is expected
    assert reason


def test_a_damaged_block_that_one_rank_reads_fails_all_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(broadcasting, "broadcast", sent.append)
    good = saved({f"t{i}": torch.ones(100) for i in range(SIZE)})
    store = MemoryStore()
    for info in good.list():
        content = bytearray(good.read(info.name))
        if info.name.endswith(".safetensors"):
            content[4096 + 10] ^= 1
        store.publish(info.name, bytes(content), overwrite=False)

    def load(_: int, group: Any) -> None:
        state = {f"t{i}": torch.zeros(100) for i in range(SIZE)}
        dcp.load(state, store, process_group=group, read_once=True)

    assert isinstance(same_error(load), Corrupt)
    assert sent == []


@pytest.mark.parametrize("step", ["view", "put"])
def test_a_rank_that_fails_while_it_sends_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = saved({f"t{i}": torch.ones(100) for i in range(SIZE)})
    original = getattr(message_parts.ViewPart, step)
    threads: dict[int, int] = {}

    def fail(*args: Any) -> Any:
        if threads[threading.get_ident()] == 1:
            raise MemoryError("no more")
        return original(*args)

    monkeypatch.setattr(message_parts.ViewPart, step, fail)

    def load(rank: int, group: Any) -> None:
        threads[threading.get_ident()] = rank
        state = {f"t{i}": torch.zeros(100) for i in range(SIZE)}
        dcp.load(state, store, process_group=group, read_once=True)

    error = same_error(load)
    assert type(error) is CheckpointError
    assert "load: send to replicas failed on rank 1: MemoryError: no more" in str(error)
    assert set(error.overwritten) == {f"t{i}" for i in range(SIZE)}
