"""The read pipeline: which bytes are asked for, where they go, and how much memory that takes."""

from __future__ import annotations

import pickle
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import read_manifest
from dtckpt.checkpoint.files.stored_data import DataFile, StoredData
from dtckpt.checkpoint.reading import execution, limits, read_plan
from dtckpt.checkpoint.reading.execution import ReadCache, execute
from dtckpt.checkpoint.reading.read_plan import Read, plan_reads
from dtckpt.checkpoint.reading.wants import Want
from dtckpt.checkpoint.tensors.transfer import TensorSink
from dtckpt.dtensor import Box
from dtckpt.errors import Corrupt, LayoutMismatch, ObjectNotFound
from dtckpt.storage import MemoryStore, ReadRequest

MIB = 1 << 20


class Recorder:
    """Remembers every range of data that a store in memory is asked for, and what is meanwhile."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.store = MemoryStore(objects)
        self.calls: list[list[tuple[int, int]]] = []
        self.addresses: set[int] = set()
        self.in_flight = 0
        self.most_in_flight = 0
        self._objects = objects
        self._lock = threading.Lock()
        setattr(self.store, "read_into", self.read_into)  # noqa: B010

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        """Read without memory of its own, and remember."""
        if requests[0].offset == 0:  # header and table, with which a file is opened
            MemoryStore.read_into(self.store, name, requests)
            return
        size = sum(request.view.nbytes for request in requests)
        with self._lock:
            self.calls.append([(request.offset, request.view.nbytes) for request in requests])
            self.addresses |= {np.asarray(request.view).ctypes.data for request in requests}
            self.in_flight += size
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for request in requests:
            request.view[:] = memoryview(self._objects[name])[request.offset : request.stop]
        with self._lock:
            self.in_flight -= size

    @property
    def num_bytes(self) -> int:
        """Bytes read so far."""
        return sum(size for call in self.calls for _, size in call)


def recorded(state: dict[str, torch.Tensor], *, flipped: int | None = None) -> Recorder:
    """A recorder of a checkpoint of some tensors; one byte of its data may be wrong."""
    store = MemoryStore()
    dcp.save(state, store)
    objects = {info.name: store.read(info.name) for info in store.list()}
    if flipped is not None:
        name = data_name(store)
        damaged = bytearray(objects[name])
        damaged[data_start(store) + flipped] ^= 1
        objects[name] = bytes(damaged)
    return Recorder(objects)


def data_name(store: MemoryStore) -> str:
    """The name of the data file."""
    return next(info.name for info in store.list("data"))


def data_start(store: MemoryStore) -> int:
    """Where the data region starts."""
    return int.from_bytes(store.read(data_name(store), 0, 8), "little") + 8


def read(
    recorder: Recorder,
    wanted: Sequence[tuple[str, Box, torch.Tensor]],
    *,
    touched: dict[str, None] | None = None,
    cache: ReadCache | None = None,
) -> int:
    """Read boxes of stored tensors into tensors."""
    data = StoredData(recorder.store, read_manifest(recorder.store))
    wants = [
        Want(tensor=data.manifest.tensors[name], box=box, sink=TensorSink(into))
        for name, box, into in wanted
    ]
    return execute(plan_reads(data, wants), touched=touched, cache=cache)


def random_bytes(*shape: int) -> torch.Tensor:
    """A tensor of random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_whole_tensors_are_read_straight_into_place() -> None:
    state = {"a": torch.randn(3, MIB // 2), "b": torch.randn(100_000)}
    recorder = recorded(state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, recorded(state).store)  # imports what it needs, which takes memory, too
    tracemalloc.start()
    report = dcp.load(into, recorder.store)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    blocks = {into["a"].data_ptr() + start for start in range(0, into["a"].nbytes, MIB)}
    assert recorder.addresses == {*blocks, into["b"].data_ptr()}
    assert peak < 2 * MIB, "there is no buffer for 6 MiB"
    assert report.bytes_read == report.bytes_needed == recorder.num_bytes
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())


def test_neighbours_are_asked_for_in_one_call() -> None:
    state = {f"{i:03}": random_bytes(100_000) for i in range(100)} | {"x": random_bytes(10)}
    recorder = recorded(state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, recorder.store)
    assert len(recorder.calls) == 1
    starts, sizes = zip(*sorted(recorder.calls[0]), strict=True)
    assert all(a + n == b for a, n, b in zip(starts, sizes, starts[1:], strict=False))


def test_small_tensors_share_one_range() -> None:
    state = {f"{i:03}": random_bytes(1000) for i in range(500)}
    recorder = recorded(state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, recorder.store)
    assert recorder.calls == [[(recorder.calls[0][0][0], 500_000)]]
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("wanted_bytes", "gap_bytes", "num_ranges"),
    [(100, 4000, 1), (100, 5000, 50), (50_000, 6000, 1), (400_000, 70_000, 50)],
)
def test_small_gaps_are_read_over_and_wide_ones_are_not(
    wanted_bytes: int, gap_bytes: int, num_ranges: int
) -> None:
    state = {f"{i:03}": random_bytes(gap_bytes if i % 2 else wanted_bytes) for i in range(100)}
    names = sorted(state)[::2]
    recorder = recorded(state)
    into = torch.zeros(len(names), 2, wanted_bytes, dtype=torch.uint8)[:, 0]
    whole = Box.whole((wanted_bytes,))
    wanted = [(name, whole, into[i]) for i, name in enumerate(names)]
    with mock.patch.object(limits, "IN_PLACE_BYTES", MIB):
        done = read(recorder, wanted)
    ranges = sum(map(len, recorder.calls))
    assert done == recorder.num_bytes
    assert done == 50 * wanted_bytes + (50 - ranges) * gap_bytes
    assert ranges == num_ranges
    assert all(torch.equal(into[i], state[name]) for i, name in enumerate(names))


