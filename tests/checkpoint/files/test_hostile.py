"""Small checkpoints that state huge things: refused by an error of ours, soon, in little memory."""

from __future__ import annotations

import json
import os
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.files.manifest import Place
from dtckpt.checkpoint.state.limits import MAX_NESTING, METADATA_VARIABLE, json_memory
from dtckpt.dtensor import Layout, Mesh, Packed
from dtckpt.dtensor.geometry.box import Box
from dtckpt.errors import CheckpointError, Corrupt, DtckptError, NotCommitted, Unsavable
from dtckpt.storage import MemoryStore, open_store

from .forging import Objects, header_of, manifest_of, objects_of, sealed, with_file, with_manifest

MAX_SECONDS = 5.0
MAX_BYTES = 256 << 20
GIB = 1 << 30

Fields = dict[str, Any]


def small() -> tuple[Objects, Fields]:
    """The objects of a checkpoint of a hundred numbers, and its manifest."""
    store = MemoryStore()
    ckpt.save({"a": torch.arange(100.0)}, store, no_dist=True)
    objects = objects_of(store)
    return objects, manifest_of(objects)


def operations(place: Any) -> Iterator[Callable[[], object]]:
    """Everything that reads a checkpoint."""
    yield lambda: [tensor[...] for tensor in ckpt.open(place).values()]
    yield lambda: ckpt.load({"a": torch.zeros(100)}, place, no_dist=True)
    yield lambda: ckpt.load({"a": torch.zeros(100)}, place, no_dist=True, strict=False)
    yield lambda: ckpt.verify(place)
    yield lambda: ckpt.reshard(place, MemoryStore(), Mesh((2,)), ckpt.parse_rules("a=S(0)"))
    yield lambda: ckpt.delete(place)


def refused(place: Any) -> set[str]:
    """Do everything; return what the errors say. Each ends soon, in little memory, as ours."""
    said: set[str] = set()
    for operation in operations(place):
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.process_time()
        try:
            operation()
        except DtckptError as error:
            said.add(str(error))
        assert max(map(len, said), default=0) < 10_000
        assert time.process_time() - began < MAX_SECONDS, said
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert (after.ru_maxrss - before.ru_maxrss) << 10 < MAX_BYTES, said
    return said


def tensors(lines: dict[str, Fields], **changes: Any) -> Objects:
    """A checkpoint whose manifest names other tensors."""
    objects, manifest = small()
    manifest |= {"tensors": lines, "tree": {"dict": {name: {"tensor": name} for name in lines}}}
    return with_manifest(objects, manifest | changes)


@pytest.mark.parametrize("what", ["header", "table", "manifest"])
def test_sparse_files_are_not_read_whole(tmp_path: Path, what: str) -> None:
    """Twenty gigabytes that take no room on the disk, with a manifest that says so."""
    place = tmp_path / "run" / "step-1"
    ckpt.save({"a": torch.arange(100.0)}, place, no_dist=True)
    manifest = json.loads((place / "manifest.json").read_bytes())
    record = manifest["files"][0]
    if what == "manifest":
        os.truncate(place / "manifest.json", 20 * GIB)
    else:
        os.truncate(next(place.glob("data/*/*")), 20 * GIB)
        record["size"] = 20 * GIB
        if what == "header":
            record["header_bytes"] = 20 * GIB - record["data_bytes"] - 16
        changed = with_manifest({}, manifest)
        (place / "manifest.json").write_bytes(changed["manifest.json"])
    said = refused(place)
    assert any("GiB" in text or METADATA_VARIABLE in text or "bytes" in text for text in said)
    if what == "manifest":
        with pytest.raises(CheckpointError, match=METADATA_VARIABLE):
            ckpt.latest(tmp_path / "run", no_dist=True)


@pytest.mark.parametrize("field", ["metadata", "tree", "tensors", "unknown"])
@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_deep_nesting(field: str, depth: int) -> None:
    objects, manifest = small()
    manifest[field] = "DEEP"
    text = with_manifest(objects, manifest)["manifest.json"]
    deep = b'{"list": [' * depth + b"]}" * depth if depth == 900 else b"[" * depth + b"]" * depth
    store = MemoryStore(objects | {"manifest.json": sealed(text.replace(b'"DEEP"', deep))})
    said = refused(store)
    if field != "unknown":  # a short one in a field that nobody reads harms nobody
        assert any("nested" in text or "malformed" in text for text in said)
    run = MemoryStore(
        {f"step-1/{name}": store.read(name) for name in objects if store.exists(name)}
    )
    if field != "unknown" or depth != 300:  # one that harms nobody is deleted by now
        with pytest.raises(Corrupt, match="none of the checkpoints here is whole"):
            ckpt.latest(run, no_dist=True)


def test_deep_headers() -> None:
    objects, _ = small()
    name = next(name for name in objects if name.startswith("data"))
    header, body = header_of(objects[name])
    deep = json.dumps(header).encode().replace(b'"F32"', b"[" * 50_000 + b"]" * 20_000)
    said = refused(MemoryStore(with_file(objects, 0, deep, body, fit=False)))
    assert any("malformed" in text for text in said)


