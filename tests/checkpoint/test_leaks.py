"""Saves and loads, a hundred times over, leave nothing behind: no descriptor, thread or memory."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.saving import exiting
from dtckpt.dtensor import DeviceMesh, Shard
from dtckpt.storage import FaultyStore, LocalStore, MemoryStore, RaiseError, Rule, Store

from ..dtensor.rank_meshes import run_on_mesh, scattered

ROUNDS = 100
WARM = 20
"""Rounds after which everything that is kept for the next one is there."""
SPARE_BLOCKS = 10 * (ROUNDS - WARM)
"""Of Python's memory: handles or plans that pile up would take more in each round."""
SPARE_RESIDENT_BYTES = 256 << 20
"""Of the whole process, 3 MB a round: buffers that pile up would take more."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def settled(count: Callable[[], int], most: int) -> int:
    """Return a count once it is small enough; what ends by itself may take its time."""
    limit = time.monotonic() + 30
    while count() > most and time.monotonic() < limit:
        time.sleep(0.02)
    return count()


class Watch:
    """What this process holds after some rounds, beside what it holds after all of them."""

    def __init__(self) -> None:
        self.descriptors = 0
        self.threads = 0
        self.blocks = 0
        self.resident_bytes = 0

    def begin(self) -> None:
        """Note what there is now."""
        vars(exiting)["_unsettled"].clear()  # of other tests
        gc.collect()
        self.descriptors, self.threads = descriptors(), threading.active_count()
        self.resident_bytes = resident_bytes()
        self.blocks = sys.getallocatedblocks()

    def end(self) -> None:
        """Assert that there is no more now."""
        gc.collect()
        grown = sys.getallocatedblocks() - self.blocks
        assert settled(descriptors, self.descriptors) <= self.descriptors
        assert settled(threading.active_count, self.threads) <= self.threads, threads()
        assert not vars(exiting)["_unsettled"]
        assert grown < SPARE_BLOCKS
        assert resident_bytes() - self.resident_bytes < SPARE_RESIDENT_BYTES


def state(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((1000,), value),
        "b": torch.full((50, 4), value, dtype=torch.bfloat16),
        "step": value,
    }


def one_round(number: int, store: Store, base: Store) -> None:
    """Save and load in all ways, and fail to."""
    broken = FaultyStore(MemoryStore(), [Rule(RaiseError(OSError("on fire")), op="create")])
    value = state(float(number))
    dcp.save(value, store, overwrite=True)
    dcp.async_save(value, store, overwrite=True)  # nobody asks how it ended
    dcp.async_save(value, store, overwrite=True, base=base).result(60)
    assert dcp.async_save(value, broken).exception(60) is not None
    cancelled = dcp.async_save(value, store, overwrite=True)
    cancelled.cancel()
    cancelled.exception(60)
    into = state(-1.0)
    dcp.load(into, store)
    assert into["step"] == number
    with dcp.open(store) as checkpoint:
        assert checkpoint["w"][:3].tolist() == [number] * 3
    assert dcp.verify(store).problems == ()


def test_one_process(tmp_path: Path) -> None:
    store, base = (LocalStore(tmp_path / name) for name in ("c", "base"))
    dcp.save(state(0.0), base)
    watch = Watch()
    for number in range(ROUNDS):
        if number == WARM:
            watch.begin()
        one_round(number, store, base)
    watch.end()
    assert {p.name for p in tmp_path.rglob("*.safetensors")} == {"00000.safetensors"}
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2, "one of each checkpoint that is there"


def shared_round(number: int, mesh: DeviceMesh, root: Path) -> None:
    """Save and load with all ranks of a mesh, by rows and by columns."""
    group, whole = mesh.get_group(), torch.arange(3000.0).view(60, 50)
    value = {"w": scattered(whole + number, mesh, [Shard(0)]), "step": number}
    dcp.save(value, root / "c", process_group=group, overwrite=True)
    dcp.async_save(value, root / "d", process_group=group, overwrite=True).result(60)
    into = {"w": scattered(torch.zeros(60, 50), mesh, [Shard(1)]), "step": -1}
    dcp.load(into, root / "d", process_group=group, read_once=None if number % 2 else True)
    assert into["step"] == number


def test_ranks_of_a_group(tmp_path: Path) -> None:
    watch = Watch()
    begin, end = threading.Barrier(3, watch.begin), threading.Barrier(3, watch.end)

    def body(mesh: DeviceMesh) -> None:
        for number in range(ROUNDS):
            if number == WARM:
                begin.wait(60)
            shared_round(number, mesh, tmp_path)
        end.wait(60)

    run_on_mesh((3,), body)
