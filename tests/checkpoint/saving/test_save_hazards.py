"""What could lose a checkpoint, hang a rank or blame the wrong one, and must not."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.ranks.rendezvous import members_of
from dtckpt.checkpoint.saving import exiting
from dtckpt.errors import Busy, CheckpointError, InUse, LayoutMismatch, NotCommitted, RankFailed
from dtckpt.storage import Delay, Fault, FaultyStore, MemoryStore, Rule

from ...python import run_python
from ...ranks import RanksFailed, run_ranks
from ...waiting import beside_each_other

SHORT = timedelta(seconds=1)


class Call(Fault):
    """Calls a function before the effect."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def before(self) -> None:
        self.call()


def state(value: float = 1.0) -> dict[str, Any]:
    return {f"t{i}": torch.full((50,), value) for i in range(6)}


def intact(store: Any) -> bool:
    return dcp.verify(store).problems == ()


def test_a_checkpoint_is_not_its_own_base_under_another_name(tmp_path: Path) -> None:
    dcp.save(state(), tmp_path / "step-1")
    (tmp_path / "last").symlink_to("step-1")
    with pytest.raises(CheckpointError, match="does not lie beside"):
        dcp.save(state(), tmp_path / "step-1", base=tmp_path / "last", overwrite=True)
    assert intact(tmp_path / "step-1")


def test_a_base_is_kept_by_its_own_name(tmp_path: Path) -> None:
    dcp.save(state(), tmp_path / "step-1")
    (tmp_path / "last").symlink_to("step-1")
    dcp.save(state(), tmp_path / "step-2", base=tmp_path / "last")
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to("step-2")
    assert intact(tmp_path / "step-2")
    with pytest.raises(InUse):
        dcp.delete(tmp_path / "step-1")


def test_a_conjugate_is_not_tied() -> None:
    value = torch.tensor([1 + 2j, 3 + 4j])
    store = MemoryStore()
    dcp.save({"a": value, "b": value.conj(), "c": value.imag, "d": value.conj().imag}, store)
    with dcp.open(store) as checkpoint:
        assert torch.equal(checkpoint["b"][...], value.conj().resolve_conj())
        assert checkpoint["d"][...].tolist() == [-2.0, -4.0]


def test_threads_that_save_alone_have_memory_of_their_own(tmp_path: Path) -> None:
    def save(number: int) -> None:
        for step in range(4):
            value = torch.full((1 << 20,), float(number))
            dcp.async_save({"x": value}, tmp_path / f"{number}-{step}", no_dist=True).result(60)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(3):
        for step in range(4):
            with dcp.open(tmp_path / f"{number}-{step}") as checkpoint:
                assert checkpoint["x"][...].unique().tolist() == [number]


def test_a_base_is_not_replaced_once_another_has_come_to_need_it() -> None:
    root = MemoryStore()
    first, second = root.substore("1"), root.substore("2")
    dcp.save(state(), first)

    def borrow() -> None:
        dcp.save(state(), second, base=first)

    replacing = FaultyStore(first, [Rule(Call(borrow), op="close", nth=1)])
    with pytest.raises(InUse):
        dcp.save(state(2.0), replacing, overwrite=True)
    assert intact(first)
    assert intact(second)


def test_a_base_that_was_replaced_meanwhile_is_not_referred_to() -> None:
    root = MemoryStore()
    first, second = root.substore("1"), root.substore("2")
    dcp.save(state(), first)

    def replace() -> None:
        dcp.save(state(2.0), first, overwrite=True)

    borrowing = FaultyStore(second, [Rule(Call(replace), op="close", nth=1)])
    with pytest.raises(CheckpointError, match="deleted or replaced"):
        dcp.save(state(), borrowing, base=first)
    with pytest.raises(NotCommitted):
        dcp.open(second)
    assert intact(first)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_base_is_not_deleted_while_the_new_one_is_being_committed(overwrite: bool) -> None:
    root = MemoryStore()
    first, second = root.substore("1"), root.substore("2")
    dcp.save(state(), first)
    if overwrite:
        dcp.save(state(), second)
    refused: list[InUse] = []

    def delete_the_base() -> None:
        with pytest.raises(InUse, match=r"a save of 2 beside it .* is being committed") as caught:
            dcp.delete(first)
        refused.append(caught.value)

    faulty = FaultyStore(second, [Rule(Call(delete_the_base), op="publish", name="manifest.json")])
    dcp.save(state(), faulty, base=first, overwrite=overwrite)
    assert refused
    assert intact(first)
    assert intact(second)
    assert [info.name for info in first.list("needed-by")] == ["needed-by/2"], "no claim is left"


