"""Every layout of files that torch.distributed.checkpoint writes: transposed, compressed, dealt."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import zstandard
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.reading import limits
from dtckpt.dtensor import Mesh, Shard, distribute_tensor
from dtckpt.errors import CheckpointError, Corrupt, NotCommitted
from dtckpt.storage import open_store
from dtckpt.storage.testing.faulty import FaultyStore

from ...dtensor.rank_meshes import run_on_mesh
from .test_dcp import same, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own

Writer = Callable[[Path], Any]


class Parts(Tensor):
    """A tensor that one process writes in chunks of rows, each by ``made`` of the elements."""

    rows: int
    made: Callable[[Tensor], Tensor]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        full = self.as_subclass(Tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(full),
                    size=full.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        count, *rest = self.shape
        return [
            ChunkStorageMetadata(
                torch.Size([start, *(0 for _ in rest)]),
                torch.Size([min(self.rows, count - start), *rest]),
            )
            for start in range(0, count, self.rows)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        start = (index.offset or (0,))[0]
        return self.made(self.as_subclass(Tensor)[start : start + self.rows])


def parts(full: Tensor, rows: int, made: Callable[[Tensor], Tensor] = torch.clone) -> Parts:
    made_of = full.as_subclass(Parts)
    made_of.rows, made_of.made = rows, made
    return made_of


def transposed(part: Tensor) -> Tensor:
    """Return the elements of a part in memory of their own, columns first."""
    return part.T.contiguous().T


STATE: dict[str, Any] = {
    "parts": parts(torch.arange(130.0).view(13, 10), 5),
    "columns first": parts(torch.arange(130.0).view(13, 10) + 500, 4, transposed),
    "transposed": torch.randn(7, 5).T,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 4).expand(3, 4),
    "every other": torch.arange(20).view(4, 5)[::2, ::2],
    "bytes": torch.randint(0, 255, (3, 3), dtype=torch.uint8).T,
    "none of it": torch.empty(0, 3),
    "one": torch.tensor(2.5),
    "step": 3,
    "mixed": [1, {"inner": torch.arange(6).view(2, 3).T, "again": torch.ones(2)}],
}


def expected() -> dict[str, Any]:
    return {k: v.as_subclass(Tensor) if isinstance(v, Parts) else v for k, v in STATE.items()}


def plain(place: Path) -> Any:
    return torch_dcp.FileSystemWriter(place)


def compressed(place: Path) -> Any:
    return torch_dcp.FileSystemWriter(place, _extensions=[ZStandard()])


def a_file_each(place: Path) -> Any:
    return torch_dcp.FileSystemWriter(place, single_file_per_rank=False)


def by_threads(place: Path) -> Any:
    return torch_dcp.FileSystemWriter(place, thread_count=3, sync_files=False)


WRITERS: list[Writer] = [plain, compressed, a_file_each, by_threads]


def save(state: dict[str, Any], place: Path, writer: Writer = plain) -> Path:
    torch_dcp.save(state, storage_writer=writer(place), no_dist=True)
    return place


@pytest.mark.parametrize("writer", WRITERS)
def test_what_any_writer_saves_is_read(tmp_path: Path, writer: Writer) -> None:
    place = save(STATE, tmp_path / "dcp", writer)
    with ckpt.open(place) as opened:
        found = whole(opened.state_dict())
        for name in ("parts", "columns first"):
            full = expected()[name]
            assert opened[name][3:11, 2:5].equal(full[3:11, 2:5])
            assert opened[name][12, -1].equal(full[12, -1])
    assert same(found, expected())
    assert ckpt.verify(place).problems == ()
    ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=2"), ckpt.parse_rules("*ar*=S(0)"))
    assert ckpt.verify(tmp_path / "ours").problems == ()
    assert same(whole(ckpt.open(tmp_path / "ours").state_dict()), expected())


@pytest.mark.parametrize("writer", [plain, compressed])
def test_ranks_read_their_part_of_chunks_that_lie_otherwise(tmp_path: Path, writer: Writer) -> None:
    full = torch.randn(64, 48)
    place = save({"w": parts(full, 24, transposed), "b": full.T}, tmp_path / "dcp", writer)

    def body(mesh: Any) -> None:
        for dim in (0, 1):
            into = {
                "w": distribute_tensor(torch.zeros(64, 48), mesh, [Shard(dim)]),
                "b": distribute_tensor(torch.zeros(48, 64), mesh, [Shard(dim)]),
            }
            ckpt.load(into, place, process_group=mesh.get_group())
            assert into["w"].full_tensor().equal(full)
            assert into["b"].full_tensor().equal(full.T)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("dim", [0, 1])
def test_large_transposed_chunks_are_read_in_bounded_parts(tmp_path: Path, dim: int) -> None:
    full = torch.arange(400 * 300).view(400, 300)
    place = save({"w": parts(full, 250, transposed)}, tmp_path / "dcp")
    with mock.patch.multiple(limits, READ_BYTES=20_000, STEP_BYTES=64, GAP_BYTES=0):
        opened = ckpt.open(place)
        assert opened["w"][...].equal(full)
        index = (slice(None),) * dim + (slice(100, 130),)
        assert opened["w"][index].equal(full[index])


def test_of_a_transposed_chunk_a_column_is_read_alone(tmp_path: Path) -> None:
    full = torch.randn(100_000, 20)
    place = save({"w": full.T.contiguous().T}, tmp_path / "dcp")
    into = {"w": torch.zeros(100_000, 20)}
    assert ckpt.load(into, place, no_dist=True).bytes_read == full.nbytes
    assert into["w"].equal(full)
    opened = ckpt.open(place)
    with mock.patch.object(limits, "STEP_BYTES", 1):
        assert opened["w"][:, 7].equal(full[:, 7])


class Counted:
    """Counts the bytes that come out of decompressors."""

    def __init__(self) -> None:
        self.made = 0
        self.bytes = 0

    def decompressor(self, real: Any) -> Any:
        counted = self

        class Reader:
            def __init__(self, inner: Any) -> None:
                self._inner = inner

            def readinto(self, into: memoryview) -> int:
                count = self._inner.readinto(into)
                counted.bytes += count
                return count

        class Decompressor:
            def __init__(self, **options: Any) -> None:
                self._inner = real(**options)
                counted.made += 1

            def stream_reader(self, *args: Any, **options: Any) -> Reader:
                return Reader(self._inner.stream_reader(*args, **options))

        return Decompressor


def test_large_compressed_chunks_are_decompressed_about_once(tmp_path: Path) -> None:
    full = torch.arange(1 << 20).view(1024, 1024)  # 8 MiB
    place = save({"w": full, "v": full + 1}, tmp_path / "dcp", compressed)
    counted = Counted()
    made = counted.decompressor(zstandard.ZstdDecompressor)
    with (
        mock.patch.object(zstandard, "ZstdDecompressor", made),
        mock.patch.multiple(limits, READ_BYTES=256 << 10, NUM_READERS=1),
    ):
        assert ckpt.open(place)["w"][...].equal(full)
    assert counted.bytes < 1.1 * full.nbytes, "and nothing of the other one but its head"


def test_a_compressed_chunk_that_ends_early_is_refused(tmp_path: Path) -> None:
    place = save({"w": torch.zeros(1 << 20)}, tmp_path / "dcp", compressed)
    entry = torch_dcp.FileSystemReader(place).read_metadata().storage_data[MetadataIndex("w", [0])]
    file = place / entry.relative_path
    data = bytearray(file.read_bytes())
    short = zstandard.ZstdCompressor().compress(
        zstandard.ZstdDecompressor()
        .decompressobj()
        .decompress(bytes(data[entry.offset : entry.offset + entry.length]))[: 1 << 20]
    )
    data[entry.offset : entry.offset + entry.length] = short.ljust(entry.length, b"\0")
    file.write_bytes(data)
    with pytest.raises(Corrupt, match=r"distcp \(bytes \d+ to \d+\): .*compressed"):
        ckpt.open(place)["w"][...]


def test_damaged_compressed_bytes_are_named(tmp_path: Path) -> None:
    place = save({"w": torch.randn(1 << 16)}, tmp_path / "dcp", compressed)
    file = place / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    file.write_bytes(data)
    with pytest.raises(Corrupt, match=r"distcp \(bytes \d+ to \d+\)"):
        ckpt.open(place)["w"][...]


def test_a_value_that_swells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save({"text": "a" * (40 << 20)}, tmp_path / "dcp", compressed)
    assert sum(file.stat().st_size for file in place.iterdir()) < 1 << 16
    monkeypatch.setenv("DTCKPT_METADATA_MIB", "16")
    with pytest.raises(CheckpointError, match="DTCKPT_METADATA_MIB"):
        ckpt.open(place)


class Secret(ZStandard):
    """An extension of somebody's own."""

    @staticmethod
    def registry_name() -> str:
        return "stream.secret"


