"""Exports: safetensors files that other libraries load, and that come back as they were."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh
from dtckpt.errors import Corrupt, LayoutMismatch, ObjectExists, StorageError
from dtckpt.storage import Fault, FaultyStore, Rule, open_store
from dtckpt.storage.testing.faults import RaiseError

hub: Any = importlib.import_module("huggingface_hub")  # too large to be type-checked


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(40, 8),
        "layers.0.up.weight": torch.randn(16, 8).bfloat16(),
        "layers.0.blocks": torch.randint(0, 255, (5, 3), dtype=torch.uint8),
        "scale": torch.tensor(3.0, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "large": torch.randn(700, 100),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that lies in shards of rows and of columns."""
    ckpt.save({"model": weights(), "step": 3}, tmp_path / "whole", no_dist=True)
    rules = ckpt.parse_rules("*large=S(1); *.weight=S(0)")
    ckpt.reshard(tmp_path / "whole", tmp_path / "run", Mesh.parse("tp=3"), rules)
    return tmp_path / "run"


def test_a_directory_of_one_file(saved: Path, tmp_path: Path) -> None:
    report = ckpt.export(saved, tmp_path / "out", part="model")
    assert report.files == ("model.safetensors",)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(weights()) == set(report.tensors)
    for name, value in weights().items():
        assert found[name].dtype == value.dtype
        assert found[name].equal(value)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert report.num_bytes == sum(value.nbytes for value in weights().values())


def test_several_files_and_their_index(saved: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    report = ckpt.export(
        saved,
        tmp_path / "out",
        part="model",
        max_file_bytes=1300,
        on_progress=lambda now, total: done.append((now, total)),
    )
    assert len(report.files) > 2
    assert done[-1] == (report.num_bytes, report.num_bytes)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.num_bytes
    found: dict[str, Tensor] = {}
    for name in report.files:
        found |= load_file(tmp_path / "out" / name)
    assert {name: found[name].tolist() for name in found} == {
        name: value.tolist() for name, value in weights().items()
    }
    assert set(index["weight_map"]) == set(weights())
    ckpt.export(saved, tmp_path / "one" / "state.safetensors", part="model", max_file_bytes=10)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["state.safetensors"]


def test_what_is_exported_comes_back(saved: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    ckpt.export(saved, first, part="model", max_file_bytes=1300)
    ckpt.export(first, second, max_file_bytes=1300)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    into = {"model": {name: torch.zeros_like(value) for name, value in weights().items()}}
    ckpt.load(into, first, rename={"model": ""}, no_dist=True)
    for name, value in weights().items():
        assert into["model"][name].equal(value)


class Tied(nn.Module):
    """An output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    ckpt.save({"model": model}, tmp_path / "run", no_dist=True)
    report = ckpt.export(tmp_path / "run", tmp_path / "out", part="model")
    assert report.tied == {"head.weight": "embed.weight"}
    again = Tied()
    load_model(again, str(tmp_path / "out" / "model.safetensors"))
    assert again.head.weight.equal(model.head.weight)
    opened = ckpt.open(tmp_path / "out")
    assert opened["head.weight"][...].equal(model.embed.weight)
    assert opened.manifest.tensors["head.weight"].same_as == "embed.weight"
    third = Tied()
    ckpt.load({"model": third}, tmp_path / "out", rename={"model": ""}, no_dist=True)
    assert third.embed.weight.equal(model.embed.weight)


def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    ckpt.save({"model": model}, tmp_path / "run", no_dist=True)
    ckpt.export(tmp_path / "run", tmp_path / "out", part="model", max_file_bytes=3000)
    config.save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert again.state_dict()[name].equal(value), name


def test_what_is_there_is_not_overwritten(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt.export(saved, out, part="model", max_file_bytes=1300)
    (out / "config.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ObjectExists, match="overwrite=True"):
        ckpt.export(saved, out, part="model")
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    ckpt.export(saved, out, part="model", overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_the_source_is_never_the_target(saved: Path, tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    ckpt.export(saved, out, part="model", max_file_bytes=1300)
    ckpt.export(saved, out / "one.safetensors", part="model")
    link.symlink_to(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for source in (out, link, out / "one.safetensors"):
        for target in (out, link, out / "one.safetensors", link / "two.safetensors"):
            with pytest.raises(LayoutMismatch, match="lies there itself"):
                ckpt.export(source, target, overwrite=True)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("modle", r"there is no part 'modle'; did you mean 'model'"),
        ("", r"hold tensors only, and 'the state' has step; choose a part"),
        ("step", r"hold tensors only, and 'step' has step"),
        ("model/scale", r"'model/scale' has no name in a file"),
    ],
)
def test_parts_that_no_file_can_hold(saved: Path, tmp_path: Path, part: str, match: str) -> None:
    with pytest.raises(LayoutMismatch, match=match):
        ckpt.export(saved, tmp_path / "out", part=part)
    assert not (tmp_path / "out").exists()


def test_two_names_that_become_one(tmp_path: Path) -> None:
    ckpt.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "run", no_dist=True)
    with pytest.raises(LayoutMismatch, match=r"'a/b' and 'a\.b' would both be called 'a\.b'"):
        ckpt.export(tmp_path / "run", tmp_path / "out")


def test_damage_leaves_nothing_behind(saved: Path, tmp_path: Path) -> None:
    file = next(saved.rglob("00001.safetensors"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(Corrupt, match="are damaged"):
        ckpt.export(saved, tmp_path / "out", part="model", max_file_bytes=1300)
    assert not list((tmp_path / "out").rglob("*.*"))


def test_a_store_that_fails_leaves_nothing_behind(saved: Path, tmp_path: Path) -> None:
    place = open_store(tmp_path / "out")
    faulty = FaultyStore(place, [Rule(RaiseError(StorageError("full")), op="write", nth=4)])
    with pytest.raises(StorageError, match="full"):
        ckpt.export(saved, faulty, part="model", max_file_bytes=1300)
    assert not list((tmp_path / "out").rglob("*.*"))


class Rival(Fault):
    """Another writer, who takes the name just before."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def before(self) -> None:
        self.place.mkdir(exist_ok=True)
        (self.place / "model.safetensors").write_bytes(b"theirs")


def test_what_another_writer_made_is_not_taken_away(saved: Path, tmp_path: Path) -> None:
    place = FaultyStore(open_store(tmp_path / "out"), [Rule(Rival(tmp_path / "out"), op="create")])
    with pytest.raises(ObjectExists):
        ckpt.export(saved, place, part="model")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"theirs"
