"""Checkpoints rewritten: what they hold, what is refused, what is left of a call that failed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt
import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import DTypeRule, Move, PerRank, parse_rules, with_layouts
from dtckpt.checkpoint.files.committing import commit
from dtckpt.checkpoint.resharding.world import place_for_world
from dtckpt.checkpoint.saving.writers import assign_writers
from dtckpt.checkpoint.tensors.dtypes import BY_TORCH_NAME
from dtckpt.checkpoint.tensors.spec import GlobalTensor
from dtckpt.dtensor import Layout, Mesh, Shard
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch, StorageError
from dtckpt.storage import FaultyStore, MemoryStore, RaiseError, Rule

from ...ranks import run_ranks

MESH = Mesh((2, 2), ("dp", "tp"))
RULES = parse_rules("*w=S(0),S(1); *e=R,S(0)")


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {
            "w": torch.randn(40, 36, generator=generator),
            "e": torch.randn(65, 3, generator=generator).bfloat16(),
            "steps": torch.arange(5),
        },
        "rng": PerRank({"seed": torch.arange(4, dtype=torch.uint8)}),
        "epoch": 3,
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank."""
    path = tmp_path_factory.mktemp("saved") / "one"
    dcp.save(state(), path, metadata={"loss": 2})
    return path


@pytest.fixture(scope="module")
def source(one: Path) -> Path:
    """The same of eight ranks; nobody changes it."""
    dcp.reshard(one, one.parent / "source", Mesh((8,), ("dp",)), parse_rules("model/*=S(0)"))
    return one.parent / "source"


def elements(place: Any) -> dict[str, torch.Tensor]:
    with dcp.open(place) as found:
        return {name: tensor[...] for name, tensor in found.items()}


