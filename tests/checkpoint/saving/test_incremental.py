"""Incremental saves: only what has changed is written, and what is referred to cannot go away."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Replicate, Shard
from dtckpt.errors import (
    CheckpointError,
    Corrupt,
    InUse,
    LayoutMismatch,
    NotCommitted,
    ObjectNotFound,
    StorageError,
)
from dtckpt.storage import (
    Fault,
    FaultyStore,
    LocalStore,
    MemoryStore,
    RaiseError,
    Rule,
    Store,
)

from ...dtensor.rank_meshes import run_on_mesh
from ...ranks import RanksFailed, run_ranks

FROZEN = 100_000


def state(step: int) -> dict[str, Any]:
    """A large frozen part, and a small one that changes with every step."""
    frozen = torch.arange(FROZEN, dtype=torch.float32)
    return {
        "frozen": {"w": frozen, "b": frozen[:1000].view(10, 100).t()},
        "lora": {"a": torch.full((50, 4), float(step)), "same": torch.ones(30)},
        "step": step,
    }


def data_bytes(store: Store) -> int:
    return sum(info.size for info in store.list("data"))


def check(store: Store, step: int) -> None:
    expected = state(step)
    into: dict[str, Any] = {
        part: {name: torch.full(t.shape, -1.0) for name, t in expected[part].items()}
        for part in ("frozen", "lora")
    }
    into["step"] = -1
    dcp.load(into, store)
    for part in ("frozen", "lora"):
        for name, tensor in expected[part].items():
            assert torch.equal(into[part][name], tensor)
    assert into["step"] == step


@pytest.mark.parametrize("background", [False, True])
def test_only_what_has_changed_is_written(background: bool) -> None:
    root = MemoryStore()
    first, second, third = (root.substore(f"step-{i}") for i in (1, 2, 3))
    dcp.save(state(1), first)

    def save(step: int, target: Store, base: Store) -> dcp.SaveReport:
        if background:
            handle = dcp.async_save(state(step), target, base=base)
            report = handle.result(30)
            assert handle.progress().written_bytes == handle.progress().total_bytes
            return report
        return dcp.save(state(step), target, base=base)

    report = save(2, second, first)
    assert report.borrowed_bytes == (FROZEN + 1000 + 30) * 4
    assert report.total_bytes == report.borrowed_bytes + 200 * 4
    assert data_bytes(second) == report.written_bytes < 6000
    check(second, 2)
    save(3, third, second)
    assert {file.source for file in dcp.read_manifest(third).borrowed} == {"step-1"}
    check(third, 3)
    assert dcp.verify(third).problems == ()
    assert dcp.verify(third).bytes_checked > FROZEN * 4


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("changed", ["first", "second", "both", "none"])
def test_direct_writes_hold_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, changed: str
) -> None:
    """What is copied for the background lies as in a file of all chunks, borrowed ones included."""
    monkeypatch.setattr("dtckpt.storage.local.store._DIRECT_BYTES", 1)
    state = {"first": torch.randn(10_000), "second": torch.randn(20_000)}
    base, store = (LocalStore(tmp_path / name, direct_io=True) for name in ("1", "2"))
    dcp.save(state, base)
    for name in ("first", "second"):
        if changed in (name, "both"):
            state[name] = torch.randn_like(state[name])
    if background:
        dcp.async_save(state, store, base=base).result(60)
    else:
        dcp.save(state, store, base=base)
    with dcp.open(store) as checkpoint:
        for name, value in state.items():
            assert torch.equal(checkpoint[name][...], value)


def test_nothing_changed_at_all() -> None:
    root = MemoryStore()
    for number in (1, 2):
        base = root.substore("step-1") if number == 2 else None
        report = dcp.save(state(7), root.substore(f"step-{number}"), base=base)
    assert report.written_bytes < 5000
    check(root.substore("step-2"), 7)


def test_every_way_to_read_follows_references(tmp_path: Path) -> None:
    dcp.save(state(1), tmp_path / "step-1")
    dcp.save(state(2), tmp_path / "step-2", base=tmp_path / "step-1")
    with dcp.open(tmp_path / "step-2") as checkpoint:
        assert checkpoint["frozen/w"][500:505].tolist() == [500, 501, 502, 503, 504]
        assert checkpoint["lora/a"][3, 1] == 2
    dcp.reshard(
        tmp_path / "step-2", tmp_path / "whole", Mesh((2,), ("dp",)), dcp.parse_rules("*=S(0)")
    )
    assert dcp.read_manifest(LocalStore(tmp_path / "whole")).borrowed == ()
    shutil.copytree(tmp_path, tmp_path.parent / "moved")
    with dcp.open(tmp_path.parent / "moved" / "step-2") as checkpoint:
        shutil.rmtree(tmp_path / "step-1")
        assert checkpoint["frozen/w"][FROZEN - 1] == FROZEN - 1


def test_ranks_refer_to_what_each_of_them_wrote() -> None:
    root = MemoryStore()

    def body(rank: int, group: Any) -> dcp.SaveReport:
        tensors = {f"t{i}": torch.full((5000,), float(i)) for i in range(6)}
        dcp.save({**tensors, "n": 0}, root.substore("a"), process_group=group)
        tensors["t3"] = torch.zeros(5000)
        return dcp.save(
            {**tensors, "n": 1}, root.substore("b"), base=root.substore("a"), process_group=group
        )

    reports = run_ranks(3, body)
    assert sum(report.borrowed_bytes for report in reports) == 5 * 20_000
    assert len(dcp.read_manifest(root.substore("b")).borrowed) == 3
    with dcp.open(root.substore("b")) as checkpoint:
        assert checkpoint["t3"][...].sum() == 0
        assert all(checkpoint[f"t{i}"][...].unique().tolist() == [i] for i in (0, 1, 2, 4, 5))


def test_changed_dtypes_shapes_and_cuts_are_written_anew() -> None:
    root = MemoryStore()
    dcp.save({"x": torch.zeros(8), "y": torch.zeros(4), "z": torch.zeros(4)}, root.substore("a"))
    new = {"x": torch.zeros(4, 2), "y": torch.zeros(4, dtype=torch.int32), "w": torch.zeros(4)}
    report = dcp.save(new, root.substore("b"), base=root.substore("a"))
    assert report.borrowed_bytes == 0
    assert dcp.read_manifest(root.substore("b")).borrowed == ()
    assert dcp.verify(root.substore("b")).problems == ()


def test_a_change_in_any_block_is_seen() -> None:
    root, large = MemoryStore(), torch.zeros(3 << 20, dtype=torch.uint8)
    dcp.save({"x": large}, root.substore("a"))
    for i, at in enumerate((0, 1 << 20, (1 << 20) - 1, (3 << 20) - 1)):
        changed = large.clone()
        changed[at] = 1
        report = dcp.save({"x": changed}, root.substore(f"b{i}"), base=root.substore("a"))
        assert report.borrowed_bytes == 0
    report = dcp.save(
        {"x": large.view(3, -1).t().contiguous().t().reshape(-1)},
        root.substore("c"),
        base=root.substore("a"),
    )
    assert report.borrowed_bytes == 3 << 20


def test_a_missing_base_is_named() -> None:
    root = MemoryStore()
    dcp.save(state(1), root.substore("step-1"))
    dcp.save(state(2), root.substore("step-2"), base=root.substore("step-1"))
    (file,) = [info.name for info in root.list("step-1/data")]
    kept = root.read(file)
    root.delete([file])
    into = {"frozen": {name: torch.zeros(t.shape) for name, t in state(0)["frozen"].items()}}
    with pytest.raises(Corrupt, match=r"incremental .*'step-1' beside it.*is missing"):
        dcp.load(into, root.substore("step-2"), strict=False)
    assert into["frozen"]["w"].sum() == 0
    (problem,) = dcp.verify(root.substore("step-2")).problems
    assert "'step-1' beside it" in problem.message
    assert set(problem.tensors) == {"frozen/w", "frozen/b", "lora/same"}
    root.publish(file, kept[:-9] + b"damaged!!", overwrite=True)
    with pytest.raises(Corrupt, match="step-1"):
        dcp.load(into, root.substore("step-2"), strict=False)


def test_a_base_in_use_is_not_deleted_or_replaced() -> None:
    root = MemoryStore()
    first, second, third = (root.substore(f"step-{i}") for i in (1, 2, 3))
    dcp.save(state(1), first)
    dcp.save(state(2), second, base=first)
    dcp.save(state(3), third, base=second)
    for call in (lambda: dcp.delete(first), lambda: dcp.save(state(9), first, overwrite=True)):
        with pytest.raises(InUse, match="step-2, step-3"):
            call()
        assert not list(first.list("deleted")), "or it could not be a base any more"
    check(third, 3)
    dcp.delete(second)
    with pytest.raises(NotCommitted):
        dcp.open(second)
    check(third, 3)
    with pytest.raises(InUse, match="checkpoints step-3 beside"):
        dcp.delete(first)
    dcp.delete(third)
    dcp.delete(first)
    assert list(root.list()) == []
    with pytest.raises(NotCommitted):
        dcp.delete(first)


def test_a_mark_of_a_save_that_failed_keeps_nobody_from_deleting() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(1), first)
    first.publish("needed-by/step-2", b"", overwrite=True)
    dcp.delete(first)
    assert list(root.list()) == []


def test_a_save_that_was_refused_leaves_no_claim() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(1), first)
    full = StorageError(28, "No space left on device")
    full.is_certain = True
    refusing = Rule(RaiseError(full), op="publish", name="manifest.json")
    with pytest.raises(StorageError, match="No space left"):
        dcp.save(state(2), FaultyStore(root.substore("step-2"), [refusing]), base=first)
    dcp.delete(first)
    assert list(root.list()) == []


def test_a_base_deleted_during_the_save_is_not_referred_to() -> None:
    root = MemoryStore()
    first = root.substore("step-1")
    dcp.save(state(1), first)

    class Deletes(Fault):
        def before(self) -> None:
            dcp.delete(first)

    store = FaultyStore(root.substore("step-2"), [Rule(Deletes(), op="close", nth=1)])
    with pytest.raises(CheckpointError, match="deleted or replaced during the save"):
        dcp.save(state(2), store, base=first)
    assert not root.exists("step-2/manifest.json")


def test_a_deletion_that_was_refused_leaves_a_base() -> None:
    root = MemoryStore()
    first, second = root.substore("step-1"), root.substore("step-2")
    dcp.save(state(1), first)
    before = list(first.list())
    denied = Rule(RaiseError(StorageError("denied")), op="delete", name="manifest.json")
    with pytest.raises(StorageError, match="denied"):
        dcp.delete(FaultyStore(first, [denied]))
    assert list(first.list()) == before
    assert dcp.save(state(2), second, base=first).borrowed_bytes > 0
    check(second, 2)


def test_a_manifest_that_only_seems_to_be_gone_keeps_its_files() -> None:
    first = MemoryStore().substore("step-1")
    dcp.save(state(1), first)
    before = list(first.list())
    mistaken = Rule(RaiseError(ObjectNotFound(2, "no such key")), op="delete", name="manifest.json")
    with pytest.raises(ObjectNotFound, match="no such key"):
        dcp.delete(FaultyStore(first, [mistaken]))
    assert list(first.list()) == before
    check(first, 1)


def test_a_base_that_is_being_deleted_is_refused_before_anything_is_written() -> None:
    root = MemoryStore()
    first, second = root.substore("step-1"), root.substore("step-2")
    dcp.save(state(1), first)
    cut_off = Rule(RaiseError(StorageError("no reply")), op="delete")
    with pytest.raises(StorageError, match="no reply"):
        dcp.delete(FaultyStore(first, [cut_off]))
    check(first, 1)
    nothing_written = Rule(RaiseError(StorageError("too late")), op="create")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step-1: .* is being deleted, or .*delete;"):
            dcp.save(state(2), FaultyStore(second, [nothing_written]), base=first)
        assert list(second.list()) == []
    dcp.delete(first)
    with pytest.raises(NotCommitted):
        dcp.save(state(2), second, base=first)


def test_a_base_that_cannot_be_one_is_refused_on_all_ranks(tmp_path: Path) -> None:
    dcp.save(state(1), tmp_path / "run" / "step-1")

    def save(base: Path) -> CheckpointError:
        def body(_: int, group: Any) -> None:
            dcp.save(state(2), tmp_path / "run" / "step-2", base=base, process_group=group)

        with pytest.raises(RanksFailed) as failure:
            run_ranks(2, body)
        errors = list(failure.value.errors.values())
        assert len({str(error) for error in errors}) == 1
        assert isinstance(errors[0], CheckpointError)
        return errors[0]

    shutil.copytree(tmp_path / "run" / "step-1", tmp_path / "other" / "step-1")
    assert "does not lie beside" in str(save(tmp_path / "other" / "step-1"))
    assert "does not lie beside" in str(save(tmp_path / "run" / "step-2"))
    assert isinstance(save(tmp_path / "run" / "step-0"), NotCommitted)
    assert not (tmp_path / "run" / "step-2").exists()


@pytest.mark.parametrize("policy", ["error", "warn", None])
def test_copies_that_differ_are_found(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()

    def body(mesh: DeviceMesh) -> dcp.SaveReport:
        rank = mesh.get_rank()
        placements = (Replicate(), Shard(0))
        local = torch.arange(6.0).view(2, 3)
        good = DTensor.from_local(local.clone(), mesh, placements, shape=(4, 3))
        if rank == 3:
            local[1, 2] = -1.0  # what a faulty chip might do
        bad = DTensor.from_local(local, mesh, placements, shape=(4, 3))
        group = mesh.group_of((0, 1))
        return dcp.save(
            {"bad": bad, "good": good}, store, process_group=group, check_replicas=policy
        )

    if policy == "error":
        with pytest.raises(RanksFailed) as failure:
            run_on_mesh((2, 2), body)
        error = failure.value.errors[2]
        assert isinstance(error, LayoutMismatch)
        assert "tensor 'bad': [2:4,0:3] has different values on rank 1 and rank 3" in str(error)
        assert "good" not in str(error)
        return
    reports = run_on_mesh((2, 2), body)
    lines = {report.disagreements for report in reports}
    assert ("tensor 'bad'" in caplog.text) == (policy == "warn")
    if policy == "warn":
        assert lines == {("tensor 'bad': [2:4,0:3] has different values on rank 1 and rank 3",)}
    else:
        assert lines == {()}
