"""The steps of a commit, one by one: what is refused in time, undone, left over, and told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.committing import check_complete, commit, discard, wrong_files
from dtckpt.checkpoint.files.manifest import FileRecord, Manifest, read_manifest_bytes
from dtckpt.checkpoint.files.places import MANIFEST, data_path
from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.dtensor import Mesh
from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.errors import AlreadyCommitted, CheckpointError, InUse, StorageError
from dtckpt.storage import Fault, FaultyStore, MemoryStore, RaiseError, Rule, Store

SAVE_ID = "0" * 16


def state(value: float = 1.0) -> dict[str, Any]:
    return {"t": torch.full((3,), value)}


def loaded(store: Store) -> float:
    into = state(0.0)
    dcp.load(into, store)
    return float(into["t"][0])


def record(rank: int, data_bytes: int) -> FileRecord:
    return FileRecord(
        rank=rank,
        size=data_bytes,
        header_bytes=0,
        data_bytes=data_bytes,
        header_digest="",
        table_digest="",
    )


def empty(save_id: str) -> Manifest:
    """Return the manifest of a checkpoint without files."""
    return Manifest(save_id=save_id, created="", tensors={}, tree={"dict": {}}, files=())


def finished(
    tensors: dict[str, StoredTensor], tree: Any, files: tuple[FileRecord, ...] = ()
) -> Manifest:
    """What is to be committed by a save."""
    return Manifest(save_id=SAVE_ID, tensors=tensors, tree=tree, files=files)


def writes(store: FaultyStore) -> list[str]:
    return [call.op for call in store.calls if call.op in ("create", "publish", "delete")]


class Then(Fault):
    """Has something happen once the request has been carried out."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def after(self) -> None:
        self.act()


class Altered(Fault):
    """Alters the body on its way; the store confirms it, or the reply is lost."""

    def __init__(self, *, is_confirmed: bool = True) -> None:
        self.is_confirmed = is_confirmed

    def sent(self, data: memoryview) -> memoryview:
        return memoryview(bytes(data).replace(b"dtckpt", b"dtckqt"))

    def after(self) -> None:
        if not self.is_confirmed:
            raise StorageError("no reply")


def altering(store: Store, *, is_confirmed: bool = True) -> FaultyStore:
    fault = Altered(is_confirmed=is_confirmed)
    return FaultyStore(store, [Rule(fault, op="publish", name=MANIFEST, nth=1)])


def test_a_place_that_is_taken_is_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    watched = FaultyStore(store)
    with pytest.raises(AlreadyCommitted, match=r"already exists.*nothing was changed"):
        dcp.save(state(2.0), watched)
    assert writes(watched) == []


def test_so_is_a_base_of_others() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(), first)
    dcp.save(state() | {"more": torch.ones(1)}, root.substore("step-2"), base=first)
    watched = FaultyStore(first)
    with pytest.raises(InUse, match="step-2"):
        dcp.save(state(2.0), watched, overwrite=True)
    assert writes(watched) == []


def test_who_refers_to_an_earlier_checkpoint_of_a_place_does_not_keep_that_of_today() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(), first)
    dcp.save(state() | {"more": torch.ones(1)}, root.substore("step-2"), base=first)
    first.delete([MANIFEST])  # by hand
    dcp.save(state(2.0), first)
    dcp.save(state(3.0), first, overwrite=True)
    assert loaded(first) == 3.0


def test_a_base_that_others_came_to_need_during_a_save_is_not_replaced() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(), first)
    dcp.save(state() | {"more": torch.ones(1)}, root.substore("step-2"), base=first)
    before = first.read(MANIFEST)
    with pytest.raises(InUse, match="step-2") as caught:
        commit(first, empty(SAVE_ID), overwrite=True)
    assert caught.value.is_certain
    assert first.read(MANIFEST) == before


def test_a_save_that_failed_for_certain_keeps_nobody_from_deleting_its_base() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(), first)
    refused = StorageError("disk full")
    refused.is_certain = True
    rule = Rule(RaiseError(refused), op="publish", name=MANIFEST)
    with pytest.raises(StorageError, match="disk full"):
        dcp.save(
            state() | {"more": torch.ones(1)},
            FaultyStore(root.substore("step-2"), [rule]),
            base=first,
        )
    dcp.delete(first)
    assert list(root.list()) == []


@pytest.mark.parametrize(
    ("files", "borrowed_bytes"),
    [
        ([record(0, 8)], 0),
        ([record(0, 16)], 0),
        ([record(0, 12)], 4),
        ([record(0, 6), record(0, 6)], 0),
    ],
)
def test_files_that_cannot_hold_the_tensors_are_refused(
    files: list[FileRecord], borrowed_bytes: int
) -> None:
    layout = Layout.replicated(Mesh((1,)), (3,))
    tensor = StoredTensor("t", DTYPES["F32"], (3,), layout)
    made = finished({"t": tensor}, {"dict": {"t": {"tensor": "t"}}}, tuple(files))
    with pytest.raises(CheckpointError, match="expected 12 bytes; the checkpoint was not comm"):
        check_complete(MemoryStore(), made, borrowed_bytes)


def test_what_no_reader_would_take_is_not_committed() -> None:
    tree = {"dict": {"t": {"tensor": "t"}}}
    with pytest.raises(ValueError, match=r"tree and tensors do not name the same tensors: \['t'\]"):
        check_complete(MemoryStore(), finished({}, tree))


