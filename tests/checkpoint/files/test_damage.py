"""Damage of every kind is found, named, and never loaded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from dtckpt.checkpoint import load, open, save, verify
from dtckpt.dtensor import Layout, Mesh, Replicate, Shard
from dtckpt.errors import CheckpointError, Corrupt, NotCommitted
from dtckpt.storage import (
    FaultyStore,
    MemoryStore,
    ObjectInfo,
    ReadRequest,
    Rule,
    ShortRead,
    Store,
    WriteStream,
)

from ...ranks import RanksFailed, run_ranks
from ..simulate import Given, items, save_all

NUM_FLIPS = 400

Objects = dict[str, bytes]


@pytest.fixture(scope="module")
def intact() -> tuple[Objects, dict[str, torch.Tensor]]:
    """The objects of a checkpoint written by four ranks, and what it holds."""
    mesh = Mesh((2, 2))
    given = {
        "w": Given(items((9, 30), "F32", 1), "F32", Layout(mesh, (Shard(0), Shard(1)), (9, 30))),
        "b": Given(items((50,), "BF16", 2), "BF16", Layout(mesh, (Shard(0), Replicate()), (50,))),
        "n": Given(items((3, 7), "I64", 3), "I64", Layout.replicated(mesh, (3, 7))),
        "s": Given(items((), "F64", 4), "F64", Layout.replicated(mesh, ())),
    }
    store, _ = save_all(given, range(4), block_bytes=256)
    objects = {info.name: store.read(info.name) for info in store.list()}
    loaded = fresh()
    load(loaded, MemoryStore(dict(objects)))
    return objects, loaded


def fresh() -> dict[str, torch.Tensor]:
    """Destinations filled with a value that no test stores."""
    return {
        "w": torch.full((9, 30), 7.0),
        "b": torch.full((50,), 7.0, dtype=torch.bfloat16),
        "n": torch.full((3, 7), 7),
        "s": torch.full((), 7.0, dtype=torch.float64),
    }


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor; comparisons must not stumble over NaN."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit turned over."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_one_flipped_bit_anywhere_is_found(
    intact: tuple[Objects, dict[str, torch.Tensor]],
) -> None:
    objects, _ = intact
    rng = random.Random(2026)
    kinds: set[str] = set()
    for number in range(NUM_FLIPS):
        name = sorted(objects)[number % len(objects)]
        bit = rng.randrange(8 * len(objects[name]))
        store = MemoryStore(objects | {name: flipped(objects[name], bit)})
        state = fresh()
        with pytest.raises(Corrupt) as failure:
            load(state, store)
        overwritten = set(failure.value.overwritten)
        kinds.add("data" if "they belong to" in str(failure.value) else "known before")
        assert name in str(failure.value), "the message names the file"
        before = fresh()
        for key, tensor in state.items():
            untouched = bits(tensor) == bits(before[key])
            assert untouched or key in overwritten, f"{key} changed but is not listed"
    assert kinds == {"data", "known before"}


def test_every_flip_is_found_by_verify_too(
    intact: tuple[Objects, dict[str, torch.Tensor]],
) -> None:
    objects, _ = intact
    rng = random.Random(1)
    for name in sorted(objects):
        for _ in range(20):
            bit = rng.randrange(8 * len(objects[name]))
            store = MemoryStore(objects | {name: flipped(objects[name], bit)})
            if name == "manifest.json":
                with pytest.raises(Corrupt):
                    verify(store)
            else:
                problems = verify(store).problems
                assert problems
                assert all(name in problem.message for problem in problems)
                assert {problem.file for problem in problems} == {name}
                assert all(problem.start < problem.end for problem in problems)


def test_no_value_is_wrong_after_a_flip_in_data(
    intact: tuple[Objects, dict[str, torch.Tensor]],
) -> None:
    """Elements that were loaded before the damage was found are right, whatever happens."""
    objects, expected = intact
    name = max(objects, key=lambda n: len(objects[n]))
    start = int.from_bytes(objects[name][:8], "little") + 8
    for bit in range(8 * start, 8 * (start + 300), 97):
        state = fresh()
        with pytest.raises(Corrupt, match="bytes"):
            load(state, MemoryStore(objects | {name: flipped(objects[name], bit)}))
        for key, tensor in state.items():
            given = tensor.reshape(-1)
            right = given == expected[key].reshape(-1)
            old = given == fresh()[key].reshape(-1)
            nan = given != given  # random bits may be NaN, which is a saved value
            assert (right | old | nan).all()


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_truncated_objects(intact: tuple[Objects, dict[str, torch.Tensor]], keep: float) -> None:
    objects, _ = intact
    for name, data in objects.items():
        end = int(len(data) * keep) if 0 < keep < 1 else int(keep)
        state = fresh()
        with pytest.raises(Corrupt, match=name):
            load(state, MemoryStore(objects | {name: data[:end]}))
        assert all(bits(state[key]) == bits(fresh()[key]) for key in state)


def test_missing_objects(intact: tuple[Objects, dict[str, torch.Tensor]]) -> None:
    objects, _ = intact
    for name in objects:
        rest = {n: data for n, data in objects.items() if n != name}
        error = NotCommitted if name == "manifest.json" else Corrupt
        state = fresh()
        with pytest.raises(error, match="missing"):
            load(state, MemoryStore(rest))
        assert all(bits(state[key]) == bits(fresh()[key]) for key in state)


def test_files_of_another_save_of_the_same_state() -> None:
    """Same names, shapes and sizes, other values: only the digests can tell."""
    stores = [MemoryStore(), MemoryStore()]
    for value, store in enumerate(stores):
        save({"w": torch.full((100,), float(value))}, store)
    first, second = ({i.name: s.read(i.name) for i in s.list()} for s in stores)
    own = next(name for name in first if name.startswith("data"))
    foreign = next(name for name in second if name.startswith("data"))
    state = {"w": torch.full((100,), 7.0)}
    with pytest.raises(Corrupt, match="another save"):
        load(state, MemoryStore(first | {own: second[foreign]}))
    assert (state["w"] == 7).all()


def test_a_foreign_manifest() -> None:
    for text in (b'{"hello": "world"}', b""):
        with pytest.raises(Corrupt, match=r"no manifest of a checkpoint|does not have the digest"):
            load({}, MemoryStore({"manifest.json": text}))


@pytest.mark.parametrize("nth", [1, 2], ids=["header and table", "data"])
def test_a_store_that_reads_short_is_not_believed(
    intact: tuple[Objects, dict[str, torch.Tensor]], nth: int
) -> None:
    objects, _ = intact
    store = FaultyStore(MemoryStore(dict(objects)), [Rule(ShortRead(3), op="read_into", nth=nth)])
    with pytest.raises(Corrupt):
        load(fresh(), store)


class Plain(Store):
    """A store of somebody else's, who knows only what has to be there."""

    def __init__(self, objects: Objects, flip: str | None = None) -> None:
        self.url = "plain://"
        self._store = MemoryStore(objects)
        self._flip = flip

    def stat(self, name: str) -> ObjectInfo:
        return self._store.stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.read(name, start, stop)

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        self._store.read_into(name, requests)
        if name == self._flip and requests[0].offset > 0:  # no header
            requests[0].view[0] ^= 1

    def create(self, name: str, size: int) -> WriteStream:
        return self._store.create(name, size)

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        self._store.publish(name, data, overwrite=overwrite)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self._store.delete(names)

    def substore(self, prefix: str) -> Store:
        return self._store.substore(prefix)

    def sibling(self, name: str) -> Store:
        return self._store.sibling(name)


