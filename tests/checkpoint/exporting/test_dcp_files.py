"""Exports that torch.distributed.checkpoint loads, and that come back as they were."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.exporting import dcp_files
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch, ObjectExists, StorageError
from dtckpt.storage import FaultyStore, Rule, open_store
from dtckpt.storage.testing.faults import RaiseError

from . import exchange

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.randn(50, 30), "b": torch.randn(7).bfloat16(), "n": torch.empty(0, 4)},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "list": [torch.arange(3), {"deep": torch.ones(2, dtype=torch.complex64)}, "text"],
        "plain": [1, 2.5, [None, True]],
        "pair": (torch.arange(4), "x"),
        "array": np.arange(5),
        "empty": {},
        "step": 3,
    }


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


def dtype_of(leaf: Any) -> torch.dtype | None:
    """Return the one property that torch uses; of the others, releases write other ones."""
    return None if isinstance(leaf, BytesStorageMetadata) else leaf.properties.dtype


def cleared(value: Any) -> Any:
    """Return a state of the same structure without its values."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: cleared(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, Tensor | dict | list) for item in value):
        return [cleared(item) for item in value]
    return None


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in shards of rows and of columns, of which an export cuts small chunks."""
    monkeypatch.setattr(dcp_files, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(dcp_files, "_FILE_BYTES", 2000)
    ckpt.save(state(), tmp_path / "whole", no_dist=True)
    rules = ckpt.parse_rules("model/w=S(1); *=R")
    ckpt.reshard(tmp_path / "whole", tmp_path / "run", Mesh.parse("tp=3"), rules)
    return tmp_path / "run"


@pytest.mark.parametrize("state", [{}, {"a": {}, "b": []}])
def test_states_without_leaves(tmp_path: Path, state: dict[str, Any]) -> None:
    ckpt.save(state, tmp_path / "ours")
    report = ckpt.export(tmp_path / "ours", tmp_path / "dcp", format="dcp")
    assert report.tensors == ()
    assert ckpt.open(tmp_path / "dcp").state_dict() == state
    assert ckpt.verify(tmp_path / "dcp").problems == ()
    into = dict.fromkeys(state)
    torch_dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert into == state


def test_torch_loads_it(saved: Path, tmp_path: Path) -> None:
    report = ckpt.export(saved, tmp_path / "out", format="dcp")
    assert len(report.files) > 2
    assert {"model.w", "list.1.deep"} < set(report.tensors)
    into = cleared(state())
    torch_dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    expected = state() | {"pair": into["pair"]}
    assert alike(into, expected)
    assert alike(into["pair"], state()["pair"])


def test_torches_that_read_five_properties_of_a_tensor_load_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch up to 2.14 refuses the sixth that 2.15 writes."""
    pickled: Any = TensorProperties.__getstate__
    seen: list[tuple[Any, ...]] = []

    def six(properties: TensorProperties) -> tuple[Any, ...]:
        return (*pickled(properties)[:5], (1,))

    def note(_: TensorProperties, state: tuple[Any, ...]) -> None:
        seen.append(state)

    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", six)
        ckpt.export(saved, tmp_path / "out", format="dcp")
    monkeypatch.setattr(TensorProperties, "__setstate__", note)
    told = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert len(seen) == sum(hasattr(leaf, "chunks") for leaf in told.state_dict_metadata.values())
    five = TensorProperties(dtype=torch.float32).__getstate__()[:5]
    assert all(state[1:] == five[1:] for state in seen), seen
    assert {state[0] for state in seen} > {torch.float32, torch.bfloat16, torch.complex64}


def test_it_has_the_names_and_structure_that_torch_gives(saved: Path, tmp_path: Path) -> None:
    ckpt.export(saved, tmp_path / "out", format="dcp")
    theirs = state()
    torch_dcp.save(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    told = [
        torch_dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("out", "theirs")
    ]
    mine, others = (metadata.planner_data for metadata in told)
    assert mine.pop("empty") == ("empty",)  # torch leaves it out
    assert mine == others
    for fqn, leaf in told[1].state_dict_metadata.items():
        mine = told[0].state_dict_metadata[fqn]
        assert type(mine) is type(leaf)
        assert getattr(mine, "size", None) == getattr(leaf, "size", None)
        assert dtype_of(mine) == dtype_of(leaf)


def test_what_is_exported_comes_back(saved: Path, tmp_path: Path) -> None:
    ckpt.export(saved, tmp_path / "out", format="dcp", part="model")
    into = {"model": cleared(state()["model"])}
    ckpt.load(into, tmp_path / "out", rename={"model": ""}, no_dist=True)
    assert alike(into["model"], state()["model"])
    ckpt.export(tmp_path / "out", tmp_path / "again", format="dcp")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())