@pytest.mark.parametrize("extensions", [[Secret()], [ZStandard(), ZStandard()]])
def test_other_extensions_are_refused_by_name(
    tmp_path: Path, extensions: list[StreamTransformExtension]
) -> None:
    writer = torch_dcp.FileSystemWriter(tmp_path / "dcp", _extensions=extensions)
    torch_dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
    name = extensions[0].get_descriptor()
    with pytest.raises(CheckpointError, match=f"extensions .*'{name}'.* none but zstd"):
        ckpt.open(tmp_path / "dcp")


def in_safetensors(place: Path) -> Any:
    return torch_dcp.FileSystemWriter(
        place, serialization_format=SerializationFormat.SAFETENSORS, single_file_per_rank=True
    )


def test_safetensors_within_files_of_torch_are_read(tmp_path: Path) -> None:
    """torch's own reader cannot: it takes the place of every tensor for that of an archive."""
    full = torch.arange(12.0).view(3, 4)
    state = {"a": full, "b/c": torch.ones(2).bfloat16(), "one": torch.tensor(3), "step": 7}
    place = save(state, tmp_path / "dcp", in_safetensors)
    found = whole(ckpt.open(place).state_dict())
    assert same(found, state)
    assert ckpt.open(place)["a"][1:, 2].equal(full[1:, 2])
    assert ckpt.verify(place).problems == ()


