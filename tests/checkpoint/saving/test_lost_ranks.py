"""A rank is lost while it writes: others that hold the same write its part, or all fail."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks import relay
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.saving.job import SaveJob
from dtckpt.checkpoint.saving.writers import stand_ins
from dtckpt.checkpoint.state.collector import paused_collector
from dtckpt.dtensor import Layout
from dtckpt.errors import CheckpointError, NotCommitted, RankFailed, StorageError
from dtckpt.storage import Fault, FaultyStore, MemoryStore, RaiseError, Rule, Store

from ...ranks import run_ranks
from .test_stand_ins import DDP, FSDP, HSDP, SHAPE, tensors

SIZE = 4


class Lost(Fault):
    """Ends the connections of a rank; it goes on once it is told to."""

    def __init__(self, group: Any, goes_on: threading.Event) -> None:
        self.group, self.goes_on = group, goes_on

    def before(self) -> None:
        wire = members_of(self.group).wire
        calls = wire._calls  # pyright: ignore[reportPrivateUsage]
        for call in list(calls.values()):
            for link in call.links.values():
                link.connection.shutdown(socket.SHUT_RDWR)
        assert self.goes_on.wait(60)


class Slow(Fault):
    """Holds a rank up, which lives and shows it."""

    def __init__(self, goes_on: threading.Event) -> None:
        self.goes_on = goes_on

    def before(self) -> None:
        assert self.goes_on.wait(60)


def whole(number: int, value: float) -> torch.Tensor:
    return torch.arange(48.0).view(SHAPE) + 100 * number + value


def state(rank: int, layout: Layout, value: float = 0.0) -> dict[str, Any]:
    """Several tensors for every rank to write, and values that a rank keeps for itself."""
    at = layout.mesh.coordinate(rank)
    assert at is not None
    parts = {f"w{n}": whole(n, value)[layout.box(at).slices].clone() for n in range(4)}
    plain = {f"p{n}": torch.full((40,), value + n) for n in range(4)}
    values = {"step": value, "rng": dcp.PerRank({"seed": rank})}
    return dcp.with_layouts(parts | plain | values, dict.fromkeys(parts, layout), rank=rank)


def check(store: Store, value: float = 0.0) -> None:
    """Assert that all of a state is there, on one rank."""
    assert dcp.verify(store).problems == ()
    into = {f"w{n}": torch.empty(SHAPE) for n in range(4)}
    into |= {f"p{n}": torch.empty(40) for n in range(4)}
    dcp.load(into, store, select=["w*", "p*"])
    for n in range(4):
        assert torch.equal(into[f"w{n}"], whole(n, value))
        assert torch.equal(into[f"p{n}"], torch.full((40,), value + n))
    tree = dcp.open(store).state_dict()
    assert tree["step"] == value


Ends = list[Any]
"""Of each rank its report, or the text of the error."""
Rules = Callable[[int, Any, threading.Event], Iterable[Rule]]


def dies(*ranks: int, nth: int = 1) -> Rules:
    """Ranks are lost when they create a file, the how manieth."""
    return lambda rank, group, goes_on: (
        [Rule(Lost(group, goes_on), op="create", nth=nth)] if rank in ranks else []
    )


def run(
    store: Store,
    layout: Layout,
    rules: Rules,
    lost: Sequence[int],
    *,
    background: bool = False,
    value: float = 0.0,
    **options: Any,
) -> Ends:
    """Save on four ranks, of which some are lost; they go on once all others have ended."""
    goes_on = threading.Event()
    others = threading.Barrier(SIZE - len(lost), action=goes_on.set)

    def body(rank: int, group: Any) -> Any:
        mine = FaultyStore(store, list(rules(rank, group, goes_on)))
        given = state(rank, layout, value)
        own = {"process_group": group, **options}
        try:
            if not background:
                return dcp.save(given, mine, **own)
            handle = dcp.async_save(given, mine, **own)
            for held in given.values():
                tensor = getattr(held, "tensor", held)
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(-1.0)
            return handle.result(60)
        except RankFailed as error:
            return str(error)
        finally:
            if rank not in lost:
                others.wait(60)

    return run_ranks(SIZE, body)


def files(store: Store) -> set[str]:
    return {info.name for info in store.list("data")}


def check_stood_in(store: Store, ends: Ends, lost: Sequence[int]) -> None:
    """Assert that all others have the checkpoint, and that the lost ranks' writes are left over."""
    reports = [end for rank, end in enumerate(ends) if rank not in lost]
    assert {report.stood_in_for for report in reports} == {tuple(lost)}
    assert len({report.save_id for report in reports}) == 1
    new = f"data/{reports[0].save_id}/"
    others = {name for name in files(store) if not name.startswith(new)}
    assert sum(report.written_bytes for report in reports) == sum(
        info.size for info in store.list("data") if info.name.startswith(new)
    )
    # They had no connection to learn by, so what they wrote when they came back is there.
    assert {int(name.rpartition("/")[2].partition(".")[0]) for name in others} == set(lost)
    for rank in lost:
        assert "rank 0, which coordinates ranks 0-3, is lost" in ends[rank]


