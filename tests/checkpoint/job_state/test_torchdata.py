"""torchdata's loaders, one for each data-parallel coordinate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch
from tests.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

COUNTS = ("_sampler_iter_state/sampler_state/yielded", "_sampler_iter_state/samples_yielded")
GLOBAL_BATCH = 24


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> int:
        return index


class Packing(IterableDataset[list[int]]):
    """Packs numbers, and keeps what did not fit: its state grows and shrinks."""

    def __init__(self, start: int) -> None:
        self.start, self.kept, self.at = start, list[int](), 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.at < 10:
            self.kept += [self.start + self.at] * (self.at % 3 + 1)
            self.at += 1
            while len(self.kept) >= 4:
                self.kept, packed = self.kept[4:], self.kept[:4]
                yield packed

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.kept), "mask": torch.ones(len(self.kept)), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["mask"].tolist() == [1.0] * len(state["kept"])
        self.kept, self.at = list(state["kept"]), state["at"]


def loaders() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")


def loader_of(mesh: Mesh, rank: int) -> Any:
    """Return the loader of a rank, by its coordinate along dp."""
    module = loaders()
    sampling = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    index = (mesh.coordinate(rank) or ())[mesh.axis("dp")]
    count = mesh.shape[mesh.axis("dp")]
    sampler = sampling.StatefulDistributedSampler(
        Numbers(), num_replicas=count, rank=index, shuffle=True, seed=3
    )
    return module.StatefulDataLoader(Numbers(), GLOBAL_BATCH // count, sampler=sampler)


def state_of(loader: Any, mesh: Mesh) -> dict[str, Any]:
    rule = ckpt.deal_samples(*COUNTS)
    return {"loader": ckpt.PerCoordinate(loader, mesh, "dp", resize=rule)}


def test_positions_go_by_coordinate_and_are_dealt_out_anew(tmp_path: Path) -> None:
    four = Mesh((4, 2), ("dp", "tp"))

    def save(rank: int, group: Any) -> tuple[list[list[int]], list[list[int]]]:
        loader = loader_of(four, rank)
        batches = iter(loader)
        taken = [next(batches).tolist() for _ in range(2)]
        ckpt.save(state_of(loader, four), tmp_path, process_group=group)
        return taken, [batch.tolist() for batch in batches]

    ran = run_ranks(four.size, save)
    taken = sorted(n for first, _ in ran[::2] for batch in first for n in batch)
    assert len(set(taken)) == 2 * GLOBAL_BATCH
    left = sorted(set(range(96)) - set(taken))
    for mesh in (Mesh((2, 4), ("tp", "dp")), Mesh((2,), ("dp",)), Mesh((3,), ("dp",))):

        def load(rank: int, group: Any, mesh: Mesh = mesh) -> list[list[int]]:
            loader = loader_of(mesh, rank)
            ckpt.load(state_of(loader, mesh), tmp_path, process_group=group)
            return [batch.tolist() for batch in loader]

        found = run_ranks(mesh.size, load)
        size = mesh.shape[mesh.axis("dp")]
        if size == 4:
            assert found == [ran[2 * i][1] for i in range(4)] * 2
        rest = [n for rows in found[:size] for batch in rows for n in batch]
        assert sorted(rest) == left, "each once, and none of those that were taken"
        batches = [sorted(n for rows in found[:size] for n in rows[i]) for i in range(2)]
        assert batches == [sorted(n for _, rows in ran[::2] for n in rows[i]) for i in range(2)]


def test_counts_that_cannot_be_dealt_out_are_refused(tmp_path: Path) -> None:
    two, eight = Mesh((2,), ("dp",)), Mesh((8,), ("dp",))

    def save(rank: int, group: Any) -> None:
        loader = loader_of(two, rank)
        batches = iter(loader)
        for _ in range(rank + 1):
            next(batches)
        ckpt.save(state_of(loader, two), tmp_path, process_group=group)

    run_ranks(2, save)

    def load(rank: int, group: Any) -> None:
        ckpt.load(state_of(loader_of(eight, rank), eight), tmp_path, process_group=group)

    with pytest.raises(RanksFailed, match="not taken equal numbers of samples") as failed:
        run_ranks(8, load)
    assert all(isinstance(error, LayoutMismatch) for error in failed.value.errors.values())


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_states_of_any_form_are_taken_over(tmp_path: Path, num_batches: int) -> None:
    mesh = Mesh((2,), ("dp",))

    def make(rank: int) -> Any:
        return loaders().StatefulDataLoader(Packing(100 * rank), batch_size=None)

    def save(rank: int, group: Any) -> list[list[int]]:
        loader = make(rank)
        batches = iter(loader)
        for _ in range(num_batches):
            next(batches)
        ckpt.save({"x": ckpt.PerCoordinate(loader, mesh)}, tmp_path, process_group=group)
        return list(batches)

    def load(rank: int, group: Any) -> list[list[int]]:
        loader = make(rank)
        ckpt.load({"x": ckpt.PerCoordinate(loader, mesh)}, tmp_path, process_group=group)
        return list(loader)

    expected = run_ranks(2, save)
    assert expected[0]
    assert run_ranks(2, load) == expected