def test_a_base_that_is_being_deleted_is_not_used() -> None:
    root = MemoryStore()
    first, second = root.substore("1"), root.substore("2")
    dcp.save(state(), first)
    dcp.save(state(), second)
    before = {info.name: second.read(info.name) for info in second.list()}

    def save() -> None:
        with pytest.raises(CheckpointError, match="is being deleted") as caught:
            dcp.save(state(), second, base=first, overwrite=True)
        assert caught.value.is_certain

    going = FaultyStore(first, [Rule(Call(save), op="list", name="needed-by")])
    dcp.delete(going)
    with pytest.raises(NotCommitted):
        dcp.open(first)
    assert {info.name: second.read(info.name) for info in second.list()} == before
    assert not list(first.list())


def test_a_base_of_which_a_file_is_missing_is_not_used() -> None:
    root = MemoryStore()
    dcp.save(state(), root.substore("1"))
    root.delete([info.name for info in root.list("1/data")])
    report = dcp.save(state(), root.substore("2"), base=root.substore("1"))
    assert report.borrowed_bytes == 0
    assert intact(root.substore("2"))


def test_metadata_is_that_of_the_call() -> None:
    opened = threading.Event()
    store = MemoryStore()
    held = FaultyStore(store, [Rule(Call(lambda: opened.wait(30)), op="create", nth=1)])
    metadata = {"step": 1}
    handle = dcp.async_save(state(), held, metadata=metadata)
    metadata["step"] = 2
    opened.set()
    handle.result(30)
    assert dcp.open(store).metadata == {"step": 1}