@pytest.mark.parametrize("layout", [DDP, HSDP], ids=["ddp", "hsdp"])
@pytest.mark.parametrize("victim", [1, 3])
def test_a_replica_writes_the_part_of_a_lost_rank(
    layout: Layout, victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    ends = run(store, layout, dies(victim), [victim], value=5.0)
    check_stood_in(store, ends, [victim])
    check(store, 5.0)
    node = dcp.read_manifest(store).tree
    assert all(str(rank) in str(node) for rank in range(SIZE)), "its values were known before"
    other = stand_ins(victim, tensors(*[layout] * 4, *[DDP] * 4))[0]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"rank {victim} is lost" in warning
    assert f"rank {other} writes the part of rank {victim}" in warning


@pytest.mark.parametrize("background", [False, True])
def test_parts_of_lost_ranks_are_compressed_as_others(background: bool) -> None:
    store = MemoryStore()
    more = {"staged_copies": 2} if background else {}
    ends = run(store, HSDP, dies(1), [1], background=background, value=5.0, compress="zstd", **more)
    check_stood_in(store, ends, [1])
    check(store, 5.0)
    assert all(record.is_compressed for record in dcp.read_manifest(store).files)
    assert all(name.endswith(".compressed") for name in files(store))


@pytest.mark.parametrize("victim", [1, 3])
def test_in_the_background_another_rank_has_copied_it(victim: int) -> None:
    store = MemoryStore()
    ends = run(store, HSDP, dies(victim), [victim], background=True, staged_copies=2, value=5.0)
    check_stood_in(store, ends, [victim])
    check(store, 5.0)


def test_nothing_is_held_after_a_save_without_a_lost_rank() -> None:
    store, goes_on = MemoryStore(), threading.Event()

    def body(rank: int, group: Any) -> bool:
        held = {"a": torch.ones(9), "b": torch.ones(8)}
        kept = weakref.ref(held["a"])
        mine = FaultyStore(store, list(dies(1)(rank, group, goes_on)))
        if rank == 1:
            with pytest.raises(RankFailed):
                dcp.save(held, mine, process_group=group)
            return False
        dcp.save(held, mine, process_group=group)
        goes_on.set()
        held.clear()
        return kept() is None

    with paused_collector():
        assert run_ranks(2, body)[0]


def test_without_another_copy_nothing_is_committed() -> None:
    store = MemoryStore()
    ends = run(store, DDP, dies(2), [2], background=True)
    assert "with staged_copies=2 another rank copies it" in ends[0]
    assert ends[0] == ends[1] == ends[3]
    assert ends[0].startswith("save: write failed: rank 2 is lost: ")
    with pytest.raises(NotCommitted):
        dcp.open(store)


def test_what_a_rank_alone_held_cannot_be_saved() -> None:
    store = MemoryStore()
    ends = run(store, FSDP, dies(2), [2])
    assert "rank 2 is lost" in ends[1]
    assert "No other rank can write the part of rank 2: it alone held 'w0' [4:6,0:6]" in ends[1]
    assert ends[0] == ends[1] == ends[3]
    assert not store.exists("manifest.json")


def test_tensors_that_a_rank_keeps_for_itself_cannot_be_saved() -> None:
    store, goes_on = MemoryStore(), threading.Event()

    def body(rank: int, group: Any) -> str:
        mine = FaultyStore(store, list(dies(1)(rank, group, goes_on)))
        own = {"rng": dcp.PerRank(torch.full((9,), float(rank))), "w": torch.ones(30)}
        with pytest.raises(RankFailed) as caught:
            dcp.save(own, mine, process_group=group)
        goes_on.set()
        return str(caught.value)

    assert "it alone held 'rng/@1' [0:9]" in run_ranks(2, body)[0]
    assert not store.exists("manifest.json")


def test_a_rank_and_the_only_one_that_could_write_its_part() -> None:
    store = MemoryStore()
    ends = run(store, HSDP, dies(1, 3), [1, 3])
    assert "rank 3, who might have, died or fell silent, too" in ends[0]
    assert ends[0] == ends[2]
    assert not store.exists("manifest.json")


def test_one_rank_may_write_for_two() -> None:
    store = MemoryStore()
    ends = run(store, DDP, dies(1, 2), [1, 2])
    check_stood_in(store, ends, [1, 2])
    check(store)


def test_a_rank_may_be_lost_while_it_writes_again() -> None:
    store = MemoryStore()

    def rules(rank: int, group: Any, goes_on: threading.Event) -> list[Rule]:
        return [Rule(Lost(group, goes_on), op="create", nth=rank)] if rank in (1, 2) else []

    ends = run(store, DDP, rules, [1, 2])
    reports = [ends[0], ends[3]]
    assert {report.stood_in_for for report in reports} == {(1, 2)}
    check(store)


def lost_between(monkeypatch: pytest.MonkeyPatch, victim: int, goes_on: threading.Event) -> Any:
    """Let a rank be lost in the first phase in which it has nothing to write; give it the group."""
    groups: dict[int, Any] = {}
    stop_if_cancelled = SaveJob.stop_if_cancelled

    def lost_once(job: SaveJob) -> bytes:
        if job.ranks.rank == victim and groups:
            Lost(groups.pop(victim), goes_on).before()
        return stop_if_cancelled(job)

    monkeypatch.setattr(SaveJob, "stop_if_cancelled", lost_once)
    return groups


@pytest.mark.parametrize(("dead", "victim"), [((), 1), ((1,), 2)], ids=["commit", "replace ranks"])
def test_a_rank_may_be_lost_where_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...], victim: int
) -> None:
    store, goes_on = MemoryStore(), threading.Event()
    groups = lost_between(monkeypatch, victim, goes_on)

    def rules(rank: int, group: Any, others_end: threading.Event) -> list[Rule]:
        if rank == victim:
            groups[rank] = group
            threading.Thread(target=lambda: others_end.wait(60) and goes_on.set()).start()
        return list(dies(*dead)(rank, group, others_end))

    lost = [*dead, victim]
    ends = run(store, DDP, rules, lost, value=4.0)
    reports = [end for rank, end in enumerate(ends) if rank not in lost]
    assert {report.stood_in_for for report in reports} == {tuple(lost)}
    assert all("rank 0, which coordinates ranks 0-3, is lost" in ends[rank] for rank in lost)
    check(store, 4.0)


