"""What a process that died has left in a tier alone is brought to the root by the next one."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import Best, CheckpointManager, EverySteps, Keep, Tier
from dtckpt.storage import Call, Fault, FaultyStore, LocalStore

from ...ranks import run_ranks
from .test_tiers import Gate, state, steps, value_of
from .test_tiers_ranks import shards

RARELY = EverySteps(1000)


def train(root: Path, fast: Path, last: int, **options: Any) -> None:
    """Save some steps, all of which come to the root."""
    tiers = [Tier(fast, keep=Keep(last=10))]
    with CheckpointManager(root, tiers=tiers, **options) as manager:
        for step in range(1, last + 1):
            manager.save(step, state(step), metrics={"loss": step}, force=True)


def lose(root: Path, *numbers: int) -> None:
    """Have a place look as if the process had died before these steps came to it."""
    for number in numbers:
        shutil.rmtree(root / f"step-{number}")
        (root / f"step-{number}.json").unlink()


@pytest.mark.parametrize("in_background", [True, False])
def test_what_was_restored_comes_to_the_root_before_anything_is_saved(
    tmp_path: Path, in_background: bool
) -> None:
    root, fast = tmp_path / "root", tmp_path / "fast"
    train(root, fast, 3)
    lose(root, 2, 3)
    with CheckpointManager(
        root, tiers=[Tier(fast)], when=RARELY, in_background=in_background
    ) as manager:
        manager.restore(state(0))
        for step in (4, 5):
            assert not manager.save(step, state(step))
        manager.wait()
        assert steps(root) == [1, 3]
        assert manager.failures == ()
    assert dcp.verify(root / "step-3").problems == ()
    with CheckpointManager(root) as manager:  # its record has come, too
        assert manager.best(Best(metric="loss", mode="max")) == 3


def test_who_only_restores_writes_nothing(tmp_path: Path) -> None:
    root, fast = tmp_path / "root", tmp_path / "fast"
    train(root, fast, 2)
    lose(root, 2)
    before = sorted(tmp_path.rglob("*"))
    with CheckpointManager(root, tiers=[Tier(fast)]) as manager:
        assert manager.restore(state(0)).url == str(fast / "step-2")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_the_root_has_is_not_brought_again(tmp_path: Path) -> None:
    root, fast = tmp_path / "root", tmp_path / "fast"
    train(root, fast, 2)
    store = FaultyStore(LocalStore(root))
    with CheckpointManager(store, tiers=[Tier(fast)], when=RARELY) as manager:
        manager.restore(state(0))
        manager.save(3, state(3))
        manager.wait()
    assert not [call for call in store.calls if call.op in ("create", "publish")]


def test_no_save_waits_for_it(tmp_path: Path) -> None:
    root, fast = tmp_path / "root", tmp_path / "fast"
    train(root, fast, 2)
    lose(root, 2)
    gate = Gate()

    def plan(call: Call) -> Fault | None:
        return gate if call.op == "create" and call.name.startswith("step-2/") else None

    with CheckpointManager(FaultyStore(LocalStore(root), plan), tiers=[Tier(fast)]) as manager:
        manager.restore(state(0))
        assert manager.save(3, state(3))
        assert manager.saving is None or manager.saving.result(60)
        assert gate.met.wait(30)
        assert steps(fast)[-2:] == [2, 3]
        assert steps(root) == [1]
        gate.opened.set()
    assert steps(root) == [1, 2, 3]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_a_run_goes_back_to_stays_until_it_has_gone_on(
    tmp_path: Path, is_damaged: bool
) -> None:
    """Though a later step counts as the newest until something is saved."""
    root, fast = tmp_path / "root", tmp_path / "fast"
    train(root, fast, 3)
    lose(root, 2)
    if is_damaged:
        for place in (root, fast):
            (path,) = place.glob("step-3/data/*/*")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    keep = Keep(last=1)
    with CheckpointManager(root, tiers=[Tier(fast, keep)], keep=keep, when=RARELY) as manager:
        got = state(0)
        manager.restore(got, step=None if is_damaged else 2)
        assert got["step"] == 2
        manager.save(3, state(3))
        manager.wait()
        for place in (root, fast):
            assert value_of(place / "step-2") == 2
        assert steps(root) == [2, 3]
        manager.save(4, state(104), force=True)
    assert steps(root) == steps(fast) == [4]


def test_what_is_gone_on_with_is_not_collected(tmp_path: Path) -> None:
    """Files that a promotion that died has brought are old, and needed."""
    root, fast = tmp_path / "root", tmp_path / "fast"
    train(root, fast, 2)
    lose(root, 2)
    shutil.copytree(fast / "step-2" / "data", root / "step-2" / "data")
    gate = Gate()

    def plan(call: Call) -> Fault | None:
        return gate if call.op == "publish" and call.name == "step-2/manifest.json" else None

    store = FaultyStore(LocalStore(root), plan)
    with CheckpointManager(
        store, tiers=[Tier(fast)], when=RARELY, leftovers_after=timedelta(0)
    ) as manager:
        manager.restore(state(0))
        assert not manager.save(3, state(3))
        assert gate.met.wait(30)
        assert manager.save(4, state(4), force=True)  # which has leftovers collected
        manager.all_steps()  # which waits for that
        gate.opened.set()
        manager.wait()
        assert manager.failures == ()
    assert value_of(root / "step-2") == 2
    assert dcp.verify(root / "step-2").problems == ()


def test_another_number_of_ranks_brings_it(tmp_path: Path) -> None:
    root, fast = tmp_path / "root", tmp_path / "fast"

    def three(rank: int, group: dist.ProcessGroup) -> None:
        with CheckpointManager(root, tiers=[Tier(fast)], process_group=group) as manager:
            for step in (1, 2):
                manager.save(step, shards(group, rank, step), force=True)

    def two(rank: int, group: dist.ProcessGroup) -> list[str]:
        store = FaultyStore(LocalStore(root))
        with CheckpointManager(
            store, tiers=[Tier(fast)], process_group=group, when=RARELY
        ) as manager:
            got = shards(group, rank, 0)
            manager.restore(got)
            manager.save(3, got)
            manager.wait()
            assert manager.failures == ()
        return sorted({call.name[-17:] for call in store.calls if call.op == "create"})

    run_ranks(3, three)
    lose(root, 2)
    assert run_ranks(2, two) == [
        ["00000.safetensors", "00002.safetensors"],
        ["00001.safetensors"],
    ]
    assert dcp.verify(root / "step-2").problems == ()
    assert torch.equal(dcp.open(root / "step-2")["w"][:], dcp.open(fast / "step-2")["w"][:])