@pytest.mark.parametrize(("there", "told"), [(None, "none"), (b"x", "1 bytes")])
def test_a_file_that_only_its_rank_sees_whole_is_refused(there: bytes | None, told: str) -> None:
    store = MemoryStore()
    if there is not None:
        store.publish(data_path(SAVE_ID, 1), there, overwrite=False)
    files = (replace(record(1, 0), size=8),)
    with pytest.raises(CheckpointError, match=f"rank 1 wrote .* finds {told} there; "):
        check_complete(store, finished({}, {"dict": {}}, files))


def test_files_are_found_by_one_listing_and_asked_for_where_it_does_not_tell() -> None:
    store = FaultyStore(MemoryStore())
    files = [record(rank, 10 + rank) for rank in range(4)]
    assert list(wrong_files(store, SAVE_ID, ())) == []
    assert store.calls == ()
    for file in files:
        store.publish(data_path(SAVE_ID, file.rank), bytes(file.size), overwrite=False)
    before = len(store.calls)
    assert list(wrong_files(store, SAVE_ID, files)) == []
    assert [call.op for call in store.calls[before:]] == ["list"]
    store.delete([data_path(SAVE_ID, 1)])
    store.publish(data_path(SAVE_ID, 2), b"x", overwrite=True)
    assert list(wrong_files(store, SAVE_ID, files)) == [(files[1], None), (files[2], 1)]
    store.publish(data_path(SAVE_ID, 3), bytes(20), overwrite=True)
    before = len(store.calls)
    assert list(wrong_files(store, SAVE_ID, files, only_longer=True)) == [(files[3], 20)]
    assert [call.op for call in store.calls[before:]] == ["list", "stat"]


def test_a_commit_that_cannot_be_read_back_is_one(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    old = {info.name for info in store.list("data")}
    cut_off: list[bool] = []

    class CutOff(Fault):
        def before(self) -> None:
            if cut_off:
                raise StorageError("the network is down")

    rules = [
        Rule(Then(lambda: cut_off.append(True)), op="publish", name=MANIFEST),
        Rule(CutOff(), op="read", name=MANIFEST),
    ]
    dcp.save(state(2.0), FaultyStore(store, rules), overwrite=True)
    assert "committed, but could not be read back: the network is down" in caplog.text
    assert loaded(store) == 2.0
    assert old <= {info.name for info in store.list("data")}, "nothing is deleted in doubt"


def test_a_commit_that_is_replaced_at_once_has_been_one(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    rival = Then(lambda: dcp.save(state(3.0), store, overwrite=True))
    once = Rule(rival, op="publish", name=MANIFEST, nth=1)
    dcp.save(state(2.0), FaultyStore(store, [once]), overwrite=True)
    assert "replaced at once by another save, " in caplog.text
    assert loaded(store) == 3.0
    assert len(list(store.list("data"))) == 1, "nothing of the other two is left"


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_damaged_replacement_is_undone(
    is_confirmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    with pytest.raises(StorageError, match="has confirmed" if is_confirmed else "no reply"):
        dcp.save(state(2.0), altering(store, is_confirmed=is_confirmed), overwrite=True)
    assert loaded(store) == 1.0
    assert "the checkpoint that was there before was put back" in caplog.text


def test_a_damaged_replacement_that_cannot_be_undone_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    down = [Rule(Altered(), op="publish", name=MANIFEST, nth=1)]
    down.append(Rule(RaiseError(ValueError("down")), op="publish", name=MANIFEST, nth=2))
    with pytest.raises(StorageError, match="other bytes are there although"):
        dcp.save(state(2.0), FaultyStore(store, down), overwrite=True)
    assert "a damaged manifest may have been left here: down" in caplog.text


@pytest.mark.parametrize("before", ["", "nothing", "damaged"])
def test_nothing_is_put_back_where_nothing_was_or_no_harm_was_done(
    before: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    if before == "damaged":
        store.publish(MANIFEST, b"damaged", overwrite=False)
    if not before:
        commit(store, empty("1" * 16), overwrite=False)
        lost = Rule(RaiseError(StorageError("no reply")), op="publish", name=MANIFEST)
        faulty = FaultyStore(store, [lost])
    else:
        faulty = altering(store)
    there = store.read(MANIFEST) if before != "nothing" else b""
    with caplog.at_level(logging.DEBUG), pytest.raises(StorageError, match=r"no reply|other bytes"):
        commit(faulty, empty("2" * 16), overwrite=before != "nothing")
    assert not caplog.records
    assert writes(faulty) == ["publish"]
    assert (store.read(MANIFEST) == there) == (not before)


def test_a_damaged_checkpoint_is_replaced_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.publish(MANIFEST, b"damaged", overwrite=False)
    commit(store, empty(SAVE_ID), overwrite=True)
    assert store.read(MANIFEST) == empty(SAVE_ID).to_bytes()
    assert not caplog.records


def test_files_that_cannot_be_deleted_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    broken = FaultyStore(store, [Rule(RaiseError(ValueError("odd name")), op="delete")])
    dcp.save(state(2.0), broken, overwrite=True)
    assert "files of the replaced checkpoint are left over: odd name" in caplog.text
    discard(broken, SAVE_ID, 0)
    assert "a file of a failed save is left over: odd name" in caplog.text


def test_a_manifest_that_is_replaced_by_a_shorter_one_is_read_anew() -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    shorter = empty("2" * 16).to_bytes()
    replaced = Then(lambda: store.publish(MANIFEST, shorter, overwrite=True))
    racing = FaultyStore(store, [Rule(replaced, op="stat", nth=1)])
    assert read_manifest_bytes(racing) == shorter
