"""Faults that torch.distributed.checkpoint 2.13 answers with wrong values, hangs or silence.

One test a fault, by name. What the other library does is told in each docstring; most are looked at
from more sides in the files beside this one.
from tests.python import run_python
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.writing import Chunk
from dtckpt.checkpoint.saving.job import SaveJob
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Partial, Shard
from dtckpt.errors import (
    CheckpointError,
    Corrupt,
    LayoutMismatch,
    NotCommitted,
    StorageError,
)
from dtckpt.storage import Fault, FaultyStore, LocalStore, MemoryStore, RaiseError, Rule, Store

from ..dtensor.rank_meshes import run_on_mesh, scattered
from ..python import run_python
from ..ranks import RanksFailed, run_ranks

SIZE = 3


class Call(Fault):
    """Calls a function before the effect."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def before(self) -> None:
        self.call()


def state(value: float = 1.0) -> dict[str, Any]:
    """Several tensors for every rank to write, and a value."""
    return {f"t{i}": torch.full((50,), value) for i in range(2 * SIZE)} | {"step": value}


def same_error(body: Callable[[int, Any], Any]) -> CheckpointError:
    """Run ranks, of which each must raise, and return their common error."""
    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, body)
    errors = failure.value.errors
    assert set(errors) == set(range(SIZE))
    assert len({(type(error), str(error)) for error in errors.values()}) == 1, errors
    assert isinstance(errors[0], CheckpointError)
    return errors[0]


def saved(value: float = 1.0) -> MemoryStore:
    """A checkpoint that three ranks wrote."""
    store = MemoryStore()
    run_ranks(SIZE, lambda _, group: dcp.save(state(value), store, process_group=group))
    return store


def data_files(store: Store) -> list[str]:
    return [info.name for info in store.list("data")]


def changed(store: Store, name: str, change: Callable[[bytes], bytes]) -> MemoryStore:
    """Return a copy of a checkpoint in which one object is another, or none where it is empty."""
    objects = {info.name: store.read(info.name) for info in store.list()}
    objects[name] = change(objects[name])
    return MemoryStore({name: data for name, data in objects.items() if data})


def refuse_to_load(store: Store, kind: type[CheckpointError], text: str) -> None:
    """Assert that a load raises and leaves its destinations as they were."""
    into = state(-1.0)
    with pytest.raises(kind, match=text):
        dcp.load(into, store)
    assert all((value == -1.0).all() for value in into.values() if isinstance(value, torch.Tensor))
    assert into["step"] == -1.0


