"""``CheckpointManager`` on one rank: when it saves, what stays, what it goes on from."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import Best, CheckpointManager, Continuously, EveryMinutes, EverySteps, Keep
from dtckpt.checkpoint.runs.run import Run
from dtckpt.checkpoint.runs.upkeep import Upkeep
from dtckpt.errors import (
    AlreadyCommitted,
    Corrupt,
    LayoutMismatch,
    NotCommitted,
    StorageError,
    Unsavable,
)
from dtckpt.storage import Fault, FaultyStore, LocalStore, MemoryStore, RaiseError, Rule, Store


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value), "frozen": torch.ones(1000), "step": value}


def run(root: Any, steps: range, **options: Any) -> None:
    with CheckpointManager(root, **options) as manager:
        manager.restore_if_any(state(0))
        for step in steps:
            assert manager.save(step, state(step))


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def damage(root: Path, step: int) -> Path:
    """Flip a bit of the data of a checkpoint."""
    (path,) = (root / f"step-{step}" / "data").glob("*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("in_background", [True, False])
def test_saves_every_n_steps_and_restores_the_newest(tmp_path: Path, in_background: bool) -> None:
    asked: list[int] = []

    def give(step: int) -> dict[str, Any]:
        asked.append(step)
        return state(step)

    with CheckpointManager(tmp_path, when=EverySteps(3), in_background=in_background) as manager:
        saved = list(filter(lambda step: manager.save(step, lambda: give(step)), range(1, 11)))
        assert saved == asked == [3, 6, 9]
        assert manager.save(10, state(10), force=True)
        assert not manager.save(10, state(11), force=True)
        report = manager.wait()
        assert report is not None
        assert report.url == str(tmp_path / "step-10")
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == (3, 6, 9, 10)
        assert manager.latest() == 10
        got = state(0)
        assert "w" in manager.restore(got).loaded
        assert got["step"] == 10
        manager.restore(got, step=6)
        assert got["step"] == 6
        assert torch.equal(got["w"], state(6)["w"])


def test_any_of_several_rules_is_enough(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, when=[EverySteps(4), EverySteps(6)]) as manager:
        assert [n for n in range(1, 13) if manager.save(n, state(n))] == [4, 6, 8, 12]


def test_saves_by_the_clock(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, when=EveryMinutes(1e-9)) as manager:
        saved = [n for n in range(1, 7) if manager.save(n, state(n))]
    assert saved
    assert all(later - earlier >= 1 for earlier, later in pairwise(saved))
    with CheckpointManager(tmp_path / "b", when=EveryMinutes(60)) as manager:
        assert not any(manager.save(n, state(n)) for n in range(1, 7))


def test_saves_as_soon_as_the_last_one_is_durable(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, when=Continuously()) as manager:
        saved = []
        for step in range(1, 9):
            if manager.save(step, state(step)):
                saved.append(step)
            while manager.saving:
                time.sleep(0.001)
    assert len(saved) >= 3


def test_retention_deletes_what_no_rule_keeps(tmp_path: Path) -> None:
    run(tmp_path, range(1, 9), keep=Keep(last=2, every=3))
    assert [n for n in names(tmp_path) if not n.endswith(".json")] == [
        "step-3", "step-6", "step-7", "step-8",
    ]  # fmt: skip
    assert names(tmp_path) == sorted(
        f"step-{n}{end}" for n in (3, 6, 7, 8) for end in ("", ".json")
    )


def test_the_best_and_pinned_ones_stay(tmp_path: Path) -> None:
    best = Best(metric="loss")
    with CheckpointManager(tmp_path, keep=Keep(last=1, best=best)) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            manager.save(step, state(step), metrics={"loss": loss})
            if step == 3:
                manager.pin(3)
        manager.wait()
        assert manager.all_steps() == (2, 3, 4)
        assert manager.best() == 2
        manager.set_metrics(4, {"loss": 0.5})
        assert manager.best() == 4
        assert manager.best(Best(metric="loss", mode="max")) == 3
        assert manager.best(Best(metric="accuracy")) is None
        manager.pin(3, is_pinned=False)
        manager.save(5, state(5))
        manager.wait()
        assert manager.all_steps() == (4, 5)
        with pytest.raises(NotCommitted, match="no committed checkpoint of step 77; it has 4, 5"):
            manager.pin(77)


def test_bases_stay_while_others_refer_to_them_and_chains_end(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Keep(last=1), incremental=2) as manager:
        borrowed = []
        for step in range(1, 8):
            manager.save(step, state(step))
            report = manager.wait()
            assert report is not None
            borrowed.append(report.borrowed_bytes > 0)
            if step == 3:
                assert manager.all_steps() == (1, 3)
    assert borrowed == [False, True, True, False, True, True, False]
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == (7,)
        got = state(0)
        manager.restore(got)
    assert torch.equal(got["frozen"], torch.ones(1000))


def test_a_base_of_what_stays_for_long_is_cut_off(tmp_path: Path) -> None:
    keep = Keep(last=1, every=2)
    with CheckpointManager(tmp_path, keep=keep, incremental=2) as manager:
        for step in range(1, 5):
            manager.save(step, state(step), metrics={"x": step})
            manager.wait()
            if step == 3:
                assert manager.all_steps() == (1, 2, 3)  # 3 refers to 1 as well
        assert manager.all_steps() == (2, 4)
        assert manager.best(Best(metric="x")) == 2
        for step in (2, 4):
            assert not dcp.read_manifest(LocalStore(tmp_path / f"step-{step}")).borrowed
            assert not dcp.verify(tmp_path / f"step-{step}").problems
            got = state(0)
            manager.restore(got, step=step)
            assert torch.equal(got["w"], state(step)["w"])
            assert torch.equal(got["frozen"], torch.ones(1000))


def test_listing_costs_one_request_of_one_level(tmp_path: Path) -> None:
    run(tmp_path, range(1, 6))
    (tmp_path / "step-2.json").unlink()
    store = FaultyStore(LocalStore(tmp_path), [])
    manager = CheckpointManager(store)
    before = len(store.calls)
    assert manager.all_steps() == (1, 2, 3, 4, 5)
    asked = [(call.op, call.name) for call in store.calls[before:]]
    assert asked == [("list", ""), ("stat", "step-2/manifest.json")]
    assert [step.number for step in dcp.committed_steps(store)] == [1, 2, 3, 4, 5]
    assert len(store.calls) == before + 4


def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, range(1, 5))
    damaged = damage(tmp_path, 4)
    (lost,) = (tmp_path / "step-3" / "data").glob("*/*.safetensors")
    lost.unlink()
    with CheckpointManager(tmp_path) as manager:
        got = state(0)
        report = manager.restore(got)
        assert got["step"] == 2
        assert report.url == str(tmp_path / "step-2")
        assert set(report.passed_over) == {str(tmp_path / f"step-{n}") for n in (3, 4)}
        assert str(damaged) in report.passed_over[str(tmp_path / "step-4")]
        assert f"passed over {tmp_path / 'step-4'}" in str(report)
        with pytest.raises(Corrupt, match=str(damaged)):
            manager.restore(got, step=4)
        # From here another line begins; the old one is not gone back to.
        manager.restore(got)
        manager.save(3, state(30))
        manager.wait()
        assert manager.all_steps() == (1, 2, 3)
        manager.restore(got)
        assert got["step"] == 30
    assert "the run has gone back" in caplog.text


def test_going_back_by_choice_begins_another_line(tmp_path: Path) -> None:
    run(tmp_path, range(1, 6))
    with CheckpointManager(tmp_path, keep=Keep(last=2)) as manager:
        manager.restore(state(0), step=2)
        assert manager.latest() == 5  # nothing was saved yet
        manager.save(3, state(33), metrics={"x": 1})
        manager.wait()
        assert manager.all_steps() == (2, 3)
    with CheckpointManager(tmp_path) as manager:
        got = state(0)
        manager.restore(got)
        assert got["step"] == 33


def test_what_was_gone_back_from_stays_but_is_not_gone_on_from(tmp_path: Path) -> None:
    run(tmp_path, range(1, 6))
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state(0), step=2)
        manager.save(3, state(33))
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest() == 3
        assert manager.all_steps() == (1, 2, 3)
        got = state(0)
        manager.restore(got)
        assert got["step"] == 33
        manager.restore(got, step=5)  # by choice
        assert got["step"] == 5


def test_what_damage_has_overwritten_is_filled_or_told(tmp_path: Path) -> None:
    old = {"a": torch.ones(1 << 21)}
    new = {"a": torch.full((1 << 21,), 2.0), "b": torch.full((1 << 21,), 3.0)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, old)
        manager.save(2, new)
    (path,) = (tmp_path / "step-2" / "data").glob("*/*.safetensors")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - (1 << 20))
        file.write(b"damage")
    with CheckpointManager(tmp_path) as manager:
        got = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
        with pytest.raises(LayoutMismatch, match="b"):
            manager.restore(got, strict=False)
        del got["b"]
        report = manager.restore(got, strict=False)  # the damage is in what is not asked for
        assert torch.equal(got["a"], new["a"])
        assert report.url == str(tmp_path / "step-2")


def test_nothing_to_restore_is_an_error_unless_asked(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(NotCommitted, match="holds no checkpoint"):
            manager.restore(state(0))
        with pytest.raises(NotCommitted, match="no committed checkpoint of step 3; it has none"):
            manager.restore(state(0), step=3)
        assert manager.restore_if_any(state(0)) is None
        assert manager.latest() is manager.best(Best(metric="x")) is None
    run(tmp_path, range(1, 3))
    for step in (1, 2):
        damage(tmp_path, step)
    with pytest.raises(Corrupt, match=r"none of the checkpoints here can be loaded .*1, 2"):
        CheckpointManager(tmp_path).restore_if_any(state(0))
    denied = FaultyStore(MemoryStore(), [Rule(RaiseError(StorageError("denied")), op="list")])
    with pytest.raises(StorageError, match="denied"):
        CheckpointManager(denied).restore_if_any(state(0))


def test_a_run_that_begins_anew_by_mistake_overwrites_nothing(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 3):
            with pytest.raises(AlreadyCommitted, match=f"up to step 3.*to save step {step}"):
                manager.save(step, state(9))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(4, state(4))  # restored by other means
        with pytest.raises(ValueError, match="steps count up: 2 comes after 4"):
            manager.save(2, state(2))


def test_what_dead_saves_have_left_is_collected(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3))
    (data,) = (tmp_path / "step-2" / "data").glob("*/*.safetensors")
    dead = tmp_path / "step-3" / data.relative_to(tmp_path / "step-2")
    other = tmp_path / "notes" / "step-5"
    for path in (dead, other):
        path.parent.mkdir(parents=True)
        path.write_bytes(data.read_bytes())
    (tmp_path / "step-9.json").write_bytes((tmp_path / "step-2.json").read_bytes())
    (tmp_path / "step-1.json").unlink()
    run(tmp_path, range(6, 7))
    assert dead.exists()  # a save may still be at it
    time.sleep(0.01)
    run(tmp_path, range(7, 8), leftovers_after=timedelta(seconds=0.01))
    assert CheckpointManager(tmp_path).all_steps() == (1, 2, 6, 7)
    assert names(tmp_path) == sorted(
        ["notes", *(f"step-{n}{end}" for n in (1, 2, 6, 7) for end in ("", ".json"))]
    )
    assert other.exists()


def test_what_is_saved_while_leftovers_are_collected_stays(tmp_path: Path) -> None:
    run(tmp_path, range(1, 2))

    class Saved(Fault):
        def before(self) -> None:
            run(tmp_path, range(3, 4))

    (tmp_path / "step-3").mkdir()
    rules = [Rule(Saved(), op="list", name="step-3", nth=1)]
    store = FaultyStore(LocalStore(tmp_path), rules)
    Upkeep(run=Run(store), keep=Keep(), leftovers_after=timedelta(0)).collect()
    assert CheckpointManager(tmp_path).latest() == 3


def failing_at(root: Path, step: int, **options: Any) -> Store:
    rule = Rule(RaiseError(StorageError("no space left")), op="create", name=f"step-{step}/*")
    return FaultyStore(LocalStore(root), [rule])


@pytest.mark.parametrize("in_background", [True, False])
def test_a_failed_save_is_told_and_the_next_one_is_whole(
    tmp_path: Path, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = failing_at(tmp_path, 2)
    with CheckpointManager(
        store, on_failure="warn", in_background=in_background, incremental=9
    ) as manager:
        for step in range(1, 5):
            manager.save(step, state(step))
        manager.wait()
        ((failed, error),) = manager.failures
        assert failed == 2
        assert "no space left" in str(error)
        assert manager.all_steps() == (1, 3, 4)
    assert "the save of step 2 failed, and the run goes on without it" in caplog.text
    for step in (1, 3, 4):
        assert not dcp.verify(tmp_path / f"step-{step}").problems


def test_a_save_is_made_elsewhere_where_the_root_fails(tmp_path: Path) -> None:
    store = failing_at(tmp_path / "a", 2)
    options: dict[str, Any] = {"elsewhere": [tmp_path / "b"], "incremental": 9}
    with CheckpointManager(store, **options) as manager:
        for step in range(1, 4):
            assert manager.save(step, state(step))
            report = manager.wait()
            assert report is not None
            assert bool(report.bases) is False
            assert manager.all_steps() == tuple(range(1, step + 1))
            if step == 2:
                assert report.url == str(tmp_path / "b" / "step-2")
                assert manager.latest() == 2
        assert not manager.failures
    assert names(tmp_path / "a") == ["step-1", "step-1.json", "step-3", "step-3.json"]
    assert names(tmp_path / "b") == ["step-2", "step-2.json"]
    with CheckpointManager(tmp_path / "a", keep=Keep(last=1), **options) as manager:
        got = state(0)
        manager.restore(got, step=2)
        assert got["step"] == 2
        assert manager.save(3, state(33))
        manager.wait()
        manager.restore(got)
        assert got["step"] == 33
        manager.save(4, state(4))
        manager.wait()
        # The newest of each place stays, since the other place may fail.
        assert manager.all_steps() == (2, 4)


def test_a_failed_save_raises_at_the_next_call(tmp_path: Path) -> None:
    manager = CheckpointManager(failing_at(tmp_path, 1))
    assert manager.save(1, state(1))
    with pytest.raises(StorageError, match="no space left"):
        manager.save(2, state(2))
    assert manager.save(2, state(2))
    manager.close()
    assert [step.number for step in dcp.committed_steps(tmp_path)] == [2]


def test_a_state_that_cannot_be_saved_raises_in_any_case(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, on_failure="warn") as manager:
        with pytest.raises(Unsavable):
            manager.save(1, {"x": object()})
        with pytest.raises(dcp.CheckpointError, match="no state today"):
            manager.save(1, no_state)
        assert manager.save(1, state(1))


def no_state() -> dict[str, Any]:
    raise Unsavable("no state today")


def test_leaving_by_an_error_keeps_it_and_the_save(tmp_path: Path) -> None:
    def leave(root: Any) -> None:
        with CheckpointManager(root) as manager:
            manager.save(1, state(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        leave(tmp_path)
    assert [step.number for step in dcp.committed_steps(tmp_path)] == [1]
    with pytest.raises(KeyError) as caught:
        leave(failing_at(tmp_path / "b", 1))
    assert "no space left" in caught.value.__notes__[0]


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield


def test_a_damaged_newest_one_is_not_all_that_stays(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5))
    (data,) = (tmp_path / "step-4" / "data").glob("*/*.safetensors")
    data.unlink()
    (tmp_path / "step-1" / "manifest.json").write_bytes(b"{")
    (tmp_path / "step-1.json").unlink()
    upkeep = Upkeep(
        run=Run(LocalStore(tmp_path)), keep=Keep(last=1), leftovers_after=timedelta(days=1)
    )
    upkeep.retain()
    # What is damaged is left for people to look at, and keeps nothing else from going.
    assert CheckpointManager(tmp_path).all_steps() == (1, 3, 4)
    for step in (3, 4):
        (tmp_path / f"step-{step}" / "manifest.json").write_bytes(b"{")
    upkeep.retain()
    assert CheckpointManager(tmp_path).all_steps() == (1, 3, 4)


def test_a_line_goes_on_after_going_back(tmp_path: Path) -> None:
    run(tmp_path, range(1, 9))
    for keep in (Keep(), Keep(last=2)):
        with CheckpointManager(tmp_path, keep=keep) as manager:
            manager.restore(state(0), step=2)
            for step in range(3, 8):
                assert manager.save(step, state(10 * step), metrics={"x": step})
            manager.wait()
            assert manager.latest() == 7
            assert manager.best(Best(metric="x")) == 3 if keep.is_all else 6
            got = state(0)
            manager.restore(got)
            assert got["step"] == 70
        if keep.is_all:
            # A second life goes back to where the first one has gone back from.
            assert CheckpointManager(tmp_path).all_steps() == tuple(range(1, 8))


def test_a_mark_that_is_left_over_is_not_of_the_next_one(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    (tmp_path / "step-5.abandoned").touch()
    with CheckpointManager(tmp_path, keep=Keep(last=2)) as manager:
        manager.restore(state(0))
        manager.save(4, state(4))
        manager.save(5, state(5))
        manager.wait()
        assert manager.all_steps() == (4, 5)


def test_a_mark_that_cannot_be_set_fails_the_save(tmp_path: Path) -> None:
    run(tmp_path, range(1, 9))
    dead = Rule(RaiseError(StorageError("503")), op="publish", name="*.abandoned", nth=1)
    store = FaultyStore(LocalStore(tmp_path), [dead])
    with CheckpointManager(store, keep=Keep(last=1), on_failure="warn") as manager:
        manager.restore(state(0), step=4)
        assert not manager.save(5, state(55))
        assert manager.save(6, state(66))
        manager.wait()
        assert manager.all_steps() == (6,)
        got = state(0)
        manager.restore(got)
        assert got["step"] == 66


def test_a_pinned_checkpoint_does_not_make_way(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5))
    with CheckpointManager(tmp_path) as manager:
        manager.pin(4)
        manager.restore(state(0), step=2)
        manager.save(3, state(33))
        with pytest.raises(AlreadyCommitted, match=r"step-4.*is pinned"):
            manager.save(4, state(44))
        assert manager.save(5, state(55))
        manager.wait()
        assert manager.all_steps() == (1, 2, 3, 5)
        got = state(0)
        manager.restore(got, step=4)
        assert got["step"] == 4
        manager.restore(got, step=3)
        manager.pin(4, is_pinned=False)  # as the error says
        assert manager.save(4, state(44))
        manager.wait()
        manager.restore(got)
        assert (got["step"], manager.all_steps()) == (44, (1, 2, 3, 4))


@pytest.mark.parametrize("keep", [Keep(), Keep(last=2)])
def test_going_back_in_a_chain_of_increments(tmp_path: Path, keep: Keep) -> None:
    def slow(step: int) -> dict[str, Any]:
        return state(step) | {"slow": torch.full((500,), step // 3)}

    run(tmp_path, range(1, 9), incremental=3)
    with CheckpointManager(tmp_path, incremental=3, keep=keep) as manager:
        manager.restore(state(0), step=4)
        for step in (5, 6, 7):
            assert manager.save(step, slow(step))
        manager.wait()
        steps = manager.all_steps()
        assert steps[-2:] == (6, 7)
        manager.restore(slow(0))
    for step in steps:
        assert not dcp.verify(tmp_path / f"step-{step}").problems


def test_a_run_that_was_not_restored_keeps_what_was_there(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    with CheckpointManager(tmp_path, keep=Keep(last=1)) as manager:
        for step in (7, 8, 9):
            manager.save(step, state(step))
        manager.wait()
        assert manager.all_steps() == (1, 2, 3, 9)


def test_a_base_of_what_was_not_restored_stays_as_well(tmp_path: Path) -> None:
    run(tmp_path, range(1, 3), incremental=2)
    with CheckpointManager(tmp_path, keep=Keep(last=1)) as manager:
        manager.pin(2)
        manager.save(7, state(7))
        manager.wait()
        assert manager.all_steps() == (1, 2, 7)
    assert dcp.read_manifest(LocalStore(tmp_path / "step-2")).borrowed


@pytest.mark.parametrize("when", [Continuously(), EveryMinutes(1e-9)])
def test_the_clock_goes_on_asking_after_a_failure(tmp_path: Path, when: Any) -> None:
    rule = Rule(RaiseError(StorageError("no")), op="create", nth=1)
    store = FaultyStore(LocalStore(tmp_path), [rule])
    with CheckpointManager(store, when=when, on_failure="warn") as manager:
        for step in range(1, 30):
            manager.save(step, state(step))
            while manager.saving:
                time.sleep(0.001)
        assert len(manager.failures) == 1
        manager.wait()
        assert len(manager.all_steps()) > 3


def test_steps_and_metrics_that_are_none_are_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (-1, 1.5, True, "1", None):
        with pytest.raises(ValueError, match="whole number from 0 on"):
            manager.save(step, state(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="metrics are numbers"):
        manager.save(1, state(1), metrics={"loss": "low"})  # pyright: ignore[reportArgumentType]
    assert manager.save(np.int64(0), state(1), metrics={"loss": torch.tensor(1.5)})  # pyright: ignore[reportArgumentType]
    manager.wait()
    assert (manager.all_steps(), manager.best(Best(metric="loss"))) == ((0,), 0)
    manager.close()
    with pytest.raises(dcp.CheckpointError, match="closed"):
        manager.save(2, state(2))
    manager.wait()


def test_steps_that_are_passed_over_are_saved_at_the_next_call(tmp_path: Path) -> None:
    class At5:
        def is_step(self, step: int) -> bool:
            return step == 5

        def is_time(self, since_last: float, *, is_durable: bool) -> bool:
            return False

    calls = (2, 4, 5, 7, 10, 11, 12, 100_000)
    with CheckpointManager(tmp_path / "a", when=EverySteps(3)) as manager:
        assert [n for n in calls if manager.save(n, state(n))] == [4, 7, 10, 12, 100_000]
    with CheckpointManager(tmp_path / "b", when=At5()) as manager:
        assert [n for n in (2, 4, 7, 9, 100_000) if manager.save(n, state(n))] == [7]
    with CheckpointManager(tmp_path / "a", when=EverySteps(3)) as manager:
        manager.restore(state(0), step=4)
        assert not manager.save(5, state(5))
        assert manager.save(7, state(7))
