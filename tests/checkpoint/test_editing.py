from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import editing
from dtckpt.checkpoint.files import committing
from dtckpt.checkpoint.files.places import MANIFEST
from dtckpt.dtensor import Mesh
from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    Corrupt,
    InUse,
    LayoutMismatch,
    NotCommitted,
)
from dtckpt.storage import open_store
from dtckpt.storage.memory import MemoryStore

W, B = torch.arange(40_000.0).reshape(200, 200), torch.ones(5).bfloat16()


def state() -> dict[str, Any]:
    return {"model": {"w": W, "tied": W, "b": B}, "step": 3}


def data_files(path: Path) -> dict[str, tuple[bytes, int]]:
    files = (file for file in path.rglob("*.safetensors"))
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_renamed_tensors_are_those_that_were_saved(tmp_path: Path, compress: Any) -> None:
    ckpt.save(state(), tmp_path, compress=compress)
    before = data_files(tmp_path)
    made = ckpt.edit(tmp_path, rename={"model/{rest*}": "net/deep/{rest*}"})
    assert data_files(tmp_path) == before
    assert ckpt.verify(tmp_path).problems == ()
    net = {"w": torch.zeros(200, 200), "tied": torch.zeros(200, 200), "b": torch.zeros_like(B)}
    loaded = {"net": {"deep": net}, "step": 0}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(net["w"], W)
    assert torch.equal(net["tied"], W)
    assert torch.equal(net["b"], B)
    assert made.tensors["net/deep/tied"].same_as == "net/deep/w"
    with ckpt.open(tmp_path) as opened:
        assert torch.equal(opened["net/deep/w"][3:5, ::7], W[3:5, ::7])
        assert opened.manifest == made
    assert ckpt.statistics(tmp_path, "net/deep/w")["net/deep/w"].max == 39_999
    told = json.loads((tmp_path / MANIFEST).read_bytes())
    assert "renamed" in told["requires"]
    assert told["tensors"]["net/deep/b"]["stored_as"] == "model/b"
    ckpt.edit(tmp_path, rename={"net/deep/{rest*}": "model/{rest*}"})
    back = json.loads((tmp_path / MANIFEST).read_bytes())
    assert "renamed" not in back["requires"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_without_elements_are_renamed(tmp_path: Path, num_ranks: int) -> None:
    saved = {"m": {"none": torch.empty(0, 4), "w": W}}
    ckpt.save(saved, tmp_path / "saved")
    place = tmp_path / "place"
    ckpt.reshard(tmp_path / "saved", place, Mesh((num_ranks,)), ckpt.parse_rules("*=S(1)"))
    before = ckpt.read_manifest(open_store(place)).tensors["m/none"]
    made = ckpt.edit(place, rename={"m/{rest*}": "n/{rest*}"}).tensors["n/none"]
    assert (made.stored_as, made.recipe, made.layout) == ("m/none", None, before.layout)
    assert ckpt.verify(place).problems == ()
    loaded = {"n": {"none": torch.ones(0, 4), "w": torch.zeros_like(W)}}
    ckpt.load(loaded, place)
    assert torch.equal(loaded["n"]["w"], W)
    ckpt.edit(place, rename={"n/none": "m/none"})
    assert ckpt.read_manifest(open_store(place)).tensors["m/none"] == before


def test_the_other_of_tied_tensors_is_renamed(tmp_path: Path) -> None:
    ckpt.save(state(), tmp_path)
    made = ckpt.edit(tmp_path, rename={"model/w": "other"})
    tied = made.tensors["model/tied"]
    assert (tied.same_as, tied.stored_as) == (None, "model/w")
    assert made.tensors["other"].same_as == "model/tied"
    assert ckpt.verify(tmp_path).problems == ()
    made = ckpt.edit(tmp_path, rename={"model/tied": "model/w"})
    assert (made.tensors["model/w"].same_as, made.tensors["model/w"].stored_as) == (None, None)
    assert made.tensors["other"].same_as == "model/w"
    with ckpt.open(tmp_path) as opened:
        assert torch.equal(opened["other"][...], W)
        assert torch.equal(opened["model/w"][...], W)


def test_what_is_made_of_renamed_tensors(tmp_path: Path) -> None:
    ckpt.save(state(), tmp_path / "a")
    ckpt.edit(tmp_path / "a", rename={"model/{rest*}": "net/{rest*}"})
    ckpt.copy(tmp_path / "a", tmp_path / "copy")
    ckpt.reshard(tmp_path / "a", tmp_path / "resharded", mesh=Mesh((2,)), rules=[])
    for name in ("copy", "resharded"):
        assert ckpt.verify(tmp_path / name).problems == ()
        with ckpt.open(tmp_path / name, mapping=[ckpt.Move("net/w", "again")]) as opened:
            assert torch.equal(opened["again"][...], W)


def test_increments_before_and_after(tmp_path: Path) -> None:
    ckpt.save(state(), tmp_path / "step-1")
    ckpt.save(state() | {"step": 4}, tmp_path / "step-2", base=tmp_path / "step-1")
    ckpt.edit(tmp_path / "step-1", rename={"model/b": "model/c"})
    assert ckpt.verify(tmp_path / "step-2").problems == ()
    with pytest.raises(InUse):
        ckpt.delete(tmp_path / "step-1")
    ckpt.edit(tmp_path / "step-2", rename={"model/{rest*}": "net/{rest*}"})
    assert ckpt.verify(tmp_path / "step-2").problems == ()
    report = ckpt.save(state(), tmp_path / "step-3", base=tmp_path / "step-1")
    assert report.borrowed_bytes == W.nbytes
    assert ckpt.verify(tmp_path / "step-3").problems == ()
    ckpt.detach(tmp_path / "step-2")
    assert ckpt.verify(tmp_path / "step-2").problems == ()
    with ckpt.open(tmp_path / "step-2") as opened:
        assert torch.equal(opened["net/tied"][...], W)
        assert opened.manifest.tensors["net/b"].stored_as is None


def test_damage_of_a_renamed_tensor_is_found(tmp_path: Path) -> None:
    ckpt.save({"w": W}, tmp_path)
    ckpt.edit(tmp_path, rename={"w": "v"})
    (file,) = tmp_path.rglob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-5000] ^= 1
    file.write_bytes(raw)
    (problem,) = ckpt.verify(tmp_path).problems
    assert problem.tensors == ("v",)
    with pytest.raises(Corrupt):
        ckpt.load({"v": torch.zeros_like(W)}, tmp_path)