def test_an_exception_in_a_thread_that_writes_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There: the save returns success, and the data are missing at load (pytorch#191391)."""
    monkeypatch.setattr("dtckpt.storage.local.store._DIRECT_BYTES", 1)
    writers: list[str] = []

    def fail() -> None:
        writers.append(threading.current_thread().name)
        raise OSError("disk on fire")

    small, large = {"x": torch.zeros(1000)}, {"x": torch.zeros(5 << 20)}

    def save_in_background(value: dict[str, Any], store: Store) -> None:
        dcp.async_save(value, store).result(60)

    for save in (partial(f, v) for f in (dcp.save, save_in_background) for v in (small, large)):
        store = FaultyStore(LocalStore(tmp_path, direct_io=True), [Rule(Call(fail), op="write")])
        with pytest.raises(CheckpointError, match="disk on fire"):
            save(store)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert "dtckpt-write" in writers


def test_a_flipped_byte_in_tensor_data_is_not_loaded() -> None:
    """There: the load succeeds with a wrong value."""
    store = saved()
    name = data_files(store)[1]
    with dcp.open(store) as checkpoint:
        size = sum(tensor[...].nbytes for tensor in checkpoint.values())
    assert size == 2 * SIZE * 200
    header = int.from_bytes(store.read(name, 0, 8), "little") + 8
    damaged = changed(
        store, name, lambda data: data[:header] + bytes([data[header] ^ 64]) + data[header + 1 :]
    )
    with pytest.raises(Corrupt, match=name):
        dcp.load(state(), damaged)


def test_a_truncated_data_file_is_found_before_anything_is_loaded() -> None:
    """There: earlier tensors have been overwritten by then."""
    store = saved()
    for name in data_files(store):
        refuse_to_load(changed(store, name, lambda data: data[:-1]), Corrupt, name)


def test_a_missing_data_file_is_found_before_anything_is_loaded() -> None:
    """There: a FileNotFoundError within an exception that ``except Exception`` does not catch."""
    store = saved()
    for name in data_files(store):
        refuse_to_load(changed(store, name, lambda _: b""), Corrupt, name)


def test_a_damaged_manifest_is_told_from_an_absent_one() -> None:
    """There: both are an AssertionError, after a message about falling back."""
    store = saved()
    refuse_to_load(changed(store, "manifest.json", lambda data: data[:-9]), Corrupt, "manifest")
    refuse_to_load(changed(store, "manifest.json", lambda _: b""), NotCommitted, "no committed")


def test_one_rank_does_not_save_a_part_as_the_whole() -> None:
    """There: it is accepted, and a load leaves the other ranks' parts uninitialised."""
    root = MemoryStore()

    def body(mesh: DeviceMesh) -> None:
        part = scattered(torch.arange(6.0), mesh, [Shard(0)])
        with pytest.raises(LayoutMismatch, match="'w'"):
            dcp.save({"w": part}, root.substore(str(mesh.get_local_rank())), no_dist=True)

    run_on_mesh((2,), body)
    assert list(root.list()) == []


def test_what_one_rank_saved_alone_is_not_loaded_as_the_whole() -> None:
    """There: tensors are silently filled by half, if saved without collectives."""
    store = MemoryStore()
    dcp.save({"w": torch.arange(3.0)}, store, no_dist=True)

    def body(mesh: DeviceMesh) -> None:
        whole = {"w": scattered(torch.full((6,), -1.0), mesh, [Shard(0)])}
        with pytest.raises(LayoutMismatch, match=r"float32\[3\], wanted as float32\[6\]"):
            dcp.load(whole, store, process_group=mesh.get_group())
        assert (whole["w"].to_local() == -1.0).all()

    run_on_mesh((2,), body)


def test_a_checkpoint_that_lacks_one_ranks_file_is_not_resharded() -> None:
    """There: a reader leaves a hole, and the consolidation fills it with zeros."""
    store = MemoryStore()

    def save(mesh: DeviceMesh) -> None:
        part = scattered(torch.ones(6, 4), mesh, [Shard(0)])
        dcp.save({"w": part}, store, process_group=mesh.get_group())

    run_on_mesh((SIZE,), save)
    for name in data_files(store):
        target = MemoryStore()
        with pytest.raises(Corrupt, match=name):
            dcp.reshard(changed(store, name, lambda _: b""), target, Mesh((1,)), [])
        assert not target.exists("manifest.json")


def test_stored_chunks_that_do_not_cover_a_tensor_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There: never looked at when loading. Here all digests of the files are right."""
    own_chunks = SaveJob.own_chunks

    def under_another_name(job: SaveJob) -> list[Chunk]:
        return [
            replace(chunk, tensor=chunk.tensor._replace(name="other"))
            if chunk.tensor.name == "t3"
            else chunk
            for chunk in own_chunks(job)
        ]

    monkeypatch.setattr(SaveJob, "own_chunks", under_another_name)
    store = MemoryStore()
    dcp.save(state(), store, no_dist=True)
    monkeypatch.undo()
    refuse_to_load(store, Corrupt, "t3")
    assert any("t3" in str(problem) for problem in dcp.verify(store).problems)


def test_plain_values_that_differ_between_ranks_are_refused() -> None:
    """There: one of them wins silently, for other keys that of another rank."""
    store = MemoryStore()
    error = same_error(
        lambda rank, group: dcp.save(
            {"t": torch.tensor(float(rank))}, store.substore("a"), process_group=group
        )
    )
    assert isinstance(error, LayoutMismatch)
    assert "'t' has different values on rank 0" in str(error)
    error = same_error(
        lambda rank, group: dcp.save({"seed": rank}, store.substore("b"), process_group=group)
    )
    assert "value 'seed' differs between ranks" in str(error)
    assert list(store.list()) == []


def test_another_dtype_is_not_converted_unasked() -> None:
    """There: a silent cast, even of floating point to integers (pytorch#187138)."""
    store = saved()
    for dtype in (torch.bfloat16, torch.int32, torch.float64):
        into = state(-1.0) | {"t5": torch.full((50,), -1, dtype=dtype)}
        with pytest.raises(LayoutMismatch, match="t5: saved as float32"):
            dcp.load(into, store)
        assert all((into[f"t{i}"] == -1).all() for i in range(6))


def test_keys_that_nobody_wants_are_told() -> None:
    """There: ignored silently."""
    store = saved()
    into = {"t0": torch.zeros(50)}
    with pytest.raises(LayoutMismatch, match="t5"):
        dcp.load(into, store)
    assert not into["t0"].any()
    report = dcp.load(into, store, strict=False)
    assert set(report.unexpected) == {"t1", "t2", "t3", "t4", "t5", "step"}
    assert into["t0"].all()


def failing_store(victim: int, rank: int, error: BaseException, store: Store) -> Store:
    return FaultyStore(store, [Rule(RaiseError(error), op="create")] if rank == victim else [])


def test_an_ordinary_exception_of_one_rank_is_raised_by_all() -> None:
    """There: this is the one kind that works."""
    store = MemoryStore()
    error = same_error(
        lambda rank, group: dcp.save(
            state(), failing_store(1, rank, OSError("disk on fire"), store), process_group=group
        )
    )
    assert "failed on rank 1: OSError: disk on fire" in str(error)


def test_an_exception_that_cannot_be_pickled_is_raised_by_all() -> None:
    """There: that rank gets a TypeError and all others hang until the group's timeout."""
    store = MemoryStore()
    held = ValueError("held", threading.Lock())
    error = same_error(
        lambda rank, group: dcp.save(
            state(), failing_store(2, rank, held, store), process_group=group
        )
    )
    assert "failed on rank 2: ValueError: ('held', <unlocked" in str(error)


class Particular(Exception):
    """Can be pickled, but not made again from its pickle."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def test_an_exception_that_cannot_be_unpickled_is_raised_by_all() -> None:
    """There: rank 0 dies of unpickling it, and the others hang."""
    store = MemoryStore()
    error = same_error(
        lambda rank, group: dcp.save(
            state(), failing_store(1, rank, Particular(code=7), store), process_group=group
        )
    )
    assert "failed on rank 1: Particular: code 7" in str(error)


class Broken:
    """A component that fails to give its state, or to take it."""

    def __init__(self, *, gives: bool, takes: bool) -> None:
        self.gives = gives
        self.takes = takes

    def state_dict(self) -> dict[str, Any]:
        if not self.gives:
            raise ValueError("no state")
        return {"n": 1}

    def load_state_dict(self, _: object) -> None:
        if not self.takes:
            raise ValueError("not taken")


def test_components_and_stores_that_fail_on_one_rank_fail_all() -> None:
    """There: what user objects and the choice of a storage raise makes the other ranks hang."""
    root = MemoryStore()
    dcp.save(state() | {"c": Broken(gives=True, takes=True)}, root.substore("good"))

    def give(rank: int, group: Any) -> None:
        value = state() | {"c": Broken(gives=rank != 1, takes=True)}
        dcp.save(value, root.substore("a"), process_group=group)

    def take(rank: int, group: Any) -> None:
        value = state() | {"c": Broken(gives=True, takes=rank != 1)}
        dcp.load(value, root.substore("good"), process_group=group)

    def choose(rank: int, group: Any) -> None:
        where = "nowhere://x" if rank == 1 else root.substore("b")
        dcp.save(state(), where, process_group=group)

    for body, text in ((give, "no state"), (take, "not taken"), (choose, "nowhere")):
        error = same_error(body)
        assert "rank 1" in str(error)
        assert text in str(error)


def test_a_full_disk_of_one_rank_leaves_nothing_that_looks_complete() -> None:
    """There: the others hang in a barrier, and the directory has its metadata."""
    store = MemoryStore()
    broken = [Rule(RaiseError(OSError(28, "No space left on device")), op="close")]
    error = same_error(
        lambda rank, group: dcp.save(
            state(), FaultyStore(store, broken if rank == 2 else []), process_group=group
        )
    )
    assert "rank 2" in str(error)
    assert "No space left" in str(error)
    assert list(store.list()) == []


def test_a_copy_for_the_background_that_fails_is_raised_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There: the future of the staging reports success, and other ranks wait in collectives."""
    copy_chunks = SaveJob.copy_chunks

    def fail_on_one(job: SaveJob, *given: Any) -> int:
        if job.ranks.rank == 1:
            raise MemoryError("no room for copies")
        return copy_chunks(job, *given)

    monkeypatch.setattr(SaveJob, "copy_chunks", fail_on_one)
    store = MemoryStore()
    error = same_error(
        lambda _, group: dcp.async_save(state(), store, process_group=group).result(60)
    )
    assert "save: write failed on rank 1: MemoryError: no room for copies" in str(error)
    assert list(store.list()) == []


def test_saves_in_the_background_and_collectives_of_the_training_go_together() -> None:
    """There: two saves, or one beside a collective on their group, time out or close the pair."""
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        handles: list[dcp.SaveHandle] = []
        for step in range(3):
            done = threading.Event()
            held = Rule(Call(partial(done.wait, 60)), op="create")
            target = FaultyStore(store.substore(f"step-{step}"), [held])
            handles.append(dcp.async_save(state(float(step)), target, process_group=group))
            value = torch.ones(1000)
            group.allreduce([value]).wait()
            assert (value == SIZE).all()
            assert not handles[-1].done()
            done.set()
        for handle in handles:
            handle.result(60)

    run_ranks(SIZE, body)
    for number in range(3):
        into = state(-1.0)
        dcp.load(into, store.substore(f"step-{number}"))
        assert into["step"] == number


def test_a_killed_rank_is_missed_at_once() -> None:
    """There: its peers wait for the timeout of the group, half an hour by default."""
    program = (
        "from tests.checkpoint.kill_ranks import run_case; import dataclasses, json; "
        "print(json.dumps(dataclasses.asdict("
        "run_case(1, 3, after_effect=False, overwrite=False))))"
    )
    run = run_python("-W", "ignore", "-c", program)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["killed"]
    assert outcome["survivor"] == "ok", "long before its deadline of ten minutes"
    assert (outcome["previous"], outcome["new"]) == ("1.0", "2.0"), "it has written both parts"


def test_values_beside_tensors_leave_the_files_readable_by_all(tmp_path: Path) -> None:
    """There: a value among the tensors makes a safetensors file that nobody can read."""
    value: dict[str, Any] = {
        "w": torch.arange(6.0),
        "note": "text",
        "step": 3,
        "none": None,
        "b": b"\0\xff",
    }
    dcp.save(value, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("data/*/*.safetensors")
    assert torch.equal(load_file(path)["w"], value["w"])
    assert dcp.open(tmp_path / "c").state_dict()["b"] == b"\0\xff"


def test_integers_and_booleans_are_resharded() -> None:
    """There: a TypeError from ``torch.finfo`` (pytorch#192485)."""
    value = {"n": torch.arange(12).view(4, 3), "b": torch.arange(12).view(4, 3) % 2 == 0}
    source, target = MemoryStore(), MemoryStore()

    def save(mesh: DeviceMesh) -> None:
        parts = {name: scattered(whole, mesh, [Shard(0)]) for name, whole in value.items()}
        dcp.save(parts, source, process_group=mesh.get_group())

    run_on_mesh((2,), save)
    dcp.reshard(source, target, Mesh((3,), ("x",)), dcp.parse_rules("*=S(1)"))
    with dcp.open(target) as checkpoint:
        for name, whole in value.items():
            assert torch.equal(checkpoint[name][...], whole)


def test_loading_writes_nothing(tmp_path: Path) -> None:
    """There: a path on a read-only mount needs an ancestor that can be written."""
    dcp.save(state(3.0), tmp_path / "c")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    into, store = state(), FaultyStore(LocalStore(tmp_path / "c"))
    dcp.load(into, store)
    assert into["step"] == 3.0
    assert {call.op for call in store.calls} <= {"stat", "read", "read_into", "list"}
    dcp.load(into, str(tmp_path / "c"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_pending_sums_are_refused_by_name() -> None:
    """There: refused, too."""
    store = MemoryStore()

    def body(mesh: DeviceMesh) -> None:
        terms = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(CheckpointError, match=r"'w' .* terms of a reduction"):
            dcp.save({"w": terms}, store, process_group=mesh.get_group())

    run_on_mesh((2,), body)
    assert list(store.list()) == []


class TwoBoxes:
    """A tensor of which a rank holds rows that do not lie together."""

    def __init__(self, shape: tuple[int, int], rows: dict[int, torch.Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = torch.float32
        self.rows = rows

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size((first, 0)), sizes=part.shape)
            for first, part in self.rows.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows[index.offset[0]]


def test_rows_that_do_not_lie_together_are_saved_and_loaded() -> None:
    """There: one offset and one size per rank is all that can be said."""
    whole = torch.arange(32.0).view(8, 4)
    store = MemoryStore()

    def part(rank: int, source: torch.Tensor) -> TwoBoxes:
        firsts = (2 * rank, 2 * rank + 4)
        return TwoBoxes((8, 4), {first: source[first : first + 2].clone() for first in firsts})

    run_ranks(2, lambda r, group: dcp.save({"w": part(r, whole)}, store, process_group=group))
    with dcp.open(store) as checkpoint:
        assert torch.equal(checkpoint["w"][...], whole)

    def load(rank: int, group: Any) -> None:
        into = part(rank, torch.zeros(8, 4))
        dcp.load({"w": into}, store, process_group=group)
        for first, rows in into.rows.items():
            assert torch.equal(rows, whole[first : first + 2])

    run_ranks(2, load)

    def load_columns(mesh: DeviceMesh) -> None:
        into = {"w": scattered(torch.zeros(8, 4), mesh, [Shard(1)])}
        dcp.load(into, store, process_group=mesh.get_group())
        assert torch.equal(into["w"].full_tensor(), whole)

    run_on_mesh((SIZE,), load_columns)


def test_reads_near_the_end_of_a_file_are_exact() -> None:
    """There: seeking backwards from the end goes past it."""
    store = saved()
    for name in data_files(store):
        size, whole = store.stat(name).size, store.read(name)
        assert store.read(name, size - 5, size) == whole[-5:]
        assert store.read(name, size, size) == b""
        with pytest.raises(StorageError):
            store.read(name, size - 5, size + 1)
    with dcp.open(store) as checkpoint:
        assert checkpoint["t5"][-1:].tolist() == [1.0]
