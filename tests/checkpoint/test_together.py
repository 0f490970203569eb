"""Ranks fail together: whatever goes wrong on one of them, all raise the same error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.ranks.text import ranks_text
from dtckpt.checkpoint.ranks.together import ranks_of, together
from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    LayoutMismatch,
    StorageError,
    Unsavable,
)
from dtckpt.storage import (
    Fault,
    FaultyStore,
    LocalStore,
    MemoryStore,
    RaiseError,
    Rule,
    Store,
    TornWrite,
)

from ..ranks import RanksFailed, run_ranks

SIZE = 3


class Unprintable(Exception):
    """An exception that can be neither pickled nor printed."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no text")


def same_error(body: Callable[[int, Any], Any]) -> CheckpointError:
    """Run ranks that must all raise, and return their common error."""
    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, body)
    errors = list(failure.value.errors.values())
    assert len(errors) == SIZE, "every rank raised"
    assert len({type(error) for error in errors}) == 1
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], CheckpointError)
    return errors[0]


def record_answers(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    """Have the length of every answer that a rank gives appended to a list."""
    consult = GroupRanks.consult

    def count(self: GroupRanks, answer: bytes, *args: Any, **options: Any) -> bytes:
        lengths.append(len(answer) - 1)  # without the byte that says that all is well
        return consult(self, answer, *args, **options)

    monkeypatch.setattr(GroupRanks, "consult", count)


def state(value: float = 1.0) -> dict[str, Any]:
    """A state with something to write for every rank."""
    return {f"t{i}": torch.full((50,), value) for i in range(2 * SIZE)} | {"step": value}


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize(
    ("op", "phase"),
    [("create", "write"), ("write", "write"), ("close", "write"), ("publish", "commit")],
)
def test_a_storage_error_of_one_rank_reaches_all(victim: int, op: str, phase: str) -> None:
    store = MemoryStore()
    dcp.save(state(), store.substore("step-1"))
    broken = Rule(RaiseError(StorageError("disk on fire")), op=op)

    def body(rank: int, group: Any) -> None:
        mine = FaultyStore(store.substore("new"), [broken] if rank == victim else [])
        dcp.save(state(), mine, process_group=group)

    if op == "publish" and victim != 0:
        run_ranks(SIZE, body)  # only the coordinator publishes
        return
    error = same_error(body)
    assert isinstance(error, StorageError)
    assert f"save: {phase} failed on rank {victim}" in str(error)
    assert "disk on fire" in str(error)
    assert [step.number for step in dcp.committed_steps(store)] == [1]
    assert not store.exists("new/manifest.json")
    if phase == "write":
        assert list(store.list("new")) == [], "nothing is left behind"
    into = state(0.0)
    dcp.load(into, store.substore("step-1"))
    assert into["t0"].tolist() == [1.0] * 50
    dcp.save(state(), store.substore("new"))  # and the next save works


@pytest.mark.parametrize("victim", [0, SIZE - 1])
@pytest.mark.parametrize("raised", [ValueError("bad"), Unprintable(), MemoryError()])
def test_an_exception_of_a_user_callback_reaches_all(victim: int, raised: Exception) -> None:
    class Component:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            if self.rank == victim:
                raise raised
            return {}

        def load_state_dict(self, _: object) -> None:
            if self.rank == victim:
                raise raised

    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        dcp.save({"c": Component(rank), "t": torch.ones(3)}, store, process_group=group)

    error = same_error(save)
    assert f"save: plan failed on rank {victim}: {type(raised).__name__}" in str(error)
    assert list(store.list()) == []


def test_an_exception_of_load_state_dict_reaches_all() -> None:
    store = MemoryStore()
    dcp.save({"c": {"x": 1}}, store)

    class Component:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            return {"x": 0}

        def load_state_dict(self, _: object) -> None:
            if self.rank == 1:
                raise KeyError("x")

    error = same_error(lambda r, g: dcp.load({"c": Component(r)}, store, process_group=g))
    assert "load: restore failed on rank 1: KeyError" in str(error)


def test_an_interrupt_is_told_to_the_others_and_raised_as_it_is() -> None:
    def body(rank: int, group: Any) -> None:
        def work() -> bytes:
            if rank == 1:
                raise KeyboardInterrupt
            return b""

        together(ranks_of(group), "phase", work)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, body)
    kinds = {rank: type(error) for rank, error in failure.value.errors.items()}
    assert kinds == {0: CheckpointError, 1: KeyboardInterrupt, 2: CheckpointError}


