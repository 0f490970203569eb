"""Ranks of one host read each block once, into memory that all of them see."""

from __future__ import annotations

import gc
import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.loading.filling import Filling
from dtckpt.checkpoint.ranks.failing import CalledOff
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.reading import limits
from dtckpt.checkpoint.sharing.host_memory import NUM_SLOTS, HostMemory
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.transfer import TensorSink
from dtckpt.checkpoint.timing.recorder import Recorder
from dtckpt.dtensor import IrregularLayout, Layout, Mesh, Replicate, Shard
from dtckpt.errors import CheckpointError, Corrupt, StorageError
from dtckpt.storage import Fault, FaultyStore, FlipBit, RaiseError, Rule, Store

from ...dtensor.strategies import layouts, meshes, shapes
from ...python import run_python
from ...ranks import run_ranks
from ...waiting import beside_each_other
from ..test_together import SIZE, same_error
from .test_shared_reading import BLOCK, as_items, flat, load_all, saved, zeros


@pytest.fixture(autouse=True)
def tiny_slots() -> Iterator[None]:
    """Slots so small that there are many rounds; and no file of theirs stays open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BLOCK_BYTES", BLOCK)
        patch.setattr(limits, "STRIPE_BYTES", 4 * BLOCK)
        patch.setattr(limits, "SLOT_BYTES", 4 * BLOCK)
        patch.setattr(limits, "MIN_SHARED_BYTES", 0)
        yield
    gc.collect()  # errors that tests have kept
    assert not open_memory()


def open_memory() -> list[str]:
    """What this process has open of memory that ranks share."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # other threads open and close files meanwhile
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if "dtckpt-load" in name]


def memory(num_ranks: int = 2, slot_bytes: int = 4096) -> HostMemory:
    """New memory."""
    made = HostMemory.make(num_ranks, slot_bytes)
    assert made is not None
    return made


def never() -> bool:
    """Nothing is broken."""
    return False


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
        code = data.draw(st.sampled_from(sorted(DTYPES.keys() - {"F4"})))
        if data.draw(st.booleans()) and old.numel:
            boxes = [(old_mesh.rank(c), old.box(c)) for c in old_mesh.coordinates()]
            given[name] = code, IrregularLayout(shape, tuple(boxes))
        else:
            given[name] = code, old
    load_all(saved(**given), wanted, read_once=None)


def test_rows_as_columns_are_read_once() -> None:
    shape = (256, 24)
    store = saved(w=("F32", flat(2, Shard(0), shape)), v=("BF16", flat(2, Shard(0), shape)))
    layout = flat(4, Shard(1), shape)
    reports = load_all(store, {"w": layout, "v": layout}, read_once=None)
    needed = 256 * 24 * 6
    assert reports[0].read_once
    assert "on one host" in reports[0].read_once_reason
    assert sum(report.bytes_read for report in reports) == needed
    assert max(report.bytes_read for report in reports) <= needed / 4 + 8 * BLOCK
    for report in reports:
        assert report.bytes_read + report.bytes_received > report.bytes_needed == needed / 4


