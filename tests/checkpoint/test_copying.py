"""``copy``: the same bytes elsewhere, verified, and nothing half-committed whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import copying
from dtckpt.checkpoint.reading import limits
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    Corrupt,
    InUse,
    NotCommitted,
    StorageError,
)
from dtckpt.storage import (
    Call,
    Fault,
    FaultyStore,
    FlipBit,
    LocalStore,
    MemoryStore,
    RaiseError,
    Rule,
)

from ..ranks import run_ranks


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, with an empty tensor and one of several blocks."""
    place = tmp_path / "source"

    def save(rank: int, group: Any) -> None:
        mesh = DeviceMesh("cpu", Mesh((2,)), groups=[group])
        local = torch.arange(1 << 18, dtype=torch.float64) + rank
        state = {
            "w": DTensor.from_local(local, mesh, [Shard(0)], shape=(1 << 19,)),
            "empty": torch.zeros(0),
            "small": torch.arange(7, dtype=torch.uint8),
            "step": 3,
        }
        dcp.save(state, place, process_group=group, metadata={"a": 1})

    run_ranks(2, save)
    return place


def files(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def test_a_copy_has_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    told: list[tuple[int, int]] = []
    dcp.copy(source, tmp_path / "target", on_progress=lambda done, all_: told.append((done, all_)))
    assert files(tmp_path / "target") == files(source)
    total = sum(len(data) for name, data in files(source).items() if name.startswith("data/"))
    assert told[-1] == (total, total)
    assert len(told) > 4
    assert dcp.verify(tmp_path / "target").problems == ()
    memory = MemoryStore()
    dcp.copy(source, memory)
    assert torch.equal(dcp.open(memory)["w"][:], dcp.open(source)["w"][:])


def test_nothing_is_written_over(source: Path, tmp_path: Path) -> None:
    dcp.save({"x": 1}, tmp_path / "target")
    before = files(tmp_path / "target")
    with pytest.raises(AlreadyCommitted, match="already exists"):
        dcp.copy(source, tmp_path / "target")
    with pytest.raises(AlreadyCommitted, match="already exists"):
        dcp.copy(source, source)
    assert files(tmp_path / "target") == before
    assert dcp.verify(source).problems == ()
    with pytest.raises(NotCommitted):
        dcp.copy(tmp_path / "nothing", tmp_path / "other")


@pytest.mark.parametrize("part", ["header", "block", "table"])
def test_damage_is_named_and_not_copied(source: Path, tmp_path: Path, part: str) -> None:
    path = sorted(source.glob("data/*/*"))[1]
    data = bytearray(path.read_bytes())
    data[{"header": 100, "block": len(data) // 2, "table": len(data) - 4}[part]] ^= 8
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"00001\.safetensors: bytes \d+ to \d+"):
        dcp.copy(source, tmp_path / "target")
    with pytest.raises(NotCommitted):
        dcp.load({"step": 0}, tmp_path / "target")


def test_bits_that_flip_on_the_way_are_found(source: Path, tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(source), [Rule(FlipBit(99), op="read_into", nth=4)])
    with pytest.raises(Corrupt, match="damaged"):
        dcp.copy(store, tmp_path / "target")
    assert not (tmp_path / "target" / "manifest.json").exists()


def test_what_was_written_is_read_before_it_counts(source: Path) -> None:
    objects: dict[str, bytes] = {}
    store = FaultyStore(MemoryStore(objects), [Rule(FlipBit(99), op="read_into", nth=2)])
    with pytest.raises(Corrupt, match="damaged"):
        dcp.copy(source, store, verify=True)
    assert "manifest.json" not in objects
    assert len(objects) < 2  # what was damaged is gone, so the next call writes it anew
    told: list[tuple[int, int]] = []
    dcp.copy(
        source,
        MemoryStore(objects),
        verify=True,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1][0] == told[-1][1]
    assert dcp.verify(MemoryStore(objects)).problems == ()


def test_a_failure_at_every_call_leaves_nothing_half_and_is_gone_on_from(
    source: Path, tmp_path: Path
) -> None:
    calls = FaultyStore(MemoryStore())
    dcp.copy(source, calls)
    errors: list[str] = []
    for number in range(1, len(calls.calls) + 1):
        inner = MemoryStore()
        fault = RaiseError(StorageError(EIO, "gone"), after_effect=number % 2 == 0)
        try:
            dcp.copy(source, FaultyStore(inner, from_call(number, fault)))
        except CheckpointError as error:
            errors.append(str(error))
        else:  # it is there, and only could not be read back
            assert inner.exists("manifest.json")
        if not inner.exists("manifest.json"):
            dcp.copy(source, inner)
        assert dcp.verify(inner).problems == ()
        assert torch.equal(dcp.open(inner)["w"][:], dcp.open(source)["w"][:])
    assert all("gone" in text for text in errors)
    assert len(errors) >= len(calls.calls) - 2


def from_call(number: int, fault: Fault) -> Callable[[Call], Fault | None]:
    return lambda call: fault if call.number >= number else None


def test_what_is_there_and_damaged_is_not_taken(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    name = sorted(path.relative_to(source) for path in source.glob("data/*/*"))[0]
    data = bytearray((source / name).read_bytes())
    data[len(data) // 2] ^= 1
    (target / name).parent.mkdir(parents=True)
    (target / name).write_bytes(data)
    with pytest.raises(Corrupt, match="target/data"):
        dcp.copy(source, target)


def test_incremental_ones_are_refused_by_name(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(1000), "step": 1}
    dcp.save(state, tmp_path / "step-1")
    dcp.save(state, tmp_path / "step-2", base=tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"incremental.*step-1 beside it.*detach"):
        dcp.copy(tmp_path / "step-2", tmp_path / "there/other")
    assert not (tmp_path / "there").exists()
    dcp.save(state, tmp_path / "there/step-1")
    with pytest.raises(CheckpointError, match="incremental"):  # that is another one
        dcp.copy(tmp_path / "step-2", tmp_path / "there/other")
    dcp.copy(tmp_path / "step-2", tmp_path / "beside")
    assert torch.equal(dcp.open(tmp_path / "beside")["w"][:], state["w"])
    with pytest.raises(InUse, match="beside"):
        dcp.delete(tmp_path / "step-1")
    dcp.detach(tmp_path / "step-2")
    dcp.copy(tmp_path / "step-2", tmp_path / "there/other")
    assert torch.equal(dcp.open(tmp_path / "there/other")["w"][:], state["w"])


def test_the_first_failure_ends_the_copying_of_all_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    told: list[int] = []

    def stop(done: int, _total: int) -> None:
        told.append(done)
        if len(told) == 1:
            raise ValueError("enough")

    def stopped_first(futures: list[Future[None]]) -> list[Future[None]]:
        wait(futures)
        return sorted(futures, key=lambda one: isinstance(one.exception(), ValueError))

    monkeypatch.setattr(copying, "as_completed", stopped_first)
    with pytest.raises(ValueError, match="enough"):
        dcp.copy(source, tmp_path / "target", on_progress=stop)
    assert len(told) == 1
    assert not [*(tmp_path / "target").rglob("*.safetensors")]
    dcp.copy(source, tmp_path / "target")
    assert not dcp.verify(tmp_path / "target").problems