def test_several_failures_are_all_named() -> None:
    def body(rank: int, group: Any) -> None:
        def work() -> bytes:
            raise Unsavable("odd" if rank == 1 else "even")

        together(ranks_of(group), "phase", work)

    error = same_error(body)
    assert isinstance(error, Unsavable)
    assert "failed on ranks 0, 2: even" in str(error)
    assert "failed on rank 1: odd" in str(error)


def test_the_coordinator_decides_on_answers_of_any_length() -> None:
    def body(rank: int, group: Any) -> bytes:
        def decide(answers: Mapping[int, bytes]) -> bytes:
            assert list(answers) == list(range(SIZE))
            return b"|".join(answers.values())

        answer = bytes([rank]) * (100_000 * rank)
        return together(ranks_of(group), "phase", lambda: answer, decide)

    expected = b"|".join(bytes([rank]) * (100_000 * rank) for rank in range(SIZE))
    assert run_ranks(SIZE, body) == [expected] * SIZE
    assert run_ranks(2, lambda _, g: together(ranks_of(g), "x", lambda: b"")) == [b""] * 2


@pytest.mark.parametrize("raised", [Unsavable("no"), KeyboardInterrupt()])
def test_a_decision_that_fails_reaches_all(raised: BaseException) -> None:
    def body(_: int, group: Any) -> None:
        def decide(_: Mapping[int, bytes]) -> bytes:
            raise raised

        together(ranks_of(group), "phase", lambda: b"", decide)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, body)
    errors = failure.value.errors
    expected = Unsavable if isinstance(raised, Unsavable) else CheckpointError
    assert isinstance(errors[0], type(raised))
    assert [type(errors[rank]) for rank in (1, 2)] == [expected] * 2
    assert "phase failed on rank 0" in str(errors[1])


def test_a_committed_checkpoint_is_not_touched_without_leave() -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    before = {info.name: store.read(info.name) for info in store.list()}
    error = same_error(lambda _, g: dcp.save(state(2.0), store, process_group=g))
    assert isinstance(error, AlreadyCommitted)
    assert "overwrite=True" in str(error)
    assert {info.name: store.read(info.name) for info in store.list()} == before
    run_ranks(SIZE, lambda _, g: dcp.save(state(2.0), store, process_group=g, overwrite=True))
    into = state(0.0)
    dcp.load(into, store)
    assert into["t0"][0] == 2.0
    assert not {i.name for i in store.list("data")} & set(before), "old files are gone"


@pytest.mark.parametrize("moment", ["close", "publish"])
def test_an_overwrite_leaves_the_files_of_a_save_under_way_alone(moment: str) -> None:
    store = MemoryStore()
    dcp.save(state(), store)

    published: list[bool] = []

    class OtherJob(Fault):
        """Another job commits to the same place before this one begins to, or while it does."""

        def before(self) -> None:
            published.append(True)
            dcp.save(state(2.0), store, overwrite=True)

    faulty = FaultyStore(store, [Rule(OtherJob(), op=moment)])
    if moment == "close":
        dcp.save(state(3.0), faulty, overwrite=True)
    else:  # each believed to replace the same one: only one of them may
        with pytest.raises(AlreadyCommitted, match="another save committed"):
            dcp.save(state(3.0), faulty, overwrite=True)
    assert published
    into = state(0.0)
    dcp.load(into, store)
    assert into["t0"][0] == (3.0 if moment == "close" else 2.0)
    assert len(list(store.list())) == 2, "a manifest and its file"


def test_a_failed_overwrite_leaves_the_old_checkpoint() -> None:
    store = MemoryStore()
    dcp.save(state(), store)
    torn = FaultyStore(store, [Rule(TornWrite(OSError("full"), 3), op="write", nth=1)])
    with pytest.raises(CheckpointError, match="full"):
        dcp.save(state(2.0), torn, overwrite=True)
    into = state(0.0)
    dcp.load(into, store)
    assert into["t0"][0] == 1.0


