"""Files without checksums that are written to while they are read: an error, never a mixture."""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.dcp import CheckpointReader
from dtckpt.checkpoint.exporting.safetensors_files import SafetensorsFiles
from dtckpt.checkpoint.loading import loader
from dtckpt.checkpoint.reading import execution, limits
from dtckpt.dtensor import Mesh
from dtckpt.errors import Corrupt
from dtckpt.storage import open_store
from dtckpt.storage.testing.faulty import FaultyStore

from ...ranks import run_ranks
from .makers import unpacked
from .test_dcp import whole
from .test_dcp_layouts import compressed

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own

SIZES = (64, 16)
NAMES = ("a", "b")


def weights(version: int) -> dict[str, Any]:
    """Return elements that no compressor makes shorter, so that files are of one length."""
    made = torch.Generator().manual_seed(version)
    return {
        name: torch.randint(-(1 << 31), 1 << 31, SIZES, dtype=torch.int32, generator=made)
        for name in NAMES
    }


def of_torch_save(folder: Path, version: int) -> Path:
    torch.save(weights(version), folder / "state.pt")
    return folder / "state.pt"


def of_safetensors(folder: Path, version: int) -> Path:
    save_file(weights(version), folder / "model.safetensors")
    return folder / "model.safetensors"


def of_hugging_face(folder: Path, version: int) -> Path:
    names = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(NAMES, 1)}
    for name, file in names.items():
        save_file({name: weights(version)[name]}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def of_dcp(folder: Path, version: int) -> Path:
    torch_dcp.save(weights(version), checkpoint_id=folder, no_dist=True)
    return folder


def of_dcp_compressed(folder: Path, version: int) -> Path:
    torch_dcp.save(weights(version), storage_writer=compressed(folder), no_dist=True)
    return folder


def of_verl(folder: Path, version: int) -> Path:
    torch.save(weights(version), folder / "model_world_size_1_rank_0.pt")
    return folder


def of_megatron(folder: Path, version: int) -> Path:
    return unpacked("megatron-core-0.16.1", folder)


def of_torch_checkpointing(folder: Path, version: int) -> Path:
    return unpacked("torch_checkpointing-0.1.1", folder) / "described"


Made = Callable[[Path, int], Path]
FORMATS: list[Made] = [
    of_torch_save,
    of_safetensors,
    of_hugging_face,
    of_dcp,
    of_dcp_compressed,
    of_verl,
    of_megatron,
    of_torch_checkpointing,
]


def data_files(folder: Path) -> list[Path]:
    kinds = (".pt", ".safetensors", ".distcp")
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds)


