"""Who writes what: replicas share the work, large tensors are cut, tied ones written once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.files.stored_tensor import StoredTensor
from dtckpt.checkpoint.saving import writers
from dtckpt.checkpoint.saving.writers import MIN_SLICE_BYTES, assign_writers
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.checkpoint.tensors.spec import GlobalTensor
from dtckpt.dtensor import Box, Layout, Mesh, Replicate, Shard
from dtckpt.storage import MemoryStore

MIB = 1 << 20


def tensor(name: str, shape: tuple[int, ...], layout: Layout) -> GlobalTensor:
    return GlobalTensor(name=name, dtype=DTYPES["U8"], shape=shape, layout=layout)


def written(stored: tuple[StoredTensor, ...], ranks: int) -> list[int]:
    return [
        sum(b.numel * t.dtype.itemsize for t in stored for b in t.chunks_of(r))
        for r in range(ranks)
    ]


@pytest.mark.parametrize("num_replicas", [2, 3, 8, 64])
def test_one_large_tensor_is_cut_for_all_replicas(num_replicas: int) -> None:
    mesh = Mesh((num_replicas,), ("dp",))
    shape = (num_replicas * 64, MIB)
    stored = assign_writers([tensor("w", shape, Layout(mesh, (Replicate(),), shape))])
    loads = written(stored, num_replicas)
    assert sum(loads) == stored[0].num_bytes
    assert max(loads) / (sum(loads) / num_replicas) <= 1.1
    assert len(stored[0].writers) <= 8 * num_replicas


def test_very_many_replicas_get_fewer_slices_each() -> None:
    num_replicas = 16_384
    layout = Layout(Mesh((num_replicas,)), (Replicate(),), shape := (1 << 20, 256, 256))
    stored = assign_writers([tensor(f"t{i}", shape, layout) for i in range(40)])
    writers = [writer for t in stored for writer in t.writers]
    assert len(writers) <= 80_000, "each is a number in the manifest"
    loads = Counter(writers)
    assert len(loads) == num_replicas
    assert max(loads.values()) <= 1.1 * len(writers) / num_replicas


def test_small_tensors_are_not_cut() -> None:
    mesh = Mesh((4,), ("dp",))
    layout = Layout(mesh, (Replicate(),), (MIB,))
    stored = assign_writers([tensor(f"t{i}", (MIB,), layout) for i in range(40)])
    assert all(len(t.writers) == 1 for t in stored)
    assert written(stored, 4) == [10 * MIB] * 4
    (alone,) = assign_writers([tensor("t", (6 * MIB,), Layout(mesh, (Replicate(),), (6 * MIB,)))])
    assert len(alone.writers) == 1, "halves would be smaller than the least slice"
    assert MIN_SLICE_BYTES == 4 * MIB


def test_a_tensor_of_few_rows_is_cut_along_another_dim() -> None:
    mesh = Mesh((4,), ("dp",))
    shape = (2, 64 * MIB)
    (stored,) = assign_writers([tensor("w", shape, Layout(mesh, (Replicate(),), shape))])
    assert stored.cut == 1
    assert max(written((stored,), 4)) <= 1.1 * stored.num_bytes / 4


def test_every_element_is_written_once_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MIN_SLICE_BYTES", 8)
    rng = random.Random(3)
    for _ in range(200):
        mesh = Mesh((rng.randint(1, 4), rng.randint(1, 4)), ("a", "b"))
        ndim = rng.randint(1, 3)
        shape = tuple(rng.randint(1, 9) for _ in range(ndim))
        choices = [Replicate(), *(Shard(d) for d in range(ndim))]
        layout = Layout(mesh, (rng.choice(choices), rng.choice(choices)), shape)
        (stored,) = assign_writers([tensor("w", shape, layout)])
        count = torch.zeros(shape, dtype=torch.int64)
        owner = torch.full(shape, -1)
        for rank in range(mesh.size):
            for box in stored.chunks_of(rank):
                count[box.slices] += 1
                owner[box.slices] = rank
        assert (count == 1).all()
        offsets = tuple(rng.randrange(n) for n in shape)
        sizes = tuple(rng.randint(1, n - o) for n, o in zip(shape, offsets, strict=True))
        seen = torch.zeros(shape, dtype=torch.int64)
        for rank, chunk, common in stored.chunks_meeting(Box(offsets, sizes)):
            assert chunk.contains(common)
            assert (owner[common.slices] == rank).all()
            assert chunk in list(stored.chunks_of(rank))
            seen[common.slices] += 1
        assert seen.sum() == Box(offsets, sizes).numel
        assert (seen[Box(offsets, sizes).slices] == 1).all()


def test_a_cut_tensor_survives_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    from ...ranks import run_ranks

    monkeypatch.setattr(writers, "MIN_SLICE_BYTES", 64)
    store, value = MemoryStore(), torch.randn(40, 12)
    run_ranks(3, lambda _, group: dcp.save({"w": value}, store, process_group=group))
    (stored,) = dcp.read_manifest(store).tensors.values()
    assert set(stored.writers) == {0, 1, 2}
    assert torch.equal(dcp.open(store)["w"][...], value)
    assert torch.equal(dcp.open(store)["w"][7:33, 2:5], value[7:33, 2:5])
    assert dcp.verify(store).problems == ()


def test_tied_tensors_are_written_once_and_read_by_both_names() -> None:
    weight = torch.randn(30, 4)
    state = {"head": weight, "embedding": weight, "twin": weight.clone(), "part": weight[:3]}
    store = MemoryStore()
    report = dcp.save(state, store)
    assert report.total_bytes == (30 * 4 * 2 + 12) * 4
    manifest = dcp.read_manifest(store)
    assert manifest.tensors["embedding"].same_as == "head"
    assert Counter(t.same_as for t in manifest.tensors.values()) == {None: 3, "head": 1}
    with dcp.open(store) as checkpoint:
        assert torch.equal(checkpoint["embedding"][2:5], weight[2:5])
        assert torch.equal(checkpoint["head"][...], weight)
    assert dcp.verify(store).problems == ()


def test_ties_over_ranks_need_the_word_of_all() -> None:
    from ...ranks import run_ranks

    def body(rank: int, group: object) -> None:
        weight = torch.ones(4)
        other = weight if rank == 0 else weight.clone()
        dcp.save({"a": weight, "b": other}, store, process_group=group)

    store = MemoryStore()
    run_ranks(2, body)
    assert [t.same_as for t in dcp.read_manifest(store).tensors.values()] == [None, None]