@pytest.mark.parametrize("why", ["asked", "remote", ""])
def test_what_all_want_is_read_once_where_asked_or_dear(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Plain or replicated; from a local disk each reads for itself as fast."""

    def is_remote(_: Store) -> bool:
        return why == "remote"

    monkeypatch.setattr(limits, "is_remote", is_remote)
    rows = flat(2, Shard(0), (100, 30))
    store = saved(plain=("F32", rows), laid_out=("F32", rows))
    whole = {name: dcp.open(store)[name][...] for name in ("plain", "laid_out")}

    def load(rank: int, group: Any) -> dcp.LoadReport:
        laid_out, local = zeros(flat(4, Replicate(), (100, 30)), torch.float32, rank)
        state: dict[str, Any] = {"plain": torch.zeros(100, 30), "laid_out": laid_out}
        read_once = True if why == "asked" else None
        report = dcp.load(state, store, read_once=read_once, process_group=group)
        assert np.array_equal(as_items(state["plain"]), as_items(whole["plain"]))
        assert np.array_equal(as_items(local), as_items(whole["laid_out"]))
        return report

    reports = run_ranks(4, load)
    num_bytes = 2 * 100 * 30 * 4
    assert sum(report.bytes_read for report in reports) == (num_bytes if why else 4 * num_bytes)
    assert reports[0].read_once is bool(why)


@pytest.mark.parametrize("has_memory", [True, False])
def test_of_large_tensors_only_what_some_rank_wants_is_read(
    monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    """Rows in the middle of a fused tensor, and nothing of the rest."""

    def make_none(_num_ranks: int, _slot_bytes: int) -> None:
        return None

    if not has_memory:
        monkeypatch.setattr(HostMemory, "make", make_none)
    store = saved(fused=("F32", flat(2, Shard(0), (400, 16))))
    whole = dcp.open(store)["fused"][...]
    split = dcp.Split("fused", ("a", "b", "c"), sizes=(190, 40, 170))

    def load(rank: int, group: Any) -> dcp.LoadReport:
        laid_out, local = zeros(flat(4, Shard(1), (40, 16)), torch.float32, rank)
        report = dcp.load(
            {"b": laid_out},
            store,
            select="b",
            mapping=[split],
            read_once=True,
            process_group=group,
        )
        expected = whole[190:230, 4 * rank : 4 * rank + 4]
        assert np.array_equal(as_items(local), as_items(expected))
        return report

    reports = run_ranks(4, load)
    assert reports[0].read_once
    assert sum(report.bytes_read for report in reports) == 40 * 16 * 4


def test_the_same_layout_or_who_refuses_shares_nothing() -> None:
    shape = (64, 16)
    store = saved(w=("F32", flat(4, Shard(0), shape)))
    assert not load_all(store, {"w": flat(4, Shard(0), shape)}, read_once=None)[0].read_once
    assert not load_all(store, {"w": flat(4, Shard(1), shape)}, read_once=False)[0].read_once


def test_little_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MIN_SHARED_BYTES", 1 << 20)
    store = saved(w=("F32", flat(4, Shard(0), (64, 16))))
    report = load_all(store, {"w": flat(4, Shard(1), (64, 16))}, read_once=None)[0]
    assert (report.read_once, report.bytes_received) == (False, 0)


def test_an_object_store_is_read_in_large_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_remote(_: Store) -> bool:
        return True

    monkeypatch.setattr(limits, "is_remote", is_remote)
    monkeypatch.setattr(limits, "ROUND_BYTES", 16 * BLOCK)
    made: list[int] = []
    make = HostMemory.make

    def note(num_ranks: int, slot_bytes: int) -> HostMemory | None:
        made.append(slot_bytes)
        return make(num_ranks, slot_bytes)

    monkeypatch.setattr(HostMemory, "make", note)
    store = saved(w=("F32", flat(4, Shard(0), (256, 16))))
    reports = load_all(store, {"w": flat(4, Shard(1), (256, 16))}, read_once=None)
    assert made == [16 * BLOCK]
    assert sum(report.bytes_read for report in reports) == 256 * 16 * 4


@pytest.mark.parametrize("is_alike", [True, False])
def test_no_more_memory_is_taken_than_is_read_and_only_for_as_long(
    monkeypatch: pytest.MonkeyPatch, is_alike: bool
) -> None:
    """Of slots that hold far more than there is; and none where the ranks load different things."""
    monkeypatch.setattr(limits, "SLOT_BYTES", 1 << 20)
    taken: dict[int, int] = {}
    found: list[bool] = []
    take_room, plan = HostMemory.take_room, Filling.plan

    def note(self: HostMemory, position: int, num_bytes: Sequence[int]) -> bool:
        done = take_room(self, position, num_bytes)
        taken[position] = os.fstat(self._fd).st_blocks * 512  # pyright: ignore[reportPrivateUsage]
        return done

    def look(self: Filling, *, share: bool, in_memory: bool) -> None:
        plan(self, share=share, in_memory=in_memory)
        memory = self._memory  # pyright: ignore[reportPrivateUsage]
        found.append(memory is not None and memory._fd >= 0)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(HostMemory, "take_room", note)
    monkeypatch.setattr(Filling, "plan", look)
    shape = (1024, 16)
    names = ("a", "b")
    store = saved(**{name: ("F32", flat(4, Shard(0), shape)) for name in names})

    def load(rank: int, group: Any) -> dcp.LoadReport:
        name = "a" if is_alike else names[rank % 2]
        tensor, _ = zeros(flat(4, Shard(1), shape), torch.float32, rank)
        return dcp.load({name: tensor}, store, strict=False, process_group=group)

    reports = run_ranks(4, load)
    assert [report.read_once for report in reports] == [is_alike] * 4
    assert found == [is_alike] * 4
    assert 0 < max(taken.values()) <= 1024 * 16 * 4 + 5 * mmap.PAGESIZE


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("case", ["none made", "one rank cannot open it", "one has no room"])
def test_without_such_memory_ranks_read_as_they_would(
    monkeypatch: pytest.MonkeyPatch, case: str, asked: bool | None
) -> None:
    opened = iter(range(100))
    lock = threading.Lock()
    find, take_room = HostMemory.open, HostMemory.take_room

    def find_some(place: str) -> HostMemory | None:
        with lock:
            return None if next(opened) == 1 else find(place)

    def none_made(_num_ranks: int, _slot_bytes: int) -> None:
        return None

    def no_room(self: HostMemory, position: int, num_bytes: Sequence[int]) -> bool:
        return position != 2 and take_room(self, position, num_bytes)

    if case == "none made":
        monkeypatch.setattr(HostMemory, "make", none_made)
    elif case == "one rank cannot open it":
        monkeypatch.setattr(HostMemory, "open", find_some)
    else:
        monkeypatch.setattr(HostMemory, "take_room", no_room)
    rows, columns = flat(4, Shard(0), (64, 16)), flat(4, Shard(1), (64, 16))
    store = saved(w=("F32", rows), v=("F32", rows))
    reports = load_all(store, {"w": columns, "v": flat(4, Replicate(), (64, 16))}, read_once=asked)
    assert reports[0].read_once == (asked is True)
    times = sum(report.bytes_read for report in reports) / (2 * 64 * 16 * 4)
    assert times == (1 if asked else 4)


def failing_load(store: Store, victim: int, rule: Rule) -> tuple[CheckpointError, list[Any]]:
    """Load with faults on one rank; all must raise the same error. Return what they hold, too."""
    wanted = flat(SIZE, Shard(1), (200, 12))
    held: list[Any] = [None] * SIZE

    def load(rank: int, group: Any) -> None:
        mine = FaultyStore(store, [rule] if rank == victim else [])
        tensor, held[rank] = zeros(wanted, torch.float32, rank)
        dcp.load({"w": tensor}, mine, process_group=group)

    return same_error(load), held


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("nth", [2, 5])  # after header and table
@pytest.mark.parametrize("is_damage", [False, True])
def test_a_read_that_fails_in_any_round_fails_all(victim: int, nth: int, is_damage: bool) -> None:
    store = saved(w=("F32", flat(1, Shard(0), (200, 12))))
    # Made anew: an error that is kept keeps what it was raised in.
    fault = FlipBit(77) if is_damage else RaiseError(StorageError("disk on fire"))
    error, held = failing_load(store, victim, Rule(fault, op="read_into", nth=nth))
    assert isinstance(error, Corrupt if is_damage else StorageError)
    assert f"load: read failed on rank {victim}" in str(error)
    assert "another rank failed" not in str(error)
    # What is damaged has reached nobody.
    whole = as_items(dcp.open(store)["w"][...])
    for rank, local in enumerate(held):
        found = as_items(local)
        expected = whole[:, rank * 4 : rank * 4 + 4]
        assert ((found == expected) | (found == 0)).all()


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("nth", [1, 9])
def test_a_rank_that_fails_while_it_copies_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, victim: int, nth: int
) -> None:
    store = saved(w=("F32", flat(1, Shard(0), (200, 12))))
    ranks: dict[int, int] = {}
    calls = iter(range(1, 1000))
    put = TensorSink.put

    def fail(self: TensorSink, *args: Any) -> None:
        if ranks[threading.get_ident()] == victim and next(calls) == nth:
            raise MemoryError("no more")
        put(self, *args)

    monkeypatch.setattr(TensorSink, "put", fail)

    def load(rank: int, group: Any) -> None:
        ranks[threading.get_ident()] = rank
        tensor, _ = zeros(flat(SIZE, Shard(1), (200, 12)), torch.float32, rank)
        dcp.load({"w": tensor}, store, process_group=group)

    error = same_error(load)
    assert f"load: read failed on rank {victim}: MemoryError: no more" in str(error)
    assert error.overwritten == ("w",)


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("where", ["begin", "phase"])
def test_who_is_interrupted_before_it_reads_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, victim: int, where: str
) -> None:
    store = saved(w=("F32", flat(1, Shard(0), (200, 12))))
    begin, phase = GroupRanks.begin, Recorder.phase

    def begin_or_not(self: GroupRanks, name: str) -> None:
        begin(self, name)
        if where == "begin" and name == "load: read" and self.rank == victim:
            raise KeyboardInterrupt

    def open_or_not(self: Recorder, name: str) -> Any:
        if where == "phase" and name == "read" and self.ranks.rank == victim:
            raise KeyboardInterrupt
        return phase(self, name)

    monkeypatch.setattr(GroupRanks, "begin", begin_or_not)
    monkeypatch.setattr(Recorder, "phase", open_or_not)

    def load(rank: int, group: Any) -> BaseException | None:
        tensor, _ = zeros(flat(SIZE, Shard(1), (200, 12)), torch.float32, rank)
        try:
            dcp.load({"w": tensor}, store, process_group=group)
        except BaseException as error:
            return error.with_traceback(None)

    ends = run_ranks(SIZE, load, seconds=30)
    assert isinstance(ends.pop(victim), KeyboardInterrupt)
    for error in ends:
        assert isinstance(error, CheckpointError)
        assert f"load: read failed on rank {victim}" in str(error)


class Hang(Fault):
    """Does not come back until it is let go."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def before(self) -> None:
        self.released.wait(60)


def check_that_who_does_not_get_on_is_named(victim: int) -> None:
    store = saved(w=("F32", flat(1, Shard(0), (200, 12))))
    hang = Hang()
    told: list[str] = []

    def load(rank: int, group: Any) -> None:
        mine = FaultyStore(store, [Rule(hang, op="read_into", nth=4)] if rank == victim else [])
        tensor, _ = zeros(flat(SIZE, Shard(1), (200, 12)), torch.float32, rank)
        try:
            dcp.load({"w": tensor}, mine, process_group=group, timeout=timedelta(seconds=1.5))
        except CheckpointError as error:
            told.append(f"{type(error).__name__}: {error}")
            if len(told) == SIZE - 1:
                hang.released.set()

    run_ranks(SIZE, load)
    assert len(told) == SIZE
    assert all(text.startswith("RankFailed: load: read") for text in told)
    assert all(f"rank {victim}" in text for text in told[: SIZE - 1]), told


def test_a_rank_that_does_not_get_on_is_named() -> None:
    beside_each_other(check_that_who_does_not_get_on_is_named, [(rank,) for rank in range(SIZE)])


def test_ranks_wait_for_slots_and_what_is_in_them() -> None:
    shared = memory(2)
    assert shared.is_free(0)
    assert shared.is_free(NUM_SLOTS - 1)
    assert not shared.is_free(NUM_SLOTS)
    shared.note_taken(0, 0)
    assert not shared.is_free(NUM_SLOTS), "one of the two is still at it"
    shared.note_taken(1, 0)
    assert shared.is_free(NUM_SLOTS)
    assert not shared.is_filled(1, 0)
    shared.note_filled(1, 0)
    assert shared.is_filled(1, 0)
    assert not shared.is_filled(1, 1)
    assert not shared.is_filled(0, 0)


def test_slots_are_apart_and_the_same_for_all() -> None:
    shared = memory(3, 5000)
    other = HostMemory.open(shared.place)
    assert other is not None
    keys = [(position, number) for position in range(3) for number in range(NUM_SLOTS)]
    assert all(shared.take_room(position, [5000] * NUM_SLOTS) for position in range(3))
    for i, key in enumerate(keys):
        shared.slot(*key)[:] = bytes([i + 1]) * 5000
    for i, (position, number) in enumerate(keys):
        assert bytes(other.slot(position, number + NUM_SLOTS)) == bytes([i + 1]) * 5000
    shared.note_filled(2, 4)
    assert other.is_filled(2, 4)


def test_only_the_memory_that_was_told_is_opened(tmp_path: Path) -> None:
    shared, another = memory(), memory()
    pid, fd, token, *rest = json.loads(shared.place)
    assert json.loads(another.place)[2] != token
    other_fd = json.loads(another.place)[1]
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    with path.open("r+b") as file:
        for place in (
            [pid, other_fd, token, *rest],
            [pid, file.fileno(), token, *rest],
            [pid, fd, token, 100, 1 << 20],
            [2**22 + 1, fd, token, *rest],
        ):
            assert HostMemory.open(json.dumps(place)) is None


def test_who_waits_leaves_when_it_is_called_off() -> None:
    shared = memory()
    shared.wait(lambda: True, never)
    other = HostMemory.open(shared.place)
    assert other is not None
    other.call_off()
    with pytest.raises(CalledOff):
        shared.wait(never, never)
    shared = memory()
    with pytest.raises(CalledOff):
        shared.wait(never, lambda: True)
    with pytest.raises(CalledOff):
        shared.wait(never, never)


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    """What ranks in processes of their own have come to."""
    run = run_python("-m", "tests.checkpoint.sharing.sharing_ranks", timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_processes_share_memory(told: dict[str, list[Any]]) -> None:
    assert told["right"] == ["right"] * 4


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_is_named_by_all_others(told: dict[str, list[Any]], victim: int) -> None:
    ends = told[f"killed {victim}"]
    assert ends[victim] == "killed"
    others = {text for rank, text in enumerate(ends) if rank != victim}
    assert len(others) == 1 or victim == 0
    for text in others:
        assert text.startswith("RankFailed: load: read"), text
        assert f"rank {victim}" in text, text
        assert "lost" in text, text