class Teller(Plain):
    """One that tells of some buffers, of some twice, and of one that nobody asked for."""

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        self.read_into(name, requests)
        yield ReadRequest(0, bytearray(1))
        yield from [*requests[1::2], *requests[1::2]]


@pytest.mark.parametrize("kind", [Plain, Teller])
def test_a_store_of_somebody_else_is_verified(kind: type[Plain]) -> None:
    """Whatever of the interface it leaves out: runs go straight to their tensor, or by a buffer."""
    objects: Objects = {}
    state = {"runs": torch.arange(1 << 20), "small": torch.arange(7)}
    save(state, MemoryStore(objects))
    loaded = {"runs": torch.zeros(1 << 20, dtype=torch.int64), "small": torch.zeros(7).long()}
    load(loaded, kind(objects))
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    data = next(name for name in objects if name.startswith("data"))
    for select in ("runs", "small"):
        with pytest.raises(Corrupt, match="they belong to"):
            load(loaded, kind(objects, flip=data), select=select)
    assert verify(kind(objects)).problems == ()
    assert verify(kind(objects, flip=data)).problems


def test_lazy_slices_are_verified(intact: tuple[Objects, dict[str, torch.Tensor]]) -> None:
    objects, _ = intact
    name = sorted(objects)[0]
    bit = 8 * (int.from_bytes(objects[name][:8], "little") + 8)
    checkpoint = open(MemoryStore(objects | {name: flipped(objects[name], bit)}))
    found = 0
    for tensor in checkpoint.values():
        try:
            tensor[...]
        except Corrupt:
            found += 1
    assert found >= 1


def test_all_ranks_raise_the_same_error(
    intact: tuple[Objects, dict[str, torch.Tensor]],
) -> None:
    objects, _ = intact
    rng = random.Random(7)
    for name in sorted(objects):
        bit = rng.randrange(8 * len(objects[name]))
        damaged = MemoryStore(objects | {name: flipped(objects[name], bit)})

        def body(rank: int, group: Any, store: Store = damaged) -> None:
            load(fresh(), store, process_group=group)

        with pytest.raises(RanksFailed) as failure:
            run_ranks(2, body)
        errors = failure.value.errors
        assert set(errors) == {0, 1}
        assert {type(error) for error in errors.values()} == {Corrupt}
        assert len({str(error) for error in errors.values()}) == 1


def test_only_one_rank_sees_the_damage() -> None:
    """A flip on the way to one rank reaches the other rank as an error, too."""
    store = MemoryStore()
    save({"w": torch.arange(1000.0)}, store)

    def body(rank: int, group: Any) -> None:
        rule = Rule(ShortRead(0), op="read_into", nth=2)  # after header and table
        mine = FaultyStore(store, [rule] if rank == 1 else [])
        load({"w": torch.zeros(1000)}, mine, process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    for error in failure.value.errors.values():
        assert isinstance(error, Corrupt)
        assert "rank 1" in str(error)
        assert error.overwritten == ("w",), "rank 0 had loaded it"
        assert "already overwritten on some rank: w" in str(error)


def test_nothing_at_all_is_not_committed() -> None:
    with pytest.raises(NotCommitted, match="no committed checkpoint"):
        load({}, MemoryStore())
    assert issubclass(NotCommitted, CheckpointError)
    assert issubclass(NotCommitted, FileNotFoundError)
