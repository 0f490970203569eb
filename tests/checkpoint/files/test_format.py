"""The files themselves: readable by others, and as docs/format.md says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.blocks import BlockHasher, num_blocks
from dtckpt.checkpoint.files.manifest import Manifest
from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.tensors.dtypes import BY_TORCH_NAME, DTYPES
from dtckpt.dtensor import Layout, Mesh, Shard
from dtckpt.errors import CheckpointError, Corrupt, LayoutMismatch
from dtckpt.storage import MemoryStore

from .. import golden
from ..simulate import Given, items, save_all
from ..tensors.subclass_stand_ins import same

DATA = Path(__file__).parents[2] / "data"


def tensor_of(name: str) -> torch.Tensor:
    """A small tensor with random bits of a dtype."""
    dtype = getattr(torch, name)
    if dtype is torch.bool:
        return torch.tensor([[True, False, True]])
    size = BY_TORCH_NAME[name].itemsize
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (2, 3 * size), dtype="u1"))
    return raw.view(dtype)


def test_a_data_file_opens_with_plain_safetensors(tmp_path: Path) -> None:
    state = {"model.embed.weight": torch.randn(7, 3), "model.norm": torch.ones(5).bfloat16()}
    dcp.save(state, tmp_path)
    (file,) = tmp_path.glob("data/*/*.safetensors")
    with safe_open(file, "pt") as opened:
        assert set(state) < set(opened.keys()), "whole tensors keep their names"
        for name, tensor in state.items():
            assert torch.equal(opened.get_tensor(name), tensor)
        assert opened.metadata()["format"] == "pt"
    assert file.stat().st_mode & 0o044, "others may read it"


def test_parts_are_named_by_their_boxes(tmp_path: Path) -> None:
    layout = Layout(Mesh((2, 2)), (Shard(0), Shard(1)), (5, 4))
    whole = items((5, 4), "F32")
    store, files = save_all({"w": Given(whole, "F32", layout)}, range(4))
    keys: dict[str, torch.Tensor] = {}
    for info in store.list("data"):
        path = tmp_path / Path(info.name).name
        path.write_bytes(store.read(info.name))
        keys |= load_file(path)
    del keys["__dtckpt_blocks__"]
    assert sorted(keys) == ["w[0:3,0:2]", "w[0:3,2:4]", "w[3:5,0:2]", "w[3:5,2:4]"]
    assert np.array_equal(keys["w[3:5,2:4]"].view(torch.int32).numpy().view("u4"), whole[3:, 2:])
    assert len(files) == 4


def test_data_starts_on_a_page_and_carries_its_checksums(tmp_path: Path) -> None:
    state = {"w": torch.randn(600_000), "empty": torch.ones(0), "n": torch.ones(3).bfloat16()}
    dcp.save(state, tmp_path)
    (file,) = tmp_path.glob("data/*/*.safetensors")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 4096 == 0
    start, end = header.pop("__dtckpt_blocks__")["data_offsets"]
    assert 8 + length + end == len(data)
    block = int(header.pop("__metadata__")["dtckpt_block_bytes"])
    region, table = data[8 + length :][:start], data[8 + length :][start:end]
    chunks = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    starts = [(i, min(i + block, high)) for low, high in chunks for i in range(low, high, block)]
    assert [high - low for low, high in starts] == [block, block, 2_400_000 - 2 * block, 6]
    assert b"".join(xxhash.xxh3_128_digest(region[low:high]) for low, high in starts) == table
    record = json.loads((tmp_path / "manifest.json").read_bytes())["files"][0]
    assert record["size"] == len(data)
    assert record["data_bytes"] == len(region) == 2_400_006
    assert record["header"] == xxhash.xxh3_128_hexdigest(data[: 8 + length])
    assert record["blocks"] == xxhash.xxh3_128_hexdigest(table)


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 12), st.data())
def test_digests_tell_chunks_wherever_they_lie(
    chunks: list[bytes], block_bytes: int, data: st.DataObject
) -> None:
    """However the bytes of a chunk arrive, and whatever is beside it."""
    hasher = BlockHasher(block_bytes)
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            size = data.draw(st.integers(1, len(rest)))
            hasher.update(rest[:size])
            rest = rest[size:]
        hasher.end_chunk()
    table = hasher.table()
    for chunk in chunks:
        alone = BlockHasher(block_bytes)
        alone.update(memoryview(chunk))
        alone.end_chunk()
        own, table = table[: len(alone.table())], table[len(alone.table()) :]
        assert len(own) == 16 * num_blocks(len(chunk), block_bytes)
        assert own == alone.table()
    assert table == b""


@pytest.mark.parametrize("name", sorted(BY_TORCH_NAME))
def test_every_dtype_that_torch_and_safetensors_share(name: str, tmp_path: Path) -> None:
    tensor = tensor_of(name)
    dcp.save({"x": tensor, "scalar": tensor[0, 0].clone()}, tmp_path)
    into = {"x": torch.empty_like(tensor), "scalar": torch.empty_like(tensor[0, 0])}
    dcp.load(into, tmp_path)
    assert torch.equal(into["x"].view(torch.uint8), tensor.view(torch.uint8))
    (file,) = tmp_path.glob("data/*/*.safetensors")
    with safe_open(file, "pt") as opened:
        found = opened.get_tensor("x")
    if name == "complex128":  # which safetensors has not: pairs of float64
        found = torch.view_as_complex(found)
    assert found.dtype == tensor.dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_size_0_tensors_are_there_for_other_readers(tmp_path: Path) -> None:
    dcp.save({"x": torch.zeros(0, 3)}, tmp_path)
    (file,) = tmp_path.glob("data/*/*.safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("x").shape == (0, 3)


def test_the_manifest_does_not_grow_with_the_mesh() -> None:
    sizes: list[int] = []
    for axis in (2, 64):
        layout = Layout(Mesh((axis, axis)), (Shard(0), Shard(1)), (4096, 4096))
        manifest = manifest_of(layout)
        sizes.append(len(manifest.to_bytes()))
    assert sizes[1] - sizes[0] < 10


def manifest_of(layout: Layout) -> Manifest:
    """A manifest of 50 tensors without files."""
    tensors = {
        f"layer{i}": StoredTensor(
            name=f"layer{i}", dtype=DTYPES["F32"], shape=layout.shape, layout=layout
        )
        for i in range(50)
    }
    return Manifest(save_id="0", created="", tensors=tensors, tree=None, files=())


def rewritten(text: str) -> MemoryStore:
    """A store with a manifest of this text and a right digest."""
    blank = re.sub(r'^\{"digest": "\w{32}"', '{"digest": "' + "0" * 32 + '"', text)
    digest = xxhash.xxh3_128_hexdigest(blank.encode())
    return MemoryStore({"manifest.json": blank.replace("0" * 32, digest, 1).encode()})


def test_newer_versions_and_required_features_are_refused() -> None:
    store = MemoryStore()
    dcp.save({"x": 1}, store)
    text = store.read("manifest.json").decode()
    assert dcp.open(rewritten(text)).state_dict() == {"x": 1}
    for old, new in [('"version": 1', '"version": 4'), ('"requires": []', '"requires": ["zip"]')]:
        with pytest.raises(CheckpointError, match="Upgrade dtckpt"):
            dcp.open(rewritten(text.replace(old, new)))
    optional = text.replace('"requires": []', '"requires": [], "novelty": [1]')
    assert dcp.open(rewritten(optional)).state_dict() == {"x": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"dtype": "F32"', '"dtype": "F33"'),
        ('"shape": [4]', '"shape": [-4]'),
        ('"placements": ["R"]', '"placements": ["R", "R"]'),
        ('"placements": ["R"]', '"placements": ["X"]'),
        ('"writer": 0', '"writer": 5'),
        ('"mesh": 0', '"mesh": 9'),
        ('"format": "dtckpt"', '"format": "other"'),
        ('"save_id"', '"safe_id"'),
    ],
)
def test_malformed_manifests_with_a_right_digest_are_refused(old: str, new: str) -> None:
    store = MemoryStore()
    dcp.save({"x": torch.ones(4)}, store)
    text = store.read("manifest.json").decode()
    assert old in text
    with pytest.raises((Corrupt, LayoutMismatch)):
        dcp.load({"x": torch.zeros(4)}, rewritten(text.replace(old, new)))


def test_metadata_is_kept_and_must_be_json() -> None:
    store = MemoryStore()
    dcp.save({}, store, metadata={"git": "abc", "step": 3})
    assert dcp.open(store).metadata == {"git": "abc", "step": 3}
    with pytest.raises(CheckpointError, match="must be a JSON value"):
        dcp.save({}, MemoryStore(), metadata=object())


@pytest.mark.parametrize("version", sorted(path.name for path in DATA.iterdir() if path.is_dir()))
def test_checkpoints_of_every_released_version_load(version: str) -> None:
    path = DATA / version
    assert dcp.verify(path).problems == ()
    checkpoint = dcp.open(path)
    for name in golden.LAYOUTS:
        assert torch.equal(checkpoint[f"model/{name}"][...], golden.whole(name))
    assert repr(checkpoint.state_dict()["values"]) == repr(golden.VALUES)
    assert checkpoint.metadata == {"made": "by hand"}
    into: dict[str, Any] = {
        "model": {name: torch.zeros_like(golden.whole(name)) for name in golden.LAYOUTS},
        "plain": torch.zeros(4),
        "rng": dcp.PerRank({"seed": -1, "state": torch.zeros(3, dtype=torch.int64)}),
        "values": None,
    }
    if version != "v1":
        into["large"] = {name: torch.zeros_like(golden.large(name)) for name in golden.LARGE}
    if version == "v3":
        into |= {"long": [], "standard": None, "turned": torch.zeros(3, 2)}
        into["low_bit"] = golden.low_bit(is_filled=False)
    dcp.load(into, path)
    if version == "v3":
        assert (into["long"], into["standard"]) == (golden.LONG, golden.STANDARD)
        assert torch.equal(into["turned"], golden.turned())
        assert same(into["low_bit"], golden.low_bit())
    for name, found in into.get("large", {}).items():
        assert torch.equal(found, golden.large(name))
    assert torch.equal(into["model"]["ordered"], golden.whole("ordered"))
    assert into["rng"].value["seed"] == 0
    assert repr(into["values"]) == repr(golden.VALUES)


def mutations(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one leaf or key changed to something odd."""
    odd = [None, -1, 0, 2**70, 1.5, "", "x", [], {}, [[]], {"tensor": "nowhere"}, True]
    copied = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(copied)
    node, key = rng.choice(places)
    if isinstance(node, dict) and rng.random() < 0.2:
        del node[key]
    else:
        node[key] = rng.choice(odd)
    return copied


def test_no_internal_error_leaves_a_malformed_manifest() -> None:
    """With a right digest, as only a faulty writer would make: precise errors all the same."""
    store = MemoryStore()
    state = {"w": torch.ones(4), "v": [1, {"a": (None, b"x")}], "r": dcp.PerRank(3)}
    dcp.save(state, store)
    names = [info.name for info in store.list("data")]
    files = {name: store.read(name) for name in names}
    value = json.loads(store.read("manifest.json"))
    del value["digest"]
    rng = random.Random(5)
    refused = 0
    for _ in range(400):
        text = '{"digest": "' + "0" * 32 + '", ' + json.dumps(mutations(value, rng))[1:]
        damaged = rewritten(text)
        damaged = MemoryStore({"manifest.json": damaged.read("manifest.json"), **files})
        try:
            dcp.open(damaged).state_dict()
            dcp.verify(damaged)
            dcp.load({"w": torch.zeros(4), "v": None, "r": dcp.PerRank(0)}, damaged)
        except CheckpointError:
            refused += 1
    assert refused > 200