def same(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return ones.keys() == others.keys() and all(
        tensor.dtype == others[name].dtype
        and torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8))
        for name, tensor in ones.items()
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_every_rank_finds_what_a_distributed_load_gives_it(
    source: Path, tmp_path: Path, processes: int
) -> None:
    target = tmp_path / "target"
    seen: list[tuple[int, int]] = []
    made = dcp.reshard(
        source,
        target,
        MESH,
        RULES,
        processes=processes,
        memory_bytes=1 << 30,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (made_bytes := sum(t.num_bytes for t in made.tensors.values()), made_bytes)
    assert dcp.verify(target).problems == ()
    assert len(made.files) == 4
    for rank in range(4):
        found: list[dict[str, torch.Tensor]] = []
        for place in (source, target):
            layouts: dict[str, Layout] = {}
            shards: dict[str, torch.Tensor] = {}
            for name, dtype in (("w", torch.float32), ("e", torch.bfloat16)):
                layout = made.tensors[f"model/{name}"].layout
                assert isinstance(layout, Layout)
                [box] = layout.held_by(rank)
                layouts[f"model/{name}"] = layout
                shards[name] = torch.zeros(box.sizes, dtype=dtype)
            told = with_layouts({"model": shards}, layouts, rank=rank)
            dcp.load(told, place, no_dist=True, strict=False)
            found.append(shards)
        assert same(*found)


def test_both_ways_of_writing_give_the_same_files(source: Path, tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    for processes in (1, 2):
        target = tmp_path / f"by-{processes}"
        dcp.reshard(
            source, target, MESH, RULES, processes=processes, memory_bytes=1 << 30, compress="zstd"
        )
        files.append({path.name: path.read_bytes() for path in target.glob("data/*/*")})
    assert files[0] == files[1]
    assert len(files[0]) == 4


def test_dtypes_are_those_of_a_load_that_casts(source: Path, tmp_path: Path) -> None:
    rules = [DTypeRule.parse("*e=float32"), DTypeRule.parse("float16")]
    dcp.reshard(source, tmp_path / "target", MESH, RULES, dtypes=rules)
    wanted: dict[str, Any] = {
        "model": {
            "w": torch.zeros(40, 36, dtype=torch.float16),
            "e": torch.zeros(65, 3),
            "steps": torch.zeros(5, dtype=torch.int64),
        }
    }
    dcp.load(wanted, source, strict=False, dtype_policy="cast")
    found = elements(tmp_path / "target")
    assert found.pop("rng/@0/seed").dtype == torch.uint8
    assert same(found, {f"model/{name}": t for name, t in wanted["model"].items()})


def test_selected_and_renamed(source: Path, tmp_path: Path) -> None:
    made = dcp.reshard(
        source,
        tmp_path / "target",
        MESH,
        parse_rules("net/*=S(0),R"),
        select=["net", "epoch"],
        mapping=[Move("model/{name}", "net/{name}")],
    )
    assert sorted(made.tensors) == ["net/e", "net/steps", "net/w"]
    before = elements(source)
    after = elements(tmp_path / "target")
    assert all(torch.equal(after[f"net/{n}"], before[f"model/{n}"]) for n in ("w", "e", "steps"))
    with dcp.open(tmp_path / "target") as found:
        assert found.state_dict()["epoch"] == 3


def test_tied_tensors_stay_tied_where_they_are_stored_alike(tmp_path: Path) -> None:
    weight = torch.randn(40, 36)
    state = {"embedding": weight, "head": weight, "other": weight, "w": weight.clone()}
    dcp.save(state, tmp_path / "source")
    rules = parse_rules("other=R,R;*=S(0),S(1)")
    made = dcp.reshard(tmp_path / "source", tmp_path / "target", MESH, rules)
    assert {n: t.same_as for n, t in made.tensors.items() if t.same_as} == {"head": "embedding"}
    assert not dcp.verify(tmp_path / "target").problems
    assert same(elements(tmp_path / "target"), dict.fromkeys(state, weight))
    options: dict[str, Any] = {"select": ["top", "other"], "mapping": [Move("head", "top")]}
    made = dcp.reshard(tmp_path / "source", tmp_path / "two", MESH, **options)
    assert [t.same_as for t in made.tensors.values()].count(None) == 1
    assert not dcp.verify(tmp_path / "two").problems
    bf16 = [DTypeRule.parse("head=bfloat16")]
    made = dcp.reshard(tmp_path / "source", tmp_path / "three", MESH, dtypes=bf16)
    assert {n: t.same_as for n, t in made.tensors.items() if t.same_as} == {"other": "embedding"}
    assert torch.equal(elements(tmp_path / "three")["head"], weight.bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": parse_rules("modle/*=S(0),R")}, "modle"),
        ({"select": "modle/*"}, "selects nothing"),
        ({"dtypes": [DTypeRule.parse("modle/*=bf16")]}, "modle"),
        ({"dtypes": [DTypeRule.parse("float32")], "select": "model/steps"}, "floating point"),
        ({"mapping": [Move("modle/{x}", "{x}")]}, "no tensor fits"),
        ({"select": "epoch"}, "holds no tensor"),
    ],
)
def test_a_rule_that_fits_nothing_is_an_error(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    mesh = MESH if "rules" in options else None
    with pytest.raises(LayoutMismatch, match=message):
        dcp.reshard(source, tmp_path / "target", mesh, **options)
    assert not (tmp_path / "target").exists()


def test_for_another_number_of_ranks(source: Path, tmp_path: Path) -> None:
    made = dcp.reshard(source, tmp_path / "three", to_world=3)
    assert str(made.tensors["model/w"].layout) == "[40, 36] (S(0)) on dp=3"
    assert same(elements(tmp_path / "three"), elements(source))
    dcp.reshard(source, tmp_path / "grid", MESH, RULES)
    made = dcp.reshard(tmp_path / "grid", tmp_path / "six", to_world=6)
    assert str(made.tensors["model/w"].layout) == "[40, 36] (S(0), S(1)) on dp=3,tp=2"
    with pytest.raises(LayoutMismatch, match="5 ranks are no multiple of the 2"):
        dcp.reshard(tmp_path / "grid", tmp_path / "five", to_world=5)
    odd = Mesh((2, 2), ("pp", "tp"))
    dcp.reshard(source, tmp_path / "odd", odd, RULES)
    with pytest.raises(LayoutMismatch, match="no axis of its mesh pp=2,tp=2 is called"):
        dcp.reshard(tmp_path / "odd", tmp_path / "more", to_world=8)
    rules = parse_rules("*w=Ragged(0:30,10),R")
    dcp.reshard(source, tmp_path / "ragged", MESH, rules)
    with pytest.raises(LayoutMismatch, match="model/w"):
        dcp.reshard(tmp_path / "ragged", tmp_path / "more", to_world=8)
    with pytest.raises(ValueError, match="to_world goes without"):
        dcp.reshard(source, tmp_path / "more", MESH, to_world=8)


def test_the_data_axis_is_that_of_each_mesh() -> None:
    """Meshes are equal whatever their axes are called."""
    stored = assign_writers(
        GlobalTensor(
            name="".join(names),
            dtype=BY_TORCH_NAME["float32"],
            shape=(8, 8),
            layout=Layout(Mesh((2, 2), names), (Shard(0), Shard(1)), (8, 8)),
        )
        for names in (("dp", "tp"), ("tp", "dp"))
    )
    found = [placed.layout for placed in place_for_world(stored, 8)]
    assert [str(layout).partition(" on ")[2] for layout in found] == ["dp=4,tp=2", "tp=2,dp=4"]


def test_layouts_stay_where_nothing_else_is_said(source: Path, tmp_path: Path) -> None:
    with dcp.open(source) as old:
        before = {name: tensor.layout for name, tensor in old.manifest.tensors.items()}
    made = dcp.reshard(source, tmp_path / "target")
    assert {name: tensor.layout for name, tensor in made.tensors.items()} == before


class Half:
    """A target in memory, in which a call has failed after two of four files."""

    def __init__(self, source: Path) -> None:
        self.objects: dict[str, bytes] = {}
        broken = Rule(RaiseError(StorageError("disk full")), op="close", nth=3)
        with pytest.raises(StorageError, match="disk full"):
            dcp.reshard(source, FaultyStore(MemoryStore(self.objects), [broken]), MESH, RULES)
        assert len(self.objects) == 2
        assert "manifest.json" not in self.objects

    def go_on(self, source: Path, **options: Any) -> list[str]:
        """Call again; return the files that were written."""
        store = FaultyStore(MemoryStore(self.objects))
        dcp.reshard(source, store, MESH, RULES, **options)
        assert dcp.verify(MemoryStore(self.objects)).problems == ()
        return [call.name for call in store.calls if call.op == "create"]


def test_a_call_that_failed_is_gone_on_with(source: Path) -> None:
    half = Half(source)
    before = dict(half.objects)
    written = half.go_on(source)
    assert len(written) == 2
    assert not before.keys() & set(written)
    assert same(elements(MemoryStore(half.objects)), elements(source))


@pytest.mark.parametrize("at", [20, 5000, -3])
def test_what_is_damaged_of_it_is_written_anew(source: Path, at: int) -> None:
    half = Half(source)
    name = min(half.objects)
    damaged = bytearray(half.objects[name])
    damaged[at] ^= 1
    half.objects[name] = bytes(damaged)
    assert name in half.go_on(source)
    cut = Half(source)
    cut.objects[name] = cut.objects[name][:-16]
    assert name in cut.go_on(source)


def test_nothing_of_it_counts_for_another_source_or_other_options(
    source: Path, one: Path, tmp_path: Path
) -> None:
    assert len(Half(source).go_on(source, dtypes=[DTypeRule.parse("bfloat16")])) == 4
    assert len(Half(source).go_on(source, compress="zstd")) == 4
    dcp.reshard(one, tmp_path / "other", Mesh((8,)), parse_rules("model/*=S(0)"))
    half = Half(source)
    assert len(half.go_on(tmp_path / "other")) == 4


def test_nothing_of_it_counts_for_another_version(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Half(source)
    monkeypatch.setattr(dtckpt, "__version__", "99")
    assert len(half.go_on(source)) == 4


def test_of_another_program_nothing_is_gone_on_with(tmp_path: Path) -> None:
    """Its files may be others by now, whatever their sizes and times say."""
    from safetensors.torch import save_file

    source = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(8, 4)}, source)
    rules, mesh = parse_rules("w=S(0)"), Mesh((4,))
    ids = {dcp.reshard(source, MemoryStore(), mesh, rules).save_id for _ in range(2)}
    assert len(ids) == 2


def test_the_same_once_more_over_itself(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    ids = [
        dcp.reshard(source, target, MESH, RULES, overwrite=overwrite).save_id
        for overwrite in (False, True, True)
    ]
    assert len(set(ids)) == 3
    assert same(elements(target), elements(source))
    assert len(list(target.glob("data/*/*"))) == 4


def test_a_twin_that_committed_first_keeps_the_files_that_both_wrote(source: Path) -> None:
    store = MemoryStore()
    made = dcp.reshard(source, store, MESH, RULES)
    commit(store, replace(made, created="2020-01-01T00:00:00+00:00"), overwrite=True)
    assert same(elements(store), elements(source))


def test_a_failing_process_tells_what_is_wrong(source: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    file = max(damaged.glob("data/*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[4100] ^= 1
    file.write_bytes(data)
    target = tmp_path / "target"
    with pytest.raises(Corrupt, match=file.name):
        dcp.reshard(damaged, target, MESH, RULES, processes=2, memory_bytes=1 << 30)
    assert not (target / "manifest.json").exists()


def test_a_process_that_cannot_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it ends before all was sent to it: a broken pipe is none of the caller's."""
    long = {"note": "x" * (1 << 21)}
    dcp.save({"w": torch.ones(8)}, tmp_path / "source", metadata=long)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match="a process that wrote for this one has ended"):
        dcp.reshard(
            tmp_path / "source",
            tmp_path / "target",
            Mesh((2,)),
            parse_rules("w=S(0)"),
            processes=2,
            memory_bytes=1 << 30,
        )


def test_memory_and_places_bound_the_processes(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MiB or more for so many"):
        dcp.reshard(source, tmp_path / "t", MESH, RULES, processes=9)
    with pytest.raises(ValueError, match="MiB or more for so many"):
        dcp.reshard(source, tmp_path / "t", MESH, RULES, memory_bytes=100 << 20)
    with pytest.raises(ValueError, match="not their objects"):
        dcp.reshard(source, MemoryStore(), MESH, RULES, processes=2)


_DRIVER = """
import os, sys
import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.committing import commit
from dtckpt.dtensor import Mesh
source, target, number, processes = sys.argv[1:]

def on_progress(done, total):
    if done > total // 2:
        os.kill(os.getpid(), int(number))

dcp.reshard(source, target, Mesh((2, 2), ("dp", "tp")), dcp.parse_rules("*w=S(0),S(1)"),
    processes=int(processes), memory_bytes=1 << 30, on_progress=on_progress)
"""


@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGKILL, 1), (signal.SIGKILL, 2), (signal.SIGINT, 2)]
)
def test_killed_half_way(
    source: Path, tmp_path: Path, number: signal.Signals, processes: int
) -> None:
    target = tmp_path / "target"
    args = [sys.executable, "-c", _DRIVER, source, target, str(int(number)), str(processes)]
    done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -number, done.stderr
    assert not (target / "manifest.json").exists()
    left = {path: path.stat().st_mtime_ns for path in target.glob("data/*/*.safetensors")}
    if number == signal.SIGINT:
        assert {path for path in target.rglob("*") if path.is_file()} == left.keys()
    made = dcp.reshard(source, target, MESH, parse_rules("*w=S(0),S(1)"))
    assert all(path.stat().st_mtime_ns == before for path, before in left.items())
    assert len(made.files) == 4
    assert dcp.verify(target).problems == ()
    assert same(elements(target), elements(source))


def test_ranks_of_a_job_share_the_files(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"

    def reshard(rank: int, group: Any) -> None:
        rules = parse_rules("*w=S(0),S(1)")
        made = dcp.reshard(source, target, MESH, rules, process_group=group)
        assert len(made.files) == 4
        others = parse_rules("*w=S(0),R" if rank == 1 else "*w=R,S(0)")
        with pytest.raises(LayoutMismatch, match="same options"):
            dcp.reshard(source, target, MESH, others, process_group=group, overwrite=True)

    run_ranks(2, reshard)
    assert dcp.verify(target).problems == ()
    assert same(elements(target), elements(source))