def test_ninety_thousand_boxes() -> None:
    """Bars that cross in a plane: no order of them spares comparing each with most others."""
    n = 300
    columns = [[0, f"[0:{n},{i}:{i + 1}]"] for i in range(n)]
    cells = [[0, f"[{n + i}:{n + i + 1},{j}:{j + 1}]"] for i in range(n) for j in range(n)]
    line = {"dtype": "F32", "shape": [2 * n, n], "boxes": columns + cells}
    store = MemoryStore(tensors({"a": line}))
    began = time.process_time()
    with pytest.raises(Corrupt, match="bytes and the files"):
        ckpt.open(store)
    assert time.process_time() - began < MAX_SECONDS
    line["boxes"] = [*columns, *cells[1:300], [0, "[0:1,0:1]"]]
    line["shape"] = [n + 1, n]
    with pytest.raises(Corrupt, match="overlap"):
        ckpt.open(MemoryStore(tensors({"a": line})))


def regular(shape: list[int], placements: list[str], **more: Any) -> Fields:
    """A line of a manifest."""
    return {
        "dtype": "F32",
        "shape": shape,
        "mesh": 0,
        "placements": placements,
        "writer": 0,
        **more,
    }


def mesh(*shape: int, **more: Any) -> list[Fields]:
    """The meshes of a manifest."""
    return [{"shape": shape, "axes": [f"x{i}" for i in range(len(shape))], **more}]


HUGE: dict[str, Callable[[], Objects]] = {
    "a tensor of more bytes than the files": lambda: tensors({"a": regular([1 << 40], ["R"])}),
    "a size that no system call takes": lambda: tensors({"a": regular([1 << 63], ["R"])}),
    "more dims than numpy has": lambda: tensors({"a": regular([1] * 5000 + [100], ["R"])}),
    "a mesh of a thousand million ranks": lambda: tensors(
        {"a": regular([100], ["S(0)"])}, meshes=mesh(10**9)
    ),
    "a chunk from both ends for each of four million ranks": lambda: tensors(
        {"a": regular([100], ["HeadTail(0)"])}, meshes=mesh(4 * 10**6)
    ),
    "a piece of each part for as many": lambda: tensors(
        {"a": regular([100], ["Packed(0:60,40)"])}, meshes=mesh(4 * 10**6)
    ),
    "few ranks for a huge mesh": lambda: tensors(
        {"a": regular([100], ["R"])}, meshes=mesh(10**9, ranks=[0])
    ),
    "a million cells": lambda: tensors(
        {"a": regular([1000, 1000], ["S(0)", "S(1)"], dtype="U8")},
        meshes=mesh(1000, 1000),
        files=[record(1 << 20, 0)],
    ),
    "very many slices of every cell": lambda: tensors(
        {
            "a": regular(
                [10**6, 100],
                ["Ragged(0:999901," + ",".join(["1"] * 99) + ")", "R"],
                writers=[0] * 300_000,
                cut=0,
                dtype="U8",
            )
        },
        meshes=mesh(100, 2),
        files=[record(10**8, rank) for rank in range(200)],
    ),
    "very many files, none of them there": lambda: tensors(
        {f"t{i}": regular([100, 1], ["S(0)"], dtype="U8") for i in range(5000)},
        meshes=mesh(5000),
        files=[record(1 << 20, rank) for rank in range(5000)],
    ),
    "very many values": lambda: with_manifest(small()[0], small()[1] | {"metadata": [[]] * 10**7}),
    "very many empty strings": lambda: with_manifest(
        small()[0], small()[1] | {"unknown": [""] * 5 * 10**6}
    ),
}


def test_very_many_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {f"t{i}": regular([i + 1], ["R"], dtype="U8") for i in range(4000)}
    objects = tensors(lines, files=[record(1 << 40, 0)])
    ckpt.open(MemoryStore(objects))
    monkeypatch.setenv(METADATA_VARIABLE, "8")
    with pytest.raises(CheckpointError, match="layouts and boxes"):
        ckpt.open(MemoryStore(objects))


def test_very_many_ranges_of_a_dim() -> None:
    """As a small manifest states them: who holds what is found in time that grows with them."""
    layout = Layout(Mesh((2,)), (Packed(0, (2,) * 4000),), (8000,))
    began = time.process_time()
    pieces = list(layout.pieces_meeting(Box((0,), (8000,))))
    assert time.process_time() - began < MAX_SECONDS
    assert sum(held.numel for _, held, _ in pieces) == 8000


def record(num_bytes: int, rank: int) -> Fields:
    """A record of a data file that is not there."""
    sizes = {"size": 4096 + num_bytes + 16, "header_bytes": 4096, "data_bytes": num_bytes}
    return {"rank": rank, **sizes, "header": "0" * 32, "blocks": "0" * 32}


@pytest.mark.parametrize("what", HUGE)
def test_huge_things_in_a_small_manifest(what: str) -> None:
    objects = HUGE[what]()
    assert len(refused(MemoryStore(objects))) > 0