def test_of_parts_in_safetensors_torch_keeps_only_one(tmp_path: Path) -> None:
    place = save({"w": parts(torch.arange(6.0), 3)}, tmp_path / "dcp", in_safetensors)
    with pytest.raises(Corrupt, match=r"expected F32\[0:3\] of 'w'.*one part only"):
        ckpt.open(place)["w"][...]


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("numbers", [None, {"a": 1, "b.c": 2, "one": 2}])
def test_the_writer_for_hugging_face(
    tmp_path: Path, consolidated: bool, numbers: dict[str, int] | None
) -> None:
    state = {"a": torch.randn(6, 4), "b.c": torch.ones(2).bfloat16(), "one": torch.ones(1)}
    writer = HuggingFaceStorageWriter(
        str(tmp_path / "hf"),
        fqn_to_index_mapping=numbers,
        save_distributed=True,
        enable_consolidation=consolidated,
    )
    torch_dcp.save(state, storage_writer=writer, no_dist=True)
    assert same(whole(ckpt.open(tmp_path / "hf").state_dict()), state)
    assert ckpt.verify(tmp_path / "hf").problems == ()
    ckpt.export(tmp_path / "hf", tmp_path / "one.safetensors")
    assert same(load_file(tmp_path / "one.safetensors"), state)


def test_what_each_rank_saved_for_itself_is_named(tmp_path: Path) -> None:
    place = save({"a": torch.ones(3)}, tmp_path / "dcp")
    (place / ".metadata").rename(place / "__0.metadata")  # as use_collectives=False calls it
    with pytest.raises(NotCommitted, match=r"__0\.metadata here, .*use_collectives=False"):
        ckpt.open(place)


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "dcp", a_file_each)
    place = save({"a": torch.arange(4)}, tmp_path / "dcp", a_file_each)
    assert same(whole(ckpt.open(place).state_dict()), {"a": torch.arange(4)})


def test_every_file_is_asked_for_its_length_once(tmp_path: Path) -> None:
    state = {f"t{i}": torch.ones(2) for i in range(20)} | {"step": 1}
    place = save(state, tmp_path / "dcp", a_file_each)
    with FaultyStore(open_store(place)) as store, ckpt.open(store):
        asked = [call.name for call in store.calls if call.op == "stat"]
        assert {asked.count(file.name) for file in place.glob("*.distcp")} == {1}