def test_a_training_goes_on_with_torch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.randn(3, 5)).square().sum().backward()
    optimizer.step()
    names, moments = get_state_dict(model, optimizer)
    ckpt.save({"model": names, "optim": moments}, tmp_path / "run", no_dist=True)
    ckpt.export(tmp_path / "run", tmp_path / "out", format="dcp")

    other = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    names, moments = get_state_dict(other, again)
    into: dict[str, Any] = {"model": names, "optim": moments}
    torch_dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, again, model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert alike(dict(model.state_dict()), dict(other.state_dict()))
    assert alike(optimizer.state_dict(), again.state_dict())


def test_what_each_rank_kept_lies_under_its_number(tmp_path: Path) -> None:
    ckpt.save({"rng": ckpt.PerRank(torch.arange(3))}, tmp_path / "run", no_dist=True)
    ckpt.export(tmp_path / "run", tmp_path / "out", format="dcp")
    into = {"rng": {"0": torch.zeros(3, dtype=torch.int64)}}
    torch_dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert into["rng"]["0"].equal(torch.arange(3))


def test_only_its_own_files_are_replaced(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt.export(saved, out, format="dcp")
    (out / "notes.txt").write_text("mine")
    (out / "__0_99.distcp").write_bytes(b"of an export of more files")
    count = len(list(out.iterdir()))
    with pytest.raises(ObjectExists, match="overwrite=True"):
        ckpt.export(saved, out, format="dcp")
    assert len(list(out.iterdir())) == count
    ckpt.export(saved, out, format="dcp", part="model", overwrite=True)
    assert (out / "notes.txt").exists()
    assert not (out / "__0_99.distcp").exists()
    metadata = pickle.loads((out / ".metadata").read_bytes())
    assert set(metadata.state_dict_metadata) == {"w", "b", "n"}


@pytest.mark.parametrize("nth", [1, 3])
def test_a_store_that_fails_leaves_nothing_behind(saved: Path, tmp_path: Path, nth: int) -> None:
    place = open_store(tmp_path / "out")
    faulty = FaultyStore(place, [Rule(RaiseError(StorageError("full")), op="write", nth=nth)])
    with pytest.raises(StorageError, match="full"):
        ckpt.export(saved, faulty, format="dcp")
    assert not list((tmp_path / "out").rglob("*.*"))


def test_parts_that_it_cannot_hold(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="'model/w' is no dict"):
        ckpt.export(saved, tmp_path / "out", format="dcp", part="model/w")
    ckpt.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "two", no_dist=True)
    with pytest.raises(LayoutMismatch, match=r"would both be called 'a\.b'"):
        ckpt.export(tmp_path / "two", tmp_path / "out", format="dcp")
    ckpt.save({"a": {1: {"x": 1}, "1": {"y": 2}}}, tmp_path / "text", no_dist=True)
    with pytest.raises(LayoutMismatch, match="a dict has the keys a/1 and its text"):
        ckpt.export(tmp_path / "text", tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()


def test_a_list_of_nothing_but_empty_dicts_comes_back(tmp_path: Path) -> None:
    given = {"groups": [{}, 1], "mixed": [{}, torch.ones(2)]}
    ckpt.save(given, tmp_path / "run", no_dist=True)
    ckpt.export(tmp_path / "run", tmp_path / "out", format="dcp")
    metadata = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert set(metadata.state_dict_metadata) == {"groups", "mixed.0", "mixed.1"}
    assert ckpt.open(tmp_path / "out").state_dict()["groups"] == [{}, 1]
    dcp_to_torch_save(tmp_path / "out", tmp_path / "state.pt")  # which makes the state of names
    assert alike(torch.load(tmp_path / "state.pt"), given)


def test_this_torch_loads_what_it_has_exported(tmp_path: Path) -> None:
    """``make test-matrix`` does so across releases of torch."""
    exchange.write(str(tmp_path))
    exchange.read(str(tmp_path))
