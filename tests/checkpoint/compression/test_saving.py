"""Saves that are compressed, and everything that reads, keeps and copies checkpoints after them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.compression import choosing
from dtckpt.checkpoint.compression.choosing import Sample, note_speed, speed_of
from dtckpt.checkpoint.dcp import CheckpointWriter
from dtckpt.checkpoint.files.committing import discard
from dtckpt.dtensor import DeviceMesh, DTensor, Layout, Mesh, Placement, Replicate, Shard
from dtckpt.errors import Cancelled, CheckpointError, InUse
from dtckpt.storage import Delay, FaultyStore, LocalStore, MemoryStore, RaiseError, Rule, Store

from ...ranks import RanksFailed, run_ranks

SHAPE = (256, 192)
BF16 = 1.3
"""The least by which bf16 of a normal distribution shrinks, small chunks and tables included."""


def whole(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPE, generator=generator) * 0.02).to(dtype)


def on_mesh(
    value: torch.Tensor, rank: int, mesh: Mesh, placements: tuple[Placement, ...]
) -> DTensor:
    coordinate = mesh.coordinate(rank)
    assert coordinate is not None
    box = Layout(mesh, placements, tuple(value.shape)).box(coordinate)
    device_mesh = DeviceMesh("cpu", mesh, rank=rank)
    return DTensor.from_local(value[box.slices].clone(), device_mesh, placements, shape=value.shape)


def state(value: torch.Tensor | None = None) -> dict[str, Any]:
    return {"w": whole() if value is None else value, "m": whole(1, torch.float32), "step": 3}


def loaded(store: Store | Path) -> dict[str, Any]:
    into = {"w": torch.zeros(SHAPE, dtype=torch.bfloat16), "m": torch.zeros(SHAPE), "step": 0}
    ckpt.load(into, store)
    return into


def check(store: Store | Path, value: torch.Tensor | None = None) -> None:
    found, expected = loaded(store), state(value)
    assert all(torch.equal(found[name], expected[name]) for name in ("w", "m"))
    assert found["step"] == 3
    assert not ckpt.verify(store).problems


def records(store: Store) -> list[Any]:
    return [record.to_json() for record in ckpt.read_manifest(store).files]


def is_compressed(store: Store) -> bool:
    return ckpt.read_manifest(store).is_compressed


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_saved_is_smaller_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, direct: bool
) -> None:
    monkeypatch.setattr("dtckpt.storage.local.store._DIRECT_BYTES", 1)
    store = FaultyStore(
        LocalStore(tmp_path / "a", direct_io=direct), [Rule(Delay(0.02), op="write")]
    )
    if background:
        report = ckpt.async_save(state(), store, compress="zstd").result(60)
    else:
        report = ckpt.save(state(), store, compress="zstd")
    (record,) = records(store)
    (path,) = (tmp_path / "a").glob("data/*/*")
    assert path.name == "00000.compressed"
    assert path.stat().st_size == record["size"] == report.written_bytes
    assert (
        record["data_bytes"]
        == report.total_bytes
        == sum(t.nbytes for t in (whole(), whole(1, torch.float32)))
    )
    assert record["stored_bytes"] * 1.15 < record["data_bytes"]
    check(tmp_path / "a")


def test_it_is_off_by_default_and_changes_nothing_then() -> None:
    plain, off = MemoryStore(), MemoryStore()
    ckpt.save(state(), plain)
    ckpt.save(state(), off, compress=None)
    for store in (plain, off):
        manifest = store.read("manifest.json").decode()
        assert '"version": 1, "requires": []' in manifest
        assert "stored_bytes" not in manifest
        assert all(info.name.endswith(".safetensors") for info in store.list("data"))


@pytest.mark.parametrize("read_once", [False, True])
def test_ranks_load_it_onto_any_mesh(read_once: bool) -> None:
    store, old, new = MemoryStore(), Mesh((2, 2)), Mesh((3,))

    def save(rank: int, group: Any) -> None:
        parts = {
            "w": on_mesh(whole(), rank, old, (Shard(0), Shard(1))),
            "m": on_mesh(whole(1, torch.float32), rank, old, (Replicate(), Shard(0))),
            "step": 3,
        }
        ckpt.save(parts, store, process_group=group, compress="zstd")

    def load(rank: int, group: Any) -> None:
        into: dict[str, Any] = {
            "w": on_mesh(torch.zeros(SHAPE, dtype=torch.bfloat16), rank, new, (Shard(1),)),
            "m": on_mesh(torch.zeros(SHAPE), rank, new, (Replicate(),)),
            "step": 0,
        }
        ckpt.load(into, store, process_group=group, read_once=read_once)
        expected = on_mesh(whole(), rank, new, (Shard(1),))
        assert torch.equal(into["w"].to_local(), expected.to_local())
        assert torch.equal(into["m"].to_local(), whole(1, torch.float32))

    run_ranks(4, save)
    assert len(records(store)) == 4
    assert all(record["stored_bytes"] < record["data_bytes"] for record in records(store))
    run_ranks(3, load)
    check(store)


def test_ranks_have_to_agree() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        compress: Literal["zstd"] | None = "zstd" if rank else None
        ckpt.save({"x": torch.ones(3)}, store, process_group=group, compress=compress)

    with pytest.raises(RanksFailed, match="compress"):
        run_ranks(2, save)
    assert not any(store.list())


def test_other_choices_are_refused() -> None:
    bad: Any = "gzip"
    for save in (ckpt.save, ckpt.async_save):
        with pytest.raises(CheckpointError, match="compress is None, 'zstd' or 'auto', got 'gzip'"):
            save(state(), MemoryStore(), compress=bad)
    with pytest.raises(ValueError, match="compress"):
        ckpt.reshard(MemoryStore(), MemoryStore(), Mesh((1,)), [], compress=bad)
    with pytest.raises(ValueError, match="compress"):
        CheckpointWriter("x", compress=bad)


@pytest.mark.parametrize("lender", ["zstd", None])
@pytest.mark.parametrize("borrower", ["zstd", None])
def test_increments_do_not_depend_on_it(
    lender: Literal["zstd"] | None, borrower: Literal["zstd"] | None
) -> None:
    root = MemoryStore()
    first, second, third = (root.substore(f"step-{i}") for i in (1, 2, 3))
    ckpt.save(state(), first, compress=lender)
    report = ckpt.save(state(whole(5)), second, base=first, compress=borrower)
    assert report.borrowed_bytes == whole(1, torch.float32).nbytes
    assert ckpt.read_manifest(second).is_compressed == ("zstd" in (lender, borrower))
    assert [r.is_compressed for r in ckpt.read_manifest(second).files] == [borrower == "zstd"]
    check(second, whole(5))
    report = ckpt.save(state(whole(5)), third, base=second, compress=borrower)
    assert report.borrowed_bytes == report.total_bytes
    check(third, whole(5))
    with pytest.raises(InUse):
        ckpt.delete(first)
    made = ckpt.detach(third)
    assert [record.is_compressed for record in made.files] == [borrower == "zstd"]
    check(third, whole(5))


def test_it_is_resharded_copied_and_exported(tmp_path: Path) -> None:
    store = MemoryStore()
    ckpt.save(state(), store, compress="zstd")
    plain, dense, copied = MemoryStore(), MemoryStore(), MemoryStore()
    rules = ckpt.parse_rules("*=S(0)")
    ckpt.reshard(store, plain, Mesh((2,)), rules)
    assert not is_compressed(plain)
    ckpt.reshard(plain, dense, Mesh((3,)), rules, compress="zstd")
    assert len(records(dense)) == 3
    assert is_compressed(dense)
    ckpt.copy(dense, copied)
    for place in (plain, dense, copied):
        check(place)
    weights = MemoryStore()
    ckpt.save({"model": {"w": whole()}}, weights, compress="zstd")
    ckpt.export(weights, tmp_path / "out", part="model")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], whole())


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_the_writer_of_torch_s_checkpoints_has_it_too(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"w": whole()}, storage_writer=CheckpointWriter(tmp_path, compress="zstd"), no_dist=True)
    assert is_compressed(LocalStore(tmp_path))
    with ckpt.open(tmp_path) as opened:
        assert torch.equal(opened["w"][...], whole())


def test_slices_are_read_lazily() -> None:
    store = MemoryStore()
    ckpt.save(state(), store, compress="zstd")
    with ckpt.open(store) as opened:
        assert torch.equal(opened["w"][100:117, ::3], whole()[100:117, ::3])


def test_a_checkpoint_takes_the_place_of_another_whatever_they_are() -> None:
    """And of the one before nothing is left."""
    store = MemoryStore()
    ways: list[Literal["zstd"] | None] = ["zstd", None, "zstd", "zstd"]
    for way in ways:
        ckpt.save(state(), store, overwrite=True, compress=way)
        ending = "compressed" if way else "safetensors"
        (name,) = (info.name for info in store.list("data"))
        assert name.endswith(f"00000.{ending}")
    ckpt.delete(store)
    assert not any(store.list())


def test_what_killed_saves_leave_is_cleaned(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    ckpt.save(state(), root.substore("kept"), compress="zstd")
    ckpt.save(state(), root.substore("dead"), compress="zstd")
    root.delete(["dead/manifest.json"])
    root.publish("dead/data/0123456789abcdef/00000.compressed", b"no header", overwrite=False)
    gone = ckpt.clean(root, older_than=timedelta(seconds=-10))
    assert [name.rpartition("/")[2] for name in gone] == ["00000.compressed"]
    assert root.exists("dead/data/0123456789abcdef/00000.compressed"), "which no save has written"
    check(root.substore("kept"))


def test_a_save_that_fails_leaves_nothing() -> None:
    for op in ("write", "close", "create"):
        inner = MemoryStore()
        store = FaultyStore(inner, [Rule(RaiseError(OSError(28, "full")), op=op)])
        with pytest.raises(CheckpointError, match="full"):
            ckpt.save(state(), store, compress="zstd")
        assert not any(inner.list())


def test_what_a_rank_has_written_is_discarded_whatever_it_is() -> None:
    store = MemoryStore()
    names = ["data/ab/00001.compressed", "data/ab/00001.safetensors", "data/ab/00002.compressed"]
    for name in names:
        store.publish(name, b"x", overwrite=False)
    discard(store, "ab", 1)
    assert [info.name for info in store.list()] == names[2:]


def test_a_save_is_cancelled(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore(), [Rule(Delay(0.2), op="write")])
    handle = ckpt.async_save(state(), store, compress="zstd")
    handle.cancel()
    with pytest.raises(Cancelled):
        handle.result(60)
    assert not any(store.list())


def test_a_manager_compresses_and_goes_on(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path, compress="zstd", incremental=1) as manager:
        for step in (1, 2):
            manager.save(step, state(whole(step)))
    for step in (1, 2):
        check(tmp_path / f"step-{step}", whole(step))
        assert is_compressed(LocalStore(tmp_path / f"step-{step}"))
    with ckpt.CheckpointManager(tmp_path) as manager:
        into: dict[str, Any] = state(torch.zeros(SHAPE, dtype=torch.bfloat16))
        manager.restore(into)
    assert torch.equal(into["w"], whole(2))


def test_costs_tell_what_it_took_and_gained() -> None:
    store = MemoryStore()
    costs = ckpt.save(state(), store, compress="zstd").costs
    (record,) = records(store)
    assert [phase.phase for phase in costs.phases][-3:] == ["compress", "write", "commit"]
    assert costs.phase("compress").num_bytes == record["data_bytes"]
    assert costs.phase("compress").seconds > 0
    assert sum(phase.seconds for phase in costs.phases) <= costs.seconds, "nothing counts twice"
    assert costs.phase("write").num_bytes == record["size"]
    assert "compress" in str(costs)
    assert "compress" not in str(ckpt.save(state(), MemoryStore()).costs)


def test_every_dtype_comes_back() -> None:
    names = ["float64", "complex64", "float16", "int16", "uint8", "bool", "float8_e4m3fn", "int64"]
    values = {name: whole(2, torch.float32).mul(99).to(getattr(torch, name)) for name in names}
    values["float4"] = torch.zeros(4096, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    values["nothing"] = torch.empty(0)
    values["scalar"] = torch.tensor(3.0)
    store = MemoryStore()
    ckpt.save(values, store, compress="zstd")
    with ckpt.open(store) as opened:
        for name, value in values.items():
            found, expected = opened[name][...], value
            if name == "float4":
                found, expected = found.view(torch.uint8), value.view(torch.uint8)
            assert torch.equal(found, expected), name


# -- "auto"


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    known: dict[str, float] = {}
    monkeypatch.setattr(choosing, "_speeds", known)
    monkeypatch.setattr(choosing, "_LEAST_BYTES", 1)
    return known


def test_the_first_save_measures_the_store(speeds: dict[str, float], tmp_path: Path) -> None:
    ckpt.save(state(), LocalStore(tmp_path / "step-1"), compress="auto")
    assert not is_compressed(LocalStore(tmp_path / "step-1"))
    assert list(speeds) == [str(tmp_path)]
    for speed, expected in ((1e4, True), (1e15, False)):
        speeds[str(tmp_path)] = speed
        target = LocalStore(tmp_path / f"step-{speed}")
        ckpt.save(state(), target, compress="auto")
        assert is_compressed(target) == expected
        check(target)
        assert (speeds[str(tmp_path)] == speed) == expected, "what is compressed tells nothing"


def test_what_does_not_shrink_is_not_compressed(speeds: dict[str, float]) -> None:
    root = MemoryStore()
    speeds[root.url] = 1e4
    noise = torch.randint(256, (1 << 16,), dtype=torch.uint8)
    ckpt.save({"x": noise}, root.substore("a"), compress="auto")
    assert not is_compressed(root.substore("a"))
    ckpt.save({}, root.substore("b"), compress="auto")
    assert not is_compressed(root.substore("b"))


def test_each_rank_decides_for_its_file(speeds: dict[str, float]) -> None:
    root, mesh = MemoryStore(), Mesh((2,))
    speeds[root.url] = 1e4
    half = SHAPE[0] // 2
    mixed = torch.cat(
        [
            whole()[:half],
            torch.randint(1 << 15, (half, SHAPE[1])).to(torch.int16).view(torch.bfloat16),
        ]
    )

    def save(rank: int, group: Any) -> None:
        parts = {"w": on_mesh(mixed, rank, mesh, (Shard(0),))}
        ckpt.save(parts, root.substore("a"), process_group=group, compress="auto")

    run_ranks(2, save)
    assert [r.is_compressed for r in ckpt.read_manifest(root.substore("a")).files] == [True, False]
    with ckpt.open(root.substore("a")) as opened:
        found = opened["w"][...].view(torch.int16)
    assert torch.equal(found, mixed.view(torch.int16))


def test_samples_are_spread_over_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def of(blocks: Any) -> Sample:
        seen.extend((len(block), width) for block, width in blocks)
        return Sample(0, 0, 0.0)

    def slow(_: str) -> float:
        return 1.0

    monkeypatch.setattr(Sample, "of", of)
    monkeypatch.setattr("dtckpt.checkpoint.saving.finishing.speed_of", slow)
    small = {f"s{i}": torch.ones(10) for i in range(1000)}
    large = {f"l{i}": torch.ones(3 << 18, dtype=torch.bfloat16) for i in range(16)}
    ckpt.save(small | large, MemoryStore(), compress="auto")
    assert len(seen) == 8
    assert {size for size, _ in seen} <= {40, 1 << 20}
    assert sum(size == 1 << 20 for size, _ in seen) >= 7


def test_speeds_are_those_of_a_directory_of_checkpoints(speeds: dict[str, float]) -> None:
    note_speed("s3://bucket/run/step-1", 100, 2.0)
    assert (speed_of("s3://bucket/run/step-2"), speed_of("s3://bucket/other/step-2")) == (
        50.0,
        None,
    )
    note_speed("s3://bucket/run/step-2", 0, 1.0)
    note_speed("s3://bucket/run/step-2", 10, 0.0)
    assert speed_of("s3://bucket/run/step-3") == 50.0