def test_nobody_replaces_the_first_rank() -> None:
    store = MemoryStore()
    ends = run(store, HSDP, dies(0), [0])
    for text in ends[1:]:
        assert "rank 0, which coordinates ranks 0-3, is lost" in text
    assert "No other rank can write the part of rank 1" in ends[0], "to which all others are lost"
    assert not store.exists("manifest.json")


def test_a_rank_that_was_only_slow_gets_the_error_and_damages_nothing() -> None:
    store = MemoryStore()

    def rules(rank: int, group: Any, goes_on: threading.Event) -> list[Rule]:
        return [Rule(Slow(goes_on), op="create")] if rank == 1 else []

    ends = run(store, HSDP, rules, [1], timeout=timedelta(seconds=1.5), value=3.0)
    assert {ends[rank].stood_in_for for rank in (0, 2, 3)} == {(1,)}
    assert "rank 1 is lost: it lives, but has not got on within 1.5 s" in ends[1]
    assert all(name.startswith(f"data/{ends[0].save_id}/") for name in files(store))
    check(store, 3.0)


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_what_is_handed_on_reaches_the_others_without_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setattr(relay, "FAN_OUT", 1)  # each rank gets it from the one before
    monkeypatch.setattr(relay, "LONG_BYTES", 0)
    monkeypatch.setattr(relay, "MOST_BYTES", 0)
    store = MemoryStore()
    ends = run(store, DDP, dies(victim), [victim])
    check_stood_in(store, ends, [victim])
    check(store)