def test_what_is_read_over_is_a_small_part() -> None:
    state = {f"{i:03}": random_bytes(20_000) for i in range(200)}
    recorder = recorded(state)
    names = [name for i, name in enumerate(state) if i % 5 != 2 and i % 7 != 3]
    into = {name: torch.zeros_like(state[name]) for name in names}
    done = read(recorder, [(name, Box.whole((20_000,)), into[name]) for name in names])
    needed = 20_000 * len(names)
    assert needed < done <= needed * 9 // 8
    assert all(torch.equal(into[name], state[name]) for name in names)


def test_rows_are_read_by_whole_blocks() -> None:
    whole = torch.arange(6 * MIB // 4, dtype=torch.int32).reshape(6, -1)
    recorder = recorded({"w": whole})
    into = torch.zeros(3, whole.shape[1], dtype=torch.int32)
    row = whole.shape[1]
    assert read(recorder, [("w", Box((2, 0), (3, row)), into)]) == 3 * MIB
    assert recorder.addresses == {into.data_ptr() + block * MIB for block in range(3)}
    part = torch.zeros(1, row // 2, dtype=torch.int32)
    assert read(recorder, [("w", Box((0, row // 4), (1, row // 2)), part)]) == MIB
    assert torch.equal(into, whole[2:5])
    assert torch.equal(part, whole[:1, row // 4 : row // 4 * 3])


def test_columns_of_long_rows_do_not_bring_the_rows() -> None:
    whole = torch.randn(4, 2 * MIB)
    recorder = recorded({"w": whole})
    into = torch.zeros(4, MIB // 2)
    assert read(recorder, [("w", Box((0, MIB // 4), (4, MIB // 2)), into)]) == 4 * 2 * MIB
    assert torch.equal(into, whole[:, MIB // 4 : MIB // 4 * 3])


def test_columns_of_short_rows_read_every_block_once() -> None:
    whole = torch.randn(20_000, 257)
    recorder = recorded({"w": whole})
    into = torch.zeros(20_000, 100)
    size = whole.nbytes
    assert size > limits.READ_BYTES, "so there are several reads, which may share a block"
    assert read(recorder, [("w", Box((0, 57), (20_000, 100)), into)]) <= size + 2 * MIB
    assert torch.equal(into, whole[:, 57:157])


def test_destinations_of_any_strides() -> None:
    whole = torch.randn(300, 1000)
    recorder = recorded({"w": whole})
    destinations = {
        "transposed": torch.zeros(1000, 300).T,
        "every other column": torch.zeros(300, 2000)[:, ::2],
        "a column slice": torch.zeros(300, 1500)[:, 250:1250],
        "an offset": torch.zeros(300 * 1000 + 1)[1:].view(300, 1000),
        "conjugate": torch.zeros(300, 1000).conj(),
    }
    for into in destinations.values():
        read(recorder, [("w", Box.whole((300, 1000)), into)])
        assert torch.equal(into, whole)


def test_memory_is_bounded_whatever_the_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 4 * MIB)
    whole = torch.randn(4096, 4096)
    recorder = recorded({"w": whole})
    into = torch.zeros(4096, 4096).T
    tracemalloc.start()
    read(recorder, [("w", Box.whole((4096, 4096)), into)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(into, whole)
    assert len(recorder.calls) > 2 * limits.NUM_READERS
    assert recorder.most_in_flight <= limits.NUM_READERS * 4 * MIB
    assert peak <= (limits.NUM_READERS * 4 + 1) * MIB


def test_one_tensor_may_be_wanted_twice() -> None:
    whole = torch.randn(1000, 1000)
    recorder = recorded({"w": whole})
    one, two = torch.zeros(1000, 1000), torch.zeros(600, 1000)
    three = torch.zeros(1000, 10)
    boxes = [Box.whole((1000, 1000)), Box((300, 0), (600, 1000)), Box((0, 7), (1000, 10))]
    read(recorder, [("w", box, t) for box, t in zip(boxes, (one, two, three), strict=True)])
    assert torch.equal(one, whole)
    assert torch.equal(two, whole[300:900])
    assert torch.equal(three, whole[:, 7:17])


def test_small_slices_of_one_block_are_read_once() -> None:
    whole = torch.randn(1000, 100)
    recorder = recorded({"w": whole})
    tensor = dcp.open(recorder.store)["w"]
    for row in range(1000):
        assert torch.equal(tensor[row], whole[row])
    assert len(recorder.calls) == 1


def test_what_was_read_over_is_not_taken_for_verified() -> None:
    """The cache must not hand out the bytes of a gap, which nobody has compared."""
    state = {name: random_bytes(1000) for name in "abc"}
    store = recorded(state, flipped=1500).store
    cache, whole = ReadCache(), Box.whole((1000,))
    data = StoredData(store, read_manifest(store))

    def want(key: str, into: torch.Tensor) -> Want:
        return Want(tensor=data.manifest.tensors[key], box=whole, sink=TensorSink(into))

    a, b, c = (torch.zeros(1000, dtype=torch.uint8) for _ in range(3))
    assert execute(plan_reads(data, [want("a", a), want("c", c)]), cache=cache) == 3000
    assert torch.equal(a, state["a"])
    assert torch.equal(c, state["c"])
    with pytest.raises(Corrupt, match="they belong to b"):
        execute(plan_reads(data, [want("b", b)]), cache=cache)
    assert not b.any()


def test_the_cache_knows_one_range_of_one_file() -> None:
    file, other = mock.Mock(spec=DataFile), mock.Mock(spec=DataFile)
    cache = ReadCache()
    cache.keep(file, 100, memoryview(bytes(range(50))))

    def found(where: DataFile, start: int, end: int) -> bytes | None:
        view = cache.find(where, read_plan.Range(start, end, []))
        return None if view is None else bytes(view)

    assert found(file, 110, 120) == bytes(range(10, 20))
    assert found(file, 100, 150) == bytes(range(50))
    assert found(file, 140, 151) is None
    assert found(file, 99, 110) is None
    assert found(other, 110, 120) is None


def test_what_another_thread_has_found_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still copy out of what one read has left for it while the next one is under way."""
    monkeypatch.setattr(limits, "NUM_READERS", 1)
    left: list[tuple[memoryview, bytes]] = []
    keep = ReadCache.keep

    def note(cache: ReadCache, file: DataFile, start: int, data: memoryview) -> None:
        left.append((data, bytes(data)))
        keep(cache, file, start, data)

    monkeypatch.setattr(ReadCache, "keep", note)
    store = MemoryStore()
    wide = torch.arange(32 << 19, dtype=torch.int32).view(32, -1)  # two blocks to a row
    dcp.save({"w": wide}, store)
    with dcp.open(store) as checkpoint:
        assert torch.equal(checkpoint["w"][:, :10], wide[:, :10])
    assert len(left) >= 2
    assert all(bytes(view) == copy for view, copy in left)


def test_damage_on_the_straight_way_is_named() -> None:
    state = {"a": random_bytes(3 * MIB), "b": random_bytes(3 * MIB)}
    recorder = recorded(state, flipped=4 * MIB + 17)  # in the second block of b
    start = data_start(recorder.store)
    touched: dict[str, None] = {}
    wanted = [(n, Box.whole((3 * MIB,)), torch.zeros_like(state[n])) for n in "ab"]
    place = f"bytes {start + 4 * MIB} to {start + 5 * MIB} are damaged; they belong to b"
    with pytest.raises(Corrupt, match=place) as failure:
        read(recorder, wanted, touched=touched)
    assert data_name(recorder.store) in str(failure.value)
    assert "b" in touched


class Fickle(TensorSink):
    """Says that it is memory, and has none when it is asked for it."""

    def memory(self) -> memoryview | None:
        return None


def test_a_destination_may_not_lose_its_memory_between_plan_and_read() -> None:
    store = recorded({"a": random_bytes(3 * MIB)}).store
    data = StoredData(store, read_manifest(store))
    into = torch.zeros(3 * MIB, dtype=torch.uint8)
    want = Want(tensor=data.manifest.tensors["a"], box=Box.whole((3 * MIB,)), sink=Fickle(into))
    reads = plan_reads(data, [want])
    with pytest.raises(LayoutMismatch, match="tensor 'a': its destination offered memory when"):
        execute(reads)
    assert not into.any()


def test_no_read_begins_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    stopped = threading.Event()

    def run(_: Any, read: Any) -> int:
        begun.append(read)
        if read == 1:
            raise Corrupt("the second read")
        assert stopped.wait(60)
        return 0

    monkeypatch.setattr(vars(execution)["_Reader"], "_run", run)
    monkeypatch.setattr(execution, "Event", lambda: stopped)
    reads: Any = range(100)
    with pytest.raises(Corrupt, match="the second read"):
        execute(reads)
    assert len(begun) <= limits.NUM_READERS


def test_reads_go_through_the_files_in_order() -> None:
    state = {f"{i}": random_bytes(5 * MIB) for i in (3, 1, 2, 0)}
    store = recorded(state).store
    data = StoredData(store, read_manifest(store))
    wants = [
        Want(
            tensor=data.manifest.tensors[name],
            box=Box.whole((5 * MIB,)),
            sink=TensorSink(torch.zeros(5 * MIB, dtype=torch.uint8)),
        )
        for name in "0213"
    ]
    reads = [read for read in plan_reads(data, wants) if isinstance(read, Read)]
    starts = [piece.start for r in reads for piece in r.in_place]
    assert starts == sorted(starts)
    assert all(r.num_bytes <= limits.READ_BYTES for r in reads)


@pytest.mark.parametrize("kind", ["own", "compressed", "dcp", "torch.save", "safetensors"])
def test_opened_checkpoints_may_be_pickled(kind: str, tmp_path: Path) -> None:
    whole = torch.arange(400.0).view(20, 20)
    place = tmp_path / "saved"
    dcp.save({"w": whole}, place, no_dist=True, compress="zstd" if kind == "compressed" else None)
    if kind in ("dcp", "safetensors"):
        dcp.export(place, tmp_path / "other", format=kind)
        place = tmp_path / "other"
    if kind == "torch.save":
        place = tmp_path / "other.pt"
        torch.save({"w": whole}, place)
    with dcp.open(place) as opened:
        assert opened["w"][1].equal(whole[1])
        for copy in (opened, pickle.loads(pickle.dumps(opened)).state_dict()):
            again = pickle.loads(pickle.dumps(copy["w"]))
            assert again.layout == opened["w"].layout
            assert again[3:5, 2:].equal(whole[3:5, 2:])
            assert again[...].equal(whole)


def test_a_pickled_checkpoint_is_another_one_once_it_is_replaced(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, tmp_path, no_dist=True)
    with dcp.open(tmp_path) as opened:
        sent = pickle.dumps(opened["w"])
    dcp.save({"w": torch.zeros(4)}, tmp_path, no_dist=True, overwrite=True)
    with pytest.raises((Corrupt, ObjectNotFound)):
        pickle.loads(sent)[...]
