"""An incremental checkpoint that is made to stand on its own, and what may come between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Shard
from dtckpt.errors import Corrupt, InUse, NotCommitted, StorageError
from dtckpt.storage import FaultyStore, LocalStore, RaiseError, Rule

from ..ranks import run_ranks


def state(value: float) -> dict[str, Any]:
    tied = torch.arange(3000.0)
    slow = torch.full((99,), value // 2)
    return {"frozen": tied, "tied": tied, "slow": slow, "w": torch.full((5, 7), value), "n": value}


def chain(root: Path, length: int) -> None:
    for step in range(1, length + 1):
        base = root / f"step-{step - 1}" if step > 1 else None
        dcp.save(state(step), root / f"step-{step}", base=base, metadata={"step": step})


def check(root: Path, step: int) -> None:
    got = state(0)
    dcp.load(got, root / f"step-{step}")
    assert got["n"] == step
    assert torch.equal(got["w"], state(step)["w"])
    assert torch.equal(got["frozen"], state(0)["frozen"])
    assert not dcp.verify(root / f"step-{step}").problems


def test_it_stands_on_its_own(tmp_path: Path) -> None:
    chain(tmp_path, 2)
    before = dcp.read_manifest(LocalStore(tmp_path / "step-2"))
    assert before.borrowed
    made = dcp.detach(tmp_path / "step-2")
    assert dcp.read_manifest(LocalStore(tmp_path / "step-2")) == made
    assert not made.borrowed
    assert (made.tensors, made.tree, made.metadata) == (
        before.tensors,
        before.tree,
        before.metadata,
    )
    dcp.delete(tmp_path / "step-1")
    check(tmp_path, 2)
    assert len(list((tmp_path / "step-2" / "data").iterdir())) == 1
    assert dcp.detach(tmp_path / "step-2") == made  # nothing to do


def test_what_others_refer_to_is_left_as_it_is(tmp_path: Path) -> None:
    chain(tmp_path, 3)
    with pytest.raises(InUse, match="step-3"):
        dcp.detach(tmp_path / "step-2")
    check(tmp_path, 3)
    for step in (3, 2):
        dcp.detach(tmp_path / f"step-{step}")
    dcp.delete(tmp_path / "step-1")
    for step in (3, 2):
        check(tmp_path, step)


def test_sharded_parts_stay_where_their_ranks_wrote_them(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        mesh = DeviceMesh("cpu", Mesh((3,)), groups=[group])
        local = torch.arange(400.0)[None] + rank
        frozen = DTensor.from_local(local, mesh, [Shard(0)], shape=(3, 400))
        for step in (1, 2):
            dcp.save(
                {"frozen": frozen, "n": step},
                tmp_path / f"step-{step}",
                base=tmp_path / "step-1" if step == 2 else None,
                process_group=group,
            )

    run_ranks(3, body)
    made = dcp.detach(tmp_path / "step-2")
    assert [record.rank for record in made.files] == [0, 1, 2]
    dcp.delete(tmp_path / "step-1")
    with dcp.open(tmp_path / "step-2") as checkpoint:
        expected = torch.arange(400.0)[None] + torch.arange(3.0)[:, None]
        assert torch.equal(checkpoint["frozen"][:], expected)


@pytest.mark.parametrize("op", ["create", "write", "close", "publish"])
def test_failures_leave_what_was_there(tmp_path: Path, op: str) -> None:
    chain(tmp_path, 2)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    store = FaultyStore(LocalStore(tmp_path), [Rule(RaiseError(StorageError("no")), op=op)])
    with pytest.raises(StorageError, match="no"):
        dcp.detach(store.substore("step-2"))
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert after >= set(before)
    if op != "publish":  # which may have gone through
        assert sorted(after) == before
    check(tmp_path, 2)


def test_a_damaged_base_is_named_and_nothing_changes(tmp_path: Path) -> None:
    chain(tmp_path, 2)
    (path,) = (tmp_path / "step-1" / "data").glob("*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # of what both hold
    path.write_bytes(data)
    text = (tmp_path / "step-2" / "manifest.json").read_bytes()
    with pytest.raises(Corrupt, match="damaged"):
        dcp.detach(tmp_path / "step-2")
    assert (tmp_path / "step-2" / "manifest.json").read_bytes() == text
    assert len(list((tmp_path / "step-2" / "data").iterdir())) == 1
    with pytest.raises(NotCommitted):
        dcp.detach(tmp_path / "step-9")