def test_two_saves_race_for_one_path() -> None:
    """One wins, the other learns of it, and what is there is one of them as a whole."""
    for _ in range(10):
        store = MemoryStore()
        barrier = threading.Barrier(2)
        results: list[float | type] = []

        class Slow:
            def state_dict(self, wait: threading.Barrier = barrier) -> dict[str, Any]:
                wait.wait(10)
                return {}

            def load_state_dict(self, _: object) -> None:
                raise NotImplementedError

        def job(value: float, target: Store = store, done: list[Any] = results) -> None:
            try:
                dcp.save(state(value) | {"slow": Slow()}, target)
                done.append(value)
            except AlreadyCommitted as error:
                done.append(type(error))

        threads = [threading.Thread(target=job, args=(v,)) for v in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        winners = [r for r in results if isinstance(r, float)]
        assert len(winners) == 1
        assert AlreadyCommitted in results
        into = state(0.0)
        dcp.load(into, store, strict=False)
        assert {float(t[0]) for n, t in into.items() if n != "step"} == {winners[0]}


def test_plain_tensors_and_values_must_agree() -> None:
    store = MemoryStore()

    def tensors(rank: int, group: Any) -> None:
        dcp.save({"t": torch.tensor(float(rank > 0))}, store, process_group=group)

    error = same_error(tensors)
    assert isinstance(error, LayoutMismatch)
    assert "'t' has different values on rank 0 and ranks 1-2" in str(error)

    def values(rank: int, group: Any) -> None:
        dcp.save({"a": {"step": 3 + (rank == 2)}}, store, process_group=group)

    error = same_error(values)
    assert "value 'a/step' differs between ranks: 3 on ranks 0-1, 4 on rank 2" in str(error)
    assert list(store.list()) == []


def test_shapes_must_agree() -> None:
    store = MemoryStore()
    error = same_error(
        lambda r, g: dcp.save({"t": torch.ones(2 + (r == 1))}, store, process_group=g)
    )
    assert "float32[2] on ranks 0, 2 but float32[3] on rank 1" in str(error)


def test_what_ranks_keep_for_themselves_comes_back_to_them() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        mine = {"rng": dcp.PerRank({"state": torch.full((4,), rank), "n": rank}), "shared": 1}
        dcp.save(mine, store, process_group=group)

    def load(rank: int, group: Any) -> tuple[int, int]:
        into = {
            "rng": dcp.PerRank({"state": torch.zeros(4, dtype=torch.int64), "n": -1}),
            "shared": 0,
        }
        dcp.load(into, store, process_group=group)
        inner: Any = into["rng"]
        return int(inner.value["state"][0]), inner.value["n"]

    run_ranks(SIZE, save)
    assert run_ranks(SIZE, load) == [(0, 0), (1, 1), (2, 2)]

    def load_more(rank: int, group: Any) -> None:
        into = {
            "rng": dcp.PerRank({"state": torch.zeros(4, dtype=torch.int64), "n": -1}),
            "shared": 0,
        }
        dcp.load(into, store, process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE + 1, load_more)
    assert "failed on rank 3" in str(failure.value.errors[0])
    assert "Missing in the checkpoint: rng/@3. " in str(failure.value.errors[0])
    assert 'new_rank="keep"' in str(failure.value.errors[0])

    def load_and_keep(rank: int, group: Any) -> tuple[int, dcp.LoadReport]:
        own: Any = {"state": torch.zeros(4, dtype=torch.int64), "n": -1}
        into: dict[str, Any] = {"rng": dcp.PerRank(own, new_rank="keep"), "shared": 0}
        report = dcp.load(into, store, process_group=group)
        return into["rng"].value["n"], report

    found = run_ranks(SIZE + 1, load_and_keep)
    assert [value for value, _ in found] == [0, 1, 2, -1]
    assert [report.kept for _, report in found] == [(), (), (), ("rng/@3",)]
    wanted: Any = "copy"
    with pytest.raises(ValueError, match="expected 'error' or 'keep'"):
        dcp.PerRank(1, new_rank=wanted)


def test_ranks_with_different_parts_of_the_state() -> None:
    """Pipeline stages: every rank has its own layers, all share the rest."""
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        model = {f"layer{rank}": torch.full((3,), float(rank)), f"opt{rank}": rank}
        dcp.save({"model": model, "step": 7}, store, process_group=group)

    run_ranks(SIZE, save)
    into: dict[str, Any] = {
        "model": {f"layer{r}": torch.zeros(3) for r in range(SIZE)}
        | {f"opt{r}": None for r in range(SIZE)},
        "step": 0,
    }
    dcp.load(into, store)
    assert [float(into["model"][f"layer{r}"][0]) for r in range(SIZE)] == [0.0, 1.0, 2.0]
    assert into["step"] == 7

    def load(rank: int, group: Any) -> dcp.LoadReport:
        own = SIZE - 1 - rank
        model = {f"layer{own}": torch.zeros(3), f"opt{own}": None}
        report = dcp.load({"model": model, "step": 0}, store, process_group=group)
        assert model[f"layer{own}"].tolist() == [own] * 3  # pyright: ignore[reportOptionalMemberAccess]
        return report

    for report in run_ranks(SIZE, load):
        assert report.unexpected == ()


def test_a_subgroup_may_save_alone() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        if rank == 0:
            dcp.save({"x": torch.ones(2)}, store, no_dist=True)

    run_ranks(2, body)
    assert dcp.open(store)["x"][...].tolist() == [1, 1]


def test_latest_is_the_newest_committed_step_for_all_ranks() -> None:
    store = MemoryStore()
    assert dcp.latest(store) is None
    for step in (5, 10, 9):
        dcp.save({"step": step}, store.substore(f"step-{step}"))
    with store.create("step-11/data/x/00000.safetensors", 3) as stream:
        stream.write(b"abc")
    found = run_ranks(2, lambda _, g: dcp.latest(store, process_group=g))
    assert [step.number for step in found if step] == [10, 10]
    assert [step.number for step in dcp.committed_steps(store)] == [5, 9, 10]
    store.publish("step-12/manifest.json", b"{", overwrite=False)
    newest = dcp.latest(store)
    assert newest is not None
    assert newest.number == 10, "a damaged manifest is passed over"


def test_ranks_read_well_in_messages() -> None:
    assert ranks_text([7, 0, 1, 2]) == "ranks 0-2, 7"
    assert ranks_text([4]) == "rank 4"
    assert ranks_text([4, 6]) == "ranks 4, 6"


def test_a_failed_save_leaves_no_trace_on_disk(tmp_path: Path) -> None:
    broken = Rule(RaiseError(StorageError("disk on fire")), op="close")
    with pytest.raises(StorageError, match="on fire"):
        dcp.save(state(), FaultyStore(LocalStore(tmp_path), [broken]))
    assert list(tmp_path.iterdir()) == []


def test_values_that_only_look_equal_are_told_apart() -> None:
    store = MemoryStore()
    for one, other in ((1, True), (0.0, -0.0), (2, 2.0)):
        error = same_error(
            lambda r, g, one=one, other=other: dcp.save(
                {"x": [one if r == 0 else other]}, store, process_group=g
            )
        )
        assert "value 'x/0' differs" in str(error)


def test_a_rank_without_its_group_still_gets_its_own_values() -> None:
    store = MemoryStore()
    run_ranks(SIZE, lambda r, g: dcp.save({"s": dcp.PerRank({"seed": r})}, store, process_group=g))
    into: dict[str, Any] = {"s": dcp.PerRank({"seed": -1})}
    report = dcp.load(into, store)
    assert into["s"].value == {"seed": 0}
    assert report.dropped == ("s/@1/seed", "s/@2/seed")


def test_what_ranks_keep_for_themselves_does_not_cost_their_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the values of each rank are exchanged, not the description of all tensors."""
    sent: list[int] = []
    record_answers(monkeypatch, sent)

    def save(rank: int, group: Any) -> None:
        state = {f"layer{i}": torch.ones(3) for i in range(500)}
        dcp.save(state | {"seed": dcp.PerRank(rank)}, store, process_group=group)

    store = MemoryStore()
    run_ranks(2, save)
    assert max(sent) < 1000


def test_a_stage_without_state_yet_beside_one_with_it() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        state: dict[int, Any] = {5: {"step": rank}} if rank else {}
        dcp.save({"state": state}, store, process_group=group)

    run_ranks(2, save)
    assert dcp.open(store).state_dict() == {"state": {5: {"step": 1}}}


def test_names_are_not_exchanged_where_all_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    tensors = {f"layer{i}": torch.ones(1) for i in range(300)}
    dcp.save(tensors, store)
    sent: list[int] = []
    record_answers(monkeypatch, sent)
    run_ranks(
        2,
        lambda r, g: dcp.load({name: torch.zeros(1) for name in tensors}, store, process_group=g),
    )
    manifest = len(store.read("manifest.json"))
    assert sorted(sent)[-2] < 100 < manifest