def in_place(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


def by_rename(path: Path, data: bytes) -> None:
    other = path.with_name(path.name + ".tmp")
    other.write_bytes(data)
    other.rename(path)


Write = Callable[[Path, bytes], None]
WRITES: list[Write] = [in_place, by_rename]


class Writer:
    """Puts other elements into the files of a checkpoint when it is told to, once."""

    def __init__(self, made: Made, folder: Path, write: Write) -> None:
        (other := folder / "other").mkdir()
        (own := folder / "own").mkdir()
        made(other, 2)
        self.place = made(own, 1)
        self._write = write
        self._files = data_files(own)
        self._others = [path.read_bytes() for path in data_files(other)]
        for path, data in zip(self._files, self._others, strict=True):
            assert len(data) == path.stat().st_size
            os.utime(path, (0, path.stat().st_mtime - 60))  # clocks tick some times a second only
        self.is_done = False

    def run(self) -> None:
        if not self.is_done:
            self.is_done = True
            for path, data in zip(self._files, self._others, strict=True):
                self._write(path, data)


@pytest.fixture(params=FORMATS, ids=lambda made: made.__name__)
def made(request: pytest.FixtureRequest) -> Made:
    return request.param


@pytest.fixture(params=WRITES, ids=lambda write: write.__name__)
def writer(request: pytest.FixtureRequest, made: Made, tmp_path: Path) -> Writer:
    return Writer(made, tmp_path, request.param)


@contextmanager
def after_one_read(writer: Writer) -> Generator[None]:
    """Let the writer come after the first read of elements, of which there are many."""
    read = execution._Reader._run

    def read_one(self: Any, wanted: Any) -> int:
        num_bytes = read(self, wanted)
        writer.run()
        return num_bytes

    with (
        mock.patch.object(execution._Reader, "_run", read_one),
        mock.patch.multiple(limits, READ_BYTES=1 << 10, STAGED_BYTES=1 << 10, NUM_READERS=1),
    ):
        yield


TOLD = "was written to while it was read, and has no checksums"


def test_loads_are_refused(writer: Writer) -> None:
    state = whole(ckpt.open(writer.place).state_dict())
    state.pop("rng", None)  # which each rank has for itself
    with after_one_read(writer), pytest.raises(Corrupt, match=TOLD):
        ckpt.load(state, writer.place, strict="state", no_dist=True)
    assert writer.is_done


def test_conversions_are_refused(writer: Writer, tmp_path: Path) -> None:
    target = tmp_path / "ours"
    with after_one_read(writer), pytest.raises(Corrupt, match=TOLD):
        ckpt.reshard(writer.place, target, Mesh.parse("a=1"), [])
    assert writer.is_done
    assert not [path for path in target.rglob("*") if path.is_file()]


def _are_tensors(state: Any) -> bool:
    return all(isinstance(value, ckpt.LazyTensor) for value in state.values())


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_exports_are_refused(writer: Writer, tmp_path: Path, format: Any) -> None:
    if format == "safetensors" and not _are_tensors(ckpt.open(writer.place).state_dict()):
        format = "dcp"  # which holds values, too
    target = tmp_path / "exported"
    with after_one_read(writer), pytest.raises(Corrupt, match=TOLD):
        ckpt.export(writer.place, target, format=format)
    assert writer.is_done
    assert not [path for path in target.rglob("*") if path.is_file()]


def test_slices_are_refused(writer: Writer) -> None:
    opened = ckpt.open(writer.place)
    first, *_, last = opened
    before = opened[first][...]
    writer.run()
    for _ in range(2):
        with pytest.raises(Corrupt, match=TOLD):
            opened[last][...]
    assert ckpt.open(writer.place)[first][...].shape == before.shape, "anew it is read"


def test_verification_tells_of_it(writer: Writer) -> None:
    report = ckpt.verify(writer.place, on_progress=lambda done, total: writer.run())
    assert [p for p in report.problems if TOLD in p.message]


@pytest.mark.parametrize("write", WRITES)
def test_values_and_tensors_are_of_one_version(tmp_path: Path, write: Write) -> None:
    """Values are read with the manifest, before files are opened for their tensors."""
    writer = Writer(of_dcp, tmp_path, write)
    made = loader.manifest_text

    def then_write(store: Any) -> Any:
        text = made(store)
        writer.run()
        return text

    with (
        mock.patch.object(loader, "manifest_text", then_write),
        pytest.raises(Corrupt, match=TOLD),
    ):
        ckpt.load(weights(0), writer.place, no_dist=True)


def test_functions_of_torch_are_refused(tmp_path: Path) -> None:
    writer = Writer(of_dcp, tmp_path, in_place)
    with after_one_read(writer), pytest.raises(CheckpointException, match=TOLD):
        torch_dcp.load(weights(0), storage_reader=CheckpointReader(writer.place), no_dist=True)


def test_files_that_are_taken_away_are_refused(tmp_path: Path) -> None:
    writer = Writer(of_torch_save, tmp_path, lambda path, data: path.unlink())
    opened = ckpt.open(writer.place)
    assert opened["a"][:1].shape == (1, 16)
    read = execution._Reader._run

    def read_last(self: Any, wanted: Any) -> int:
        num_bytes = read(self, wanted)
        writer.run()
        return num_bytes

    gone = pytest.raises(Corrupt, match="was taken away while it was read")
    with mock.patch.object(execution._Reader, "_run", read_last), gone:
        opened["b"][...]


def test_a_rank_that_opens_a_file_later_does_not_export_another_version(tmp_path: Path) -> None:
    writer = Writer(of_torch_save, tmp_path, in_place)
    target, written = tmp_path / "exported", Event()
    write = SafetensorsFiles.write

    def in_turn(self: Any, file: str, *args: Any) -> str:
        if file.startswith("model-00002"):
            written.wait(60)
            return write(self, file, *args)
        try:
            return write(self, file, *args)
        finally:
            writer.run()
            written.set()

    def export(rank: int, group: Any) -> None:
        with pytest.raises(Corrupt, match=TOLD):
            ckpt.export(writer.place, target, max_file_bytes=4096, process_group=group)

    with mock.patch.object(SafetensorsFiles, "write", in_turn):
        run_ranks(2, export)
    assert not [path for path in target.rglob("*") if path.is_file()]


def test_what_is_only_read_or_linked_is_loaded(made: Made, tmp_path: Path) -> None:
    def touch(path: Path, data: bytes) -> None:
        path.read_bytes()
        path.chmod(0o600)
        os.link(path, path.with_name(path.name + ".kept"))
        told = path.stat()
        os.utime(path, ns=(told.st_atime_ns + 10**9, told.st_mtime_ns))

    writer = Writer(made, tmp_path, touch)
    state = whole(ckpt.open(writer.place).state_dict())
    state.pop("rng", None)  # which each rank has for itself
    with after_one_read(writer):
        ckpt.load(state, writer.place, strict="state", no_dist=True)
    assert writer.is_done


def test_the_store_is_asked_once_more_for_every_file(tmp_path: Path) -> None:
    place = Writer(of_hugging_face, tmp_path, in_place).place
    store = FaultyStore(open_store(place))

    def asked(call: Callable[[], object]) -> list[int]:
        before = len(store.calls)
        call()
        names = [c.name for c in store.calls[before:] if c.op == "stat"]
        return [names.count(path.name) for path in data_files(place)]

    first_opened_last = [3, 3]
    with mock.patch.multiple(limits, READ_BYTES=1 << 10, STAGED_BYTES=1 << 10):
        assert asked(lambda: ckpt.load(weights(0), store, no_dist=True)) == first_opened_last
        exporting = partial(ckpt.export, store, tmp_path / "new", max_file_bytes=1)
        assert asked(exporting) == first_opened_last


def test_files_with_checksums_are_not_asked_for_again(tmp_path: Path) -> None:
    ckpt.save(weights(1), tmp_path, no_dist=True)
    store = FaultyStore(open_store(tmp_path))
    ckpt.load(weights(0), store, no_dist=True)
    asked = [call.name for call in store.calls if call.op == "stat"]
    read = {call.name for call in store.calls if call.op == "read_into"}
    assert [asked.count(name) for name in read] == [0]