def test_metadata(tmp_path: Path) -> None:
    ckpt.save({"a": B}, tmp_path)
    ckpt.edit(tmp_path, set_metadata={"loss": 1.5, "tags": ["x"]})
    ckpt.edit(tmp_path, set_metadata={"loss": 1.25}, remove_metadata=["tags"])
    before = (tmp_path / MANIFEST).read_bytes()
    assert ckpt.edit(tmp_path).metadata == {"loss": 1.25}
    assert (tmp_path / MANIFEST).read_bytes() == before
    with pytest.raises(LayoutMismatch, match="have no 'tags'"):
        ckpt.edit(tmp_path, remove_metadata=["tags"])
    ckpt.save({"a": B}, tmp_path / "b", metadata=[1])
    with pytest.raises(LayoutMismatch, match="no dictionary"):
        ckpt.edit(tmp_path / "b", set_metadata={"a": 1})
    numbers: Any = {1: "one"}
    assert ckpt.edit(tmp_path, set_metadata=numbers).metadata == {"loss": 1.25, "1": "one"}
    assert ckpt.edit(tmp_path, set_metadata={"1": 2}).metadata == {"loss": 1.25, "1": 2}
    for value in (float("nan"), b"bytes", object()):
        with pytest.raises(CheckpointError, match="JSON value"):
            ckpt.edit(tmp_path, set_metadata={"a": value})


def test_what_cannot_be_edited(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted):
        ckpt.edit(tmp_path, set_metadata={"a": 1})
    save_file({"x": W}, str(tmp_path / "model.safetensors"))
    with pytest.raises(LayoutMismatch, match="convert it"):
        ckpt.edit(tmp_path, rename={"x": "y"})
    ckpt.save(state(), tmp_path / "c")
    before = (tmp_path / "c" / MANIFEST).read_bytes()
    for rename, said in (
        ({"model/v": "x"}, "no tensor fits"),
        ({"model/w": "model/b"}, "is there already"),
        ({"model/w": "step/w"}, "a value stands"),
        ({"model/{x}": "net"}, "captures"),
        ({"model/w": "a[0]"}, "no pattern"),
    ):
        with pytest.raises(LayoutMismatch, match=said):
            ckpt.edit(tmp_path / "c", rename=rename)
    assert (tmp_path / "c" / MANIFEST).read_bytes() == before


def test_somebody_else_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save({"a": B}, tmp_path)
    find = committing.find_manifest
    calls: list[bytes | None] = []

    def and_then_another_edits(store: Any) -> bytes | None:
        found = find(store)
        calls.append(found)
        if len(calls) == 1:
            monkeypatch.setattr(editing, "find_manifest", find)
            ckpt.edit(tmp_path, set_metadata={"by": "another"})
        return found

    monkeypatch.setattr(editing, "find_manifest", and_then_another_edits)
    with pytest.raises(AlreadyCommitted, match="somebody else"):
        ckpt.edit(tmp_path, set_metadata={"by": "me"})
    assert ckpt.read_manifest(open_store(tmp_path)).metadata == {"by": "another"}


def test_two_tensors_are_not_stored_under_one_name() -> None:
    store = MemoryStore()
    ckpt.save({"a": B, "b": B + 1}, store)
    made = ckpt.read_manifest(store)
    made.tensors["b"] = made.tensors["b"]._replace(stored_as="a")
    text = made.to_bytes()
    with pytest.raises(Corrupt, match="stored under one name"):
        type(made).from_bytes(text, "here")