def test_what_has_not_changed_is_borrowed_for_a_lost_rank_too() -> None:
    root = MemoryStore()
    run(root.substore("1"), HSDP, dies(), [])
    ends = run(root.substore("2"), HSDP, dies(3), [3], base=root.substore("1"))
    check_stood_in(root.substore("2"), ends, [3])
    report = ends[0]
    assert sum(end.borrowed_bytes for end in ends if end is not ends[3]) == report.total_bytes
    check(root.substore("2"))


def test_a_checkpoint_is_replaced_without_a_lost_rank() -> None:
    store = MemoryStore()
    run(store, DDP, dies(), [])
    ends = run(store, DDP, dies(1), [1], overwrite=True, value=2.0)
    check_stood_in(store, ends, [1])
    check(store, 2.0)


def test_what_was_saved_meanwhile_is_not_replaced_without_lost_ranks() -> None:
    """The first rank may have been stopped for long, while the job went on without it."""
    store, stopped = MemoryStore(), threading.Event()

    def value(number: float) -> dict[str, torch.Tensor]:
        return {"a": torch.full((9,), number), "b": torch.ones(8)}

    class Restarted(Lost):
        def before(self) -> None:
            dcp.save(value(3.0), store, no_dist=True, overwrite=True)
            stopped.set()
            super().before()

    def body(rank: int, group: Any) -> str:
        dcp.save(value(1.0), store, process_group=group)
        fault = Restarted(group, stopped) if rank == 1 else Slow(stopped)
        mine = FaultyStore(store, [Rule(fault, op="create")])
        with pytest.raises(CheckpointError) as caught:
            dcp.save(value(2.0), mine, process_group=group, overwrite=True)
        return str(caught.value)

    assert "another save committed a checkpoint here" in run_ranks(2, body)[0]
    assert torch.equal(dcp.open(store)["a"][...], torch.full((9,), 3.0))
    assert dcp.verify(store).problems == ()


def test_storage_that_fails_then_is_left_for_another_place() -> None:
    first, second = MemoryStore(), MemoryStore()

    def rules(rank: int, group: Any, goes_on: threading.Event) -> list[Rule]:
        if rank == 2:
            return [Rule(RaiseError(StorageError("full")), op="create", nth=2)]
        return list(dies(1)(rank, group, goes_on))

    ends = run(first, DDP, rules, [1], elsewhere=[second])
    assert {end.url for rank, end in enumerate(ends) if rank != 1} == {second.url}
    assert {end.stood_in_for for rank, end in enumerate(ends) if rank != 1} == {(1,)}
    check(second)
    assert not first.exists("manifest.json")


def test_a_number_of_copies_below_one_is_refused() -> None:
    with pytest.raises(CheckpointError, match="staged_copies is 1 or more, got 0"):
        dcp.async_save({"x": 1}, MemoryStore(), staged_copies=0)


def test_ranks_give_the_same_number_of_copies() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        with pytest.raises(CheckpointError, match="were not given the same staged_copies"):
            dcp.async_save({"x": 1}, store, process_group=group, staged_copies=1 + rank)

    run_ranks(2, body)


def test_more_copies_than_ranks_hold_it_change_nothing() -> None:
    store = MemoryStore()
    ends = run(store, FSDP, dies(), [], background=True, staged_copies=9, value=1.0)
    assert {end.stood_in_for for end in ends} == {()}
    check(store, 1.0)
