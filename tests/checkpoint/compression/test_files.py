"""Compressed files: any box of any layout, read by blocks, and every damage found and named."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.compression import codec, stored_blocks
from dtckpt.checkpoint.compression.stored_blocks import StoredBlocks
from dtckpt.checkpoint.files.blocks import DIGEST_BYTES, digest
from dtckpt.checkpoint.files.encoding import BlockEncoder, num_encoders
from dtckpt.checkpoint.files.manifest import Manifest
from dtckpt.checkpoint.files.stored_data import StoredData
from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.files.writing import Chunk, Contents, write_file
from dtckpt.checkpoint.state.limits import METADATA_VARIABLE
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.dtensor import Box, Layout, Mesh, Replicate, Shard
from dtckpt.errors import CheckpointError, Corrupt
from dtckpt.storage import FaultyStore, MemoryStore, ReadRequest, Store

from ...dtensor.strategies import layouts, shapes
from ..files.forging import Objects, header_of, manifest_of, objects_of, with_manifest
from ..simulate import Array, ArraySource, Given, load_box, save_all


@pytest.fixture(autouse=True)
def small_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few bytes are compressed as large ones are."""
    monkeypatch.setattr(codec, "LEAST_BYTES", 16)


def dull(shape: Sequence[int], code: str, seed: int = 0) -> Array:
    """Items that shrink: of few values."""
    rng = np.random.default_rng(seed)
    size = DTYPES[code].itemsize
    if size == 16:
        return dull((*shape, 2), "F64", seed).view(DTYPES[code].items)[..., 0]
    few = rng.integers(0, 2 if code == "BOOL" else 120, size=3, dtype=f"u{size}")
    return rng.choice(few, size=tuple(shape), p=(0.96, 0.03, 0.01))


def test_examples() -> None:
    assert doctest.testmod(stored_blocks).failed == 0


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.data(), shapes(max_size=40), st.sampled_from(sorted(DTYPES)), st.sampled_from((64, 200, 999))
)
def test_any_box_with_any_block_size(
    data: st.DataObject, shape: tuple[int, ...], code: str, block_bytes: int
) -> None:
    layout = data.draw(layouts(mesh=Mesh((2, 2)), shape=shape))
    whole = dull(shape, code)
    tensors = {"x": Given(whole, code, layout)}
    store, _ = save_all(tensors, range(4), block_bytes, is_compressed=True)
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    assert np.array_equal(load_box(store, "x", box), whole[box.slices])
    assert not ckpt.verify(store).problems


MESH = Mesh((2, 2))
TENSORS = {
    "w": Given(dull((90, 60), "F32", 1), "F32", Layout(MESH, (Shard(0), Shard(1)), (90, 60))),
    "b": Given(dull((3000,), "BF16", 2), "BF16", Layout(MESH, (Shard(0), Replicate()), (3000,))),
    "n": Given(dull((30, 7), "I64", 3), "I64", Layout.replicated(MESH, (30, 7))),
    "s": Given(dull((), "F64", 4), "F64", Layout.replicated(MESH, ())),
}


def made(*, is_compressed: bool = True) -> Objects:
    store, _ = save_all(TENSORS, range(4), 256, is_compressed=is_compressed)
    return objects_of(store)


def read_all(store: Store) -> dict[str, Array]:
    with ckpt.open(store) as opened:
        names = list(opened)
    return {name: load_box(store, name, Box.whole(TENSORS[name].array.shape)) for name in names}


def test_only_compressed_checkpoints_have_another_version() -> None:
    plain, dense = manifest_of(made(is_compressed=False)), manifest_of(made())
    assert (plain["version"], plain["requires"]) == (1, [])
    assert (dense["version"], dense["requires"]) == (2, ["compressed"])
    assert not any("stored_bytes" in record for record in plain["files"])
    for record in dense["files"]:
        assert record["stored_bytes"] < 0.7 * record["data_bytes"]


