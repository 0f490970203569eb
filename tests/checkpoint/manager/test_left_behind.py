"""A run goes on after a save that was finished without one of its ranks, which was only slow."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import CheckpointManager, Tier
from dtckpt.errors import RankFailed
from dtckpt.storage import Fault, FaultyStore, LocalStore, Rule

from ...ranks import run_ranks
from ...waiting import beside_each_other, wait_for

SIZE = 3


class Slow(Fault):
    """Holds a rank up, which lives and shows it."""

    def __init__(self, goes_on: threading.Event) -> None:
        self.goes_on = goes_on

    def before(self) -> None:
        assert self.goes_on.wait(60)


def state(step: int) -> dict[str, Any]:
    """What all ranks hold alike, in part as it was."""
    frozen = {f"f{n}": torch.full((3000,), float(n)) for n in range(SIZE)}
    return frozen | {f"w{n}": torch.full((3000,), float(step)) for n in range(SIZE)}


def check_that_all_save_the_next_step(place: Path, in_background: bool, has_tier: bool) -> None:
    fast, root = place / "fast", place / "root"
    first = fast if has_tier else root
    goes_on = threading.Event()

    def release() -> None:
        wait_for((first / "step-1" / "manifest.json").exists, 60)
        goes_on.set()

    def body(rank: int, group: dist.ProcessGroup) -> list[str]:
        rules = [Rule(Slow(goes_on), op="create", name="step-1/data/*")] if rank == 1 else []
        own = FaultyStore(LocalStore(first), rules)
        with CheckpointManager(
            root if has_tier else own,
            tiers=[Tier(own)] if has_tier else [],
            incremental=0 if has_tier else 4,
            in_background=in_background,
            staged_copies=2,
            on_failure="warn",
            process_group=group,
            timeout=timedelta(seconds=3),
        ) as manager:
            manager.save(1, state(1))
            manager.save(2, state(2))
            manager.save(3, state(3))
            report = manager.wait()
            assert report is not None
            assert report.stood_in_for == ()
        assert all(isinstance(error, RankFailed) for _, error in manager.failures)
        return [f"{step}: {error}" for step, error in manager.failures]

    watch = threading.Thread(target=release)
    watch.start()
    told = run_ranks(SIZE, body)
    watch.join()
    assert len(told[1]) == 1
    assert told[1][0].startswith("1: save: write failed: rank 1 is lost: it lives, but has not got")
    left = ["1: promote: rank 1 died or fell silent during the save"] if has_tier else []
    assert told[0] == told[2] == left
    for step in (1, 2, 3):
        if (place := first / f"step-{step}").exists():
            assert dcp.verify(place).problems == ()
            with dcp.open(place) as checkpoint:
                assert all(torch.equal(checkpoint[n][...], v) for n, v in state(step).items())
    newest = dcp.latest(root)
    assert newest is not None
    assert newest.number == 3


def test_all_ranks_save_the_next_step(tmp_path: Path) -> None:
    cases = product((True, False), repeat=2)
    beside_each_other(
        check_that_all_save_the_next_step,
        [(tmp_path / str(number), *case) for number, case in enumerate(cases)],
    )