def test_a_thread_that_cannot_start_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(vars(exiting)["_unsettled"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            dcp.async_save(state(), MemoryStore())
    assert vars(exiting)["_unsettled"] == before, "the caller was told"
    dcp.async_save(state(), MemoryStore()).result(30)


def test_storage_that_hangs_does_not_hold_up_the_next_save_for_ever() -> None:
    opened = threading.Event()
    held = FaultyStore(MemoryStore(), [Rule(Call(lambda: opened.wait(30)), op="create", nth=1)])
    first = dcp.async_save(state(), held)
    with pytest.raises(Busy, match=r"has not got on for 1 s"):
        dcp.async_save(state(), MemoryStore(), timeout=SHORT)
    opened.set()
    first.result(30)
    dcp.async_save(state(), MemoryStore(), timeout=SHORT).result(30)


def calls(kind: str, store: Any, group: Any) -> None:
    if kind == "async":
        dcp.async_save(state(), store, process_group=group).result(30)
    elif kind == "load":
        dcp.load(state(), store, process_group=group)
    else:
        base = store.sibling("1") if kind == "base" else None
        check: Any = "error" if kind == "check" else None
        dcp.save(state(), store, process_group=group, base=base, check_replicas=check)


@pytest.mark.parametrize("one", ["async", "load", "base", "check"])
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_are_called_otherwise_say_so_at_once(one: str, first: int) -> None:
    root = MemoryStore()
    dcp.save(state(), root.substore("1"))

    def body(rank: int, group: Any) -> None:
        calls(one if rank == first else "save", root.substore("2"), group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    errors = failure.value.errors
    expected = {
        "base": "not given the same base",
        "check": "not given the same check_replicas",
    }.get(one, "same calls in the same order")
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert expected in str(error)
        assert type(error) in (CheckpointError, LayoutMismatch)
    assert not root.exists("2/manifest.json")


FORK = """
import os, sys, torch
import dtckpt.checkpoint as dcp
from dtckpt.storage import Delay, FaultyStore, LocalStore, Rule
store = FaultyStore(LocalStore(sys.argv[1]), [Rule(Delay(1.0), op="create", nth=1)])
handle = dcp.async_save({"x": torch.ones(1000)}, store)
pid = os.fork()
if pid == 0:
    dcp.save({"y": torch.ones(3)}, sys.argv[1] + "-child", no_dist=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
handle.result(30)
"""


def test_a_forked_process_does_not_wait_for_saves_of_its_parent(tmp_path: Path) -> None:
    done = run_python("-c", FORK, tmp_path / "c", timeout=60)
    assert done.returncode == 0, done.stderr
    assert dcp.open(tmp_path / "c")["x"][...].sum() == 1000
    assert dcp.open(tmp_path / "c-child")["y"][...].sum() == 3


def check_that_who_gets_on_is_waited_for(slow: int) -> None:
    store, deadline = MemoryStore(), timedelta(seconds=2)
    late = [Rule(Delay(0.5), op=op) for op in ("write", "read_into")]

    def body(rank: int, group: Any) -> None:
        mine = FaultyStore(store, late if rank == slow else [])
        value = state() | {f"big{i}": torch.zeros(100) for i in range(10)}
        dcp.save(value, mine, process_group=group, timeout=deadline)
        dcp.load(value, mine, process_group=group, timeout=deadline)

    run_ranks(2, body)


def test_a_rank_that_is_slow_but_gets_on_is_waited_for() -> None:
    """Its part takes far longer than the timeout, but no step of it does."""
    beside_each_other(check_that_who_gets_on_is_waited_for, [(0,), (1,)])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_ends_the_writing_of_the_others(victim: int) -> None:
    """Also that of the coordinator, which would else write for long before it listens."""
    store = MemoryStore()
    pieces = {f"t{i}": torch.zeros(1 << 16) for i in range(400)}
    writes: list[int] = []

    def body(rank: int, group: Any) -> None:
        fault: Fault = Call(fail) if rank == victim else Delay(0.1)
        mine = FaultyStore(store, [Rule(fault, op="write")])
        try:
            dcp.save(pieces, mine, process_group=group)
        finally:
            if rank != victim:
                writes.append(sum(call.op == "write" for call in mine.calls))

    def fail() -> None:
        raise OSError("disk on fire")

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    texts = {str(error) for error in failure.value.errors.values()}
    assert len(texts) == 1
    assert "disk on fire" in texts.pop()
    assert writes[0] < 190, "the other one would have written 200 pieces, for 20 s"


def test_an_error_between_phases_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtckpt.checkpoint.saving.job import SaveJob

    own_chunks = SaveJob.own_chunks

    def fail_on_one(job: SaveJob) -> Any:
        if job.ranks.rank == 1:
            raise MemoryError("no room")
        return own_chunks(job)

    monkeypatch.setattr(SaveJob, "own_chunks", fail_on_one)
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        dcp.save(state(), store, process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    assert isinstance(failure.value.errors[1], MemoryError)
    assert isinstance(failure.value.errors[0], RankFailed)
    assert "rank 1 is lost: it has given up: MemoryError: no room" in str(failure.value.errors[0])


def test_groups_that_are_gone_leave_no_threads() -> None:
    def body(_: int, group: Any) -> None:
        members_of(group)

    def wires() -> int:
        return sum(thread.name == "dtckpt-wire" for thread in threading.enumerate())

    gc.collect()
    before = wires()
    for _ in range(5):
        # Gloo may take this long to end a group that nothing was sent over.
        run_ranks(3, body, timeout=timedelta(seconds=1))
    gc.collect()
    limit = time.monotonic() + 60
    while wires() > before and time.monotonic() < limit:
        time.sleep(0.02)
    assert wires() <= before


@pytest.mark.parametrize("call", ["save", "load", "latest"])
def test_what_is_being_handled_around_a_call_is_none_of_it(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job that fails saves once more, in its handler of the error."""
    told: list[BaseException | None] = []
    close = GroupRanks.close

    def note(ranks: GroupRanks, error: BaseException | None = None) -> None:
        told.append(error)
        close(ranks, error)

    def body(_: int, group: Any) -> None:
        into = {"x": torch.ones(2)}
        try:
            into["nothing"]
        except KeyError:
            if call == "latest":
                dcp.latest(tmp_path, process_group=group)
            else:
                getattr(dcp, call)(into, tmp_path / call, process_group=group)

    if call == "load":
        dcp.save({"x": torch.ones(2)}, tmp_path / "load")
    monkeypatch.setattr(GroupRanks, "close", note)
    run_ranks(2, body)
    assert told == [None, None]