def test_digests_are_those_of_decoded_blocks() -> None:
    plain, dense = made(is_compressed=False), made()
    for number, record in enumerate(manifest_of(dense)["files"]):
        tables: list[bytes] = []
        for objects, row_bytes in ((plain, 16), (dense, 20)):
            manifest = manifest_of(objects)
            (name,) = (
                n for n in objects if n.startswith(f"data/{manifest['save_id']}/0000{number}")
            )
            header, body = header_of(objects[name])
            told = manifest["files"][number]
            table = body[told.get("stored_bytes", told["data_bytes"]) :]
            shape = header["__dtckpt_blocks__"]["shape"]
            assert shape == [len(table) // row_bytes, row_bytes]
            tables.append(table[: 16 * shape[0]])
        assert tables[0] == tables[1]
        assert record["stored_bytes"] == sum(
            np.frombuffer(table[16 * shape[0] :], dtype="<u4").tolist()
        )


def test_a_slice_reads_its_blocks_alone() -> None:
    whole = dull((1000, 64), "F32")
    given = {"x": Given(whole, "F32", Layout.replicated(Mesh((1,)), (1000, 64)))}
    inner, (record,) = save_all(given, range(1), 4096, is_compressed=True)
    store = FaultyStore(inner)
    data = StoredData(store, ckpt.read_manifest(store))
    file = data.file(0, "x")
    before = len(store.calls)
    out = memoryview(bytearray(4096))
    (request,) = file.read_each([ReadRequest(file.layout.data_start + 5 * 4096, out)])
    assert request.view.tobytes() == whole.tobytes()[5 * 4096 : 6 * 4096]
    (call,) = store.calls[before:]
    assert call.size < 0.5 * 4096
    assert record.stored_bytes is not None
    assert record.stored_bytes < 0.5 * record.data_bytes


def test_parts_of_blocks_are_not_read() -> None:
    store, _ = save_all(TENSORS, range(4), 256, is_compressed=True)
    file = StoredData(store, ckpt.read_manifest(store)).file(0, "w")
    start = file.layout.data_start
    for low, high in ((0, 100), (1, 256), (256, 300), (0, 1 << 30), (1 << 30, 1 << 31)):
        request = ReadRequest(start + low, memoryview(bytearray(min(high - low, 4000))))
        with pytest.raises(ValueError, match="whole blocks"):
            list(file.read_each([request]))


def test_what_a_store_tells_is_not_relied_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_wrongly(
        self: Store, name: str, requests: Sequence[ReadRequest]
    ) -> Iterator[ReadRequest]:
        self.read_into(name, requests)
        yield from (ReadRequest(0, bytearray(1)), requests[0], requests[0])

    store = MemoryStore(made())
    monkeypatch.setattr(MemoryStore, "read_each", told_wrongly)
    file = StoredData(store, ckpt.read_manifest(store)).file(0, "w")
    start = file.layout.data_start
    requests = [ReadRequest(start + at, bytearray(256)) for at in (512, 0, 256)]
    told = list(file.read_each(requests))
    assert sorted(told, key=requests.index) == requests, "each is told once"
    (entry,) = (e for e in file.layout.entries.values() if e.start <= 0 < e.end)
    for request in requests:
        low = request.offset - start - entry.start
        assert not file.damaged(entry, low, memoryview(request.buffer))
    assert all(np.array_equal(v, TENSORS[n].array) for n, v in read_all(store).items())


def test_flipped_bits_never_give_other_values() -> None:
    """Bits of a frame that its decoder ignores may change, all else is found and named."""
    objects, rng, found = made(), random.Random(5), 0
    names = sorted(name for name in objects if name.startswith("data/"))
    assert all(name.endswith(".compressed") for name in names)
    for number in range(300):
        name = names[number % len(names)]
        damaged = bytearray(objects[name])
        at = rng.randrange(len(damaged))
        damaged[at] ^= 1 << rng.randrange(8)
        store = MemoryStore(objects | {name: bytes(damaged)})
        try:
            values = read_all(store)
        except Corrupt as error:
            found += 1
            told = str(error)
            problems = ckpt.verify(store).problems
            assert name in told
            assert {problem.file for problem in problems} == {name}
            for problem in problems:
                assert problem.start is not None
                assert problem.end is not None
                assert problem.start <= at < problem.end
        else:
            assert all(np.array_equal(v, TENSORS[n].array) for n, v in values.items())
    assert found > 250


def test_a_block_that_cannot_be_decoded_is_found_whatever_it_would_be() -> None:
    """Also where memory already holds what was written, and where that is zeros."""
    whole = np.zeros((4096,), dtype="u4")
    given = {"x": Given(whole, "F32", Layout.replicated(Mesh((1,)), (4096,)))}
    store, (record,) = save_all(given, range(1), 4096, is_compressed=True)
    objects = objects_of(store)
    name = record.path(ckpt.read_manifest(store).save_id)
    damaged = bytearray(objects[name])
    damaged[record.header_bytes : record.header_bytes + 16] = b"\xff" * 16  # lengths of planes
    bad = MemoryStore(objects | {name: bytes(damaged)})
    with pytest.raises(Corrupt, match=rf"{name}: bytes {record.header_bytes} to \d+ are damaged"):
        load_box(bad, "x", Box.whole((4096,)))
    (problem,) = ckpt.verify(bad).problems
    assert problem.start == record.header_bytes
    with pytest.raises(Corrupt, match=name):
        ckpt.copy(bad, MemoryStore())


def test_copies_are_the_same_bytes() -> None:
    objects, target = made(), MemoryStore()
    done: list[tuple[int, int]] = []
    ckpt.copy(MemoryStore(objects), target, on_progress=lambda n, total: done.append((n, total)))
    assert objects_of(target) == objects
    assert done[-1][0] == done[-1][1]


def with_table(change: Any) -> tuple[Objects, str]:
    """A checkpoint in which one file has other stored lengths, with all digests right again."""
    objects = made()
    manifest = manifest_of(objects)
    record = manifest["files"][0]
    name = f"data/{manifest['save_id']}/00000.compressed"
    end = record["header_bytes"] + record["stored_bytes"]
    table = objects[name][end:]
    count = len(table) // 20
    lengths = np.frombuffer(table[16 * count :], dtype="<u4").copy()
    change(lengths, record)
    changed = table[: 16 * count] + lengths.tobytes()
    record["blocks"] = digest(changed).hex()
    return with_manifest(objects | {name: objects[name][:end] + changed}, manifest), name


def swap(lengths: Array, _: Any) -> None:
    lengths[0] += 1
    lengths[1] -= 1


def test_forged_lengths_are_refused_or_found() -> None:
    def zero(lengths: Array, _: Any) -> None:
        lengths[1] += lengths[0]
        lengths[0] = 0

    def long(lengths: Array, _: Any) -> None:
        lengths[0] = 257

    def huge(lengths: Array, _: Any) -> None:
        lengths[:] = 0xFFFFFFFF

    def fewer(lengths: Array, _: Any) -> None:
        lengths[0] -= 1

    for change in (zero, long, huge, fewer, swap):
        objects, name = with_table(change)
        with pytest.raises(Corrupt, match=name):
            read_all(MemoryStore(objects))
        assert ckpt.verify(MemoryStore(objects)).problems


def test_lengths_that_do_not_fill_the_file_are_refused_before_anything_is_read() -> None:
    def fewer(lengths: Array, _: Any) -> None:
        lengths[0] -= 1

    objects, name = with_table(fewer)
    with pytest.raises(Corrupt, match=rf"{name}: the blocks have \d+ bytes by their table"):
        read_all(MemoryStore(objects))


@pytest.mark.parametrize("lengths", [(65, 36), (0, 36), (64, 37), (64, 0), (0xFFFFFFFF, 36)])
def test_lengths_are_those_of_blocks(lengths: tuple[int, int]) -> None:
    table = b"".join(length.to_bytes(4, "little") for length in lengths)
    with pytest.raises(ValueError, match=r"block [01] of (64|36) bytes is stored in"):
        StoredBlocks(0, [(100, 1)], 64, table)


def test_forged_manifests_are_refused() -> None:
    objects = made()

    def refused(change: Callable[[Any, Any], object], match: str) -> None:
        manifest = manifest_of(objects)
        change(manifest, manifest["files"][0])
        with pytest.raises(CheckpointError, match=match):
            read_all(MemoryStore(with_manifest(objects, manifest)))

    refused(lambda m, _: m.update(version=1), "version 1 has not all that the manifest needs")
    refused(lambda m, _: m.update(version=4), "Upgrade dtckpt")
    refused(lambda m, _: m.update(requires=["compressed", "other"]), "Upgrade dtckpt")
    refused(lambda _, f: f.update(stored_bytes=-1), "malformed")
    refused(lambda _, f: f.update(stored_bytes=f["stored_bytes"] + 20), "not of one save")
    refused(lambda _, f: f.update(stored_bytes=f["stored_bytes"] + 1), "impossible")
    refused(lambda _, f: f.update(data_bytes=1 << 60), "impossible lengths")
    refused(lambda _, f: f.update(data_bytes=f["stored_bytes"] - 1), "impossible lengths")
    refused(lambda _, f: f.pop("stored_bytes"), "malformed|missing")


def test_old_readers_refuse_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What version 1 of this library says of it."""
    monkeypatch.setattr("dtckpt.checkpoint.files.manifest._KNOWN_VERSIONS", (1,))
    with pytest.raises(CheckpointError, match=r"format version 2 .*\['compressed'\].*Upgrade"):
        ckpt.read_manifest(MemoryStore(made()))


def test_other_readers_of_safetensors_refuse_them() -> None:
    from safetensors import SafetensorError, deserialize

    objects = made()
    for name, data in objects.items():
        if name.startswith("data/"):
            with pytest.raises(SafetensorError):
                deserialize(data)


def test_the_manifest_comes_back() -> None:
    text = made()["manifest.json"]
    assert Manifest.from_bytes(text, "here").to_bytes() == text


def test_where_blocks_lie_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 0.6 MB, and as much for what follows from it."""
    whole = dull((30_000, 64), "U8")
    given = {"x": Given(whole, "U8", Layout.replicated(Mesh((1,)), whole.shape))}
    plain, dense = (
        save_all(given, range(1), 64, is_compressed=is_it)[0] for is_it in (False, True)
    )
    monkeypatch.setenv(METADATA_VARIABLE, "1")
    row = Box((7, 0), (1, 64))
    assert np.array_equal(load_box(plain, "x", row), whole[7:8])
    with pytest.raises(CheckpointError, match="the checksum tables of"):
        load_box(dense, "x", row)
    monkeypatch.setenv(METADATA_VARIABLE, "2")
    assert np.array_equal(load_box(dense, "x", row), whole[7:8])
    data = StoredData(dense, ckpt.read_manifest(dense))
    for _ in range(3):  # what is let go of counts no more
        data.file(0, "x")
        data.forget(0)


# -- the encoder


def encoded(
    chunks: Sequence[tuple[bytes, int]], threads: int, step: int = 1000
) -> tuple[list[bytes], bytes]:
    """Blocks of 4096 bytes of some chunks as they are handed on, and the table."""
    blocks: list[bytes] = []
    with BlockEncoder(4096, lambda view: blocks.append(bytes(view)), threads) as encoder:
        for data, width in chunks:
            for start in range(0, len(data), step):
                piece = bytearray(data[start : start + step])
                encoder.update(memoryview(piece), width)
                piece[:] = bytes(len(piece))  # it may be used again
            encoder.end_chunk()
        encoder.finish()
        assert encoder.stored_bytes == sum(map(len, blocks))
        return blocks, encoder.table()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("step", [1000, 4096, 100_000])
def test_blocks_are_handed_on_in_order(threads: int, step: int) -> None:
    rng = random.Random(3)
    chunks = [
        (bytes(rng.choices(range(9), k=size)), width)
        for size, width in ((50_000, 8), (4096, 4), (3, 4), (0, 2), (8193, 2), (10_000, 1))
    ]
    blocks, table = encoded(chunks, threads, step)
    cut = [
        (data[start : start + 4096], width)
        for data, width in chunks
        for start in range(0, len(data), 4096)
    ]
    assert len(blocks) == len(cut)
    assert table[: DIGEST_BYTES * len(cut)] == b"".join(digest(block) for block, _ in cut)
    places = StoredBlocks(
        0, [(len(data), width) for data, width in chunks], 4096, table[DIGEST_BYTES * len(cut) :]
    )
    assert places.stored_bytes == sum(map(len, blocks))
    for kept, (block, width) in zip(blocks, cut, strict=True):
        found = bytearray(len(block))
        codec.Codec().decode(memoryview(kept), memoryview(found), width)
        assert found == block
    assert blocks == encoded(chunks, 1)[0], "whatever the number of threads"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_to_encode_is_raised_to_the_caller(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> memoryview:
        raise MemoryError("no more")

    monkeypatch.setattr(codec.Codec, "encode", fail)
    with pytest.raises(MemoryError, match="no more"):
        encoded([(bytes(100_000), 4)], threads)


def test_chunks_that_are_shorter_than_planned_are_no_file() -> None:
    class Short(ArraySource):
        def pieces(self, max_bytes: int) -> Iterator[memoryview]:
            for piece in super().pieces(max_bytes):
                yield piece[:-4]

    layout = Layout.replicated(Mesh((1,)), (1000,))
    tensor = StoredTensor("x", DTYPES["F32"], (1000,), layout)
    chunk = Chunk(tensor=tensor, box=Box.whole((1000,)), source=Short(dull((1000,), "F32")))
    store = MemoryStore()
    with pytest.raises(CheckpointError, match="4000 bytes, and have 3996"):
        write_file(store, Contents([chunk]), save_id="ab", rank=0, is_compressed=True)
    assert not any(store.list())


def test_no_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    expected = encoded([(bytes(100_000), 4)], 1)
    monkeypatch.setattr("threading.Thread.start", refuse)
    assert encoded([(bytes(100_000), 4)], 4) == expected


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def cores(_: int) -> range:
        return range(12)

    monkeypatch.setattr("os.sched_getaffinity", cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert num_encoders() == 8
    for ranks, expected in (("4", 3), ("12", 1), ("64", 1), ("0", 8), ("", 8), ("many", 8)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert num_encoders() == expected