@pytest.mark.parametrize(
    "block_bytes", ["0", "1", "-1", "1e6", "16777217", "9" * 5000, "٣٢٧٦٨", ""]
)
def test_blocks_of_impossible_lengths(block_bytes: str) -> None:
    objects, _ = small()
    name = next(name for name in objects if name.startswith("data"))
    header, body = header_of(objects[name])
    header["__metadata__"]["dtckpt_block_bytes"] = block_bytes
    said = refused(MemoryStore(with_file(objects, 0, header, body)))
    assert any("blocks of" in text for text in said)


def test_names_of_lenders_lead_nowhere_else() -> None:
    objects, manifest = small()
    for source in ("../../etc", "", "a/b", "\0", "..", "\ud800", 7):
        lender = {"from": source, "save_id": "ab", **record(16, 0)}
        manifest["borrowed"], manifest["requires"] = [lender], ["borrowed"]
        said = refused(MemoryStore(with_manifest(objects, manifest)))
        assert any("malformed manifest" in text for text in said), source


def test_a_pipe_in_place_of_a_file_is_no_object(tmp_path: Path) -> None:
    place = tmp_path / "pipe"
    place.mkdir()
    os.mkfifo(place / "manifest.json")
    with pytest.raises(NotCommitted):
        ckpt.open(place)
    ckpt.save({"a": torch.arange(100.0)}, tmp_path / "data", no_dist=True)
    data = next((tmp_path / "data").glob("data/*/*"))
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(Corrupt, match="missing"):
        ckpt.load({"a": torch.zeros(100)}, tmp_path / "data", no_dist=True)


def test_damage_is_listed_up_to_a_limit() -> None:
    """Every block of the smallest kind is damaged: the report stays short."""
    objects, _ = small()
    name = next(name for name in objects if name.startswith("data"))
    header, _ = header_of(objects[name])
    size = 1 << 20
    header["a"] |= {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header["__metadata__"]["dtckpt_block_bytes"] = "64"
    table = size // 64 * 16
    header["__dtckpt_blocks__"]["data_offsets"] = [size, size + table]
    forged = with_file(objects, 0, header, bytes(size + table))
    manifest = manifest_of(forged)
    manifest["tensors"]["a"] |= {"dtype": "U8", "shape": [size]}
    tracemalloc.start()
    report = ckpt.verify(MemoryStore(with_manifest(forged, manifest)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_BYTES
    assert len(report.problems) == 10_001
    assert "more problems" in report.problems[-1].message


def test_what_a_reader_would_refuse_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = torch.zeros(1)
    for _ in range(MAX_NESTING + 1):
        deep = {"a": deep}
    with pytest.raises(Unsavable, match="containers"):
        ckpt.save(deep, MemoryStore(), no_dist=True)
    store = MemoryStore()
    ckpt.save(deep["a"], store, no_dist=True)
    ckpt.load(deep["a"], store, no_dist=True)
    with pytest.raises(Unsavable, match="surrogate"):
        ckpt.save({"\ud800": torch.ones(2)}, MemoryStore(), no_dist=True)
    many = {f"tensor{i}": torch.zeros(1) for i in range(3000)}
    store = MemoryStore()
    monkeypatch.setenv(METADATA_VARIABLE, "1")
    with pytest.raises(CheckpointError, match=METADATA_VARIABLE):
        ckpt.save(many, store, no_dist=True)
    assert not store.exists("manifest.json")
    monkeypatch.setenv(METADATA_VARIABLE, "64")
    ckpt.save(many, store, no_dist=True)
    ckpt.load(many, store, no_dist=True)
    monkeypatch.setenv(METADATA_VARIABLE, "lots")
    with pytest.raises(CheckpointError, match="lots"):
        ckpt.load(many, store, no_dist=True)


@pytest.mark.parametrize(
    "text",
    [b"[]", b"[[]]", b'{"a":1}', b"1000", b'"\\ud83d\\ude00"', b'{"a":[[1.5]]}', b'{"dtype":1000}'],
)
def test_json_takes_no_more_memory_than_it_is_measured_to(text: bytes) -> None:
    whole = b"[" + b",".join([text] * 20_000) + b"]"
    keyed = b"{" + b",".join(b'"%d":%s' % (i, text) for i in range(20_000)) + b"}"
    for data in (whole, keyed):
        tracemalloc.start()
        value = json.loads(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert value
        assert peak < 1.1 * json_memory(data)


def test_a_manifest_cannot_send_readers_to_other_files(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3)}, tmp_path, no_dist=True)
    store = open_store(tmp_path)
    manifest = ckpt.read_manifest(store)
    oddities: tuple[Fields, ...] = ({"name": "secret"}, {"places": (Place("w", 0, 4),)})
    for odd in oddities:
        forged = replace(manifest, files=(replace(manifest.files[0], **odd),))
        store.publish("manifest.json", forged.to_bytes(), overwrite=True)
        for call in (ckpt.open, ckpt.verify, ckpt.delete):
            with pytest.raises(Corrupt, match="a name or places of its own"):
                call(tmp_path)
