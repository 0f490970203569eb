"""What ranks say to each other before a save: little, and nothing twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.ranks.group_ranks import GroupRanks
from dtckpt.checkpoint.saving import agreeing
from dtckpt.checkpoint.saving.agreeing import PlanMemory, SharedPlan
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks

SIZE = 3

module: Any = agreeing  # its imports are looked at and replaced


class Ear:
    """Hears the length of every answer and the phase in which plans are merged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: dict[int, list[int]] = {}
        consult = GroupRanks.consult

        def listen(ranks: GroupRanks, answer: bytes, *args: Any, **options: Any) -> bytes:
            self.lengths.setdefault(ranks.rank, []).append(len(answer) - 1)
            return consult(ranks, answer, *args, **options)

        monkeypatch.setattr(GroupRanks, "consult", listen)

    def before_writing(self, rank: int) -> list[int]:
        """Return the lengths of a rank's answers up to those that report files, and forget them."""
        found = self.lengths.pop(rank)
        return found[:-2]


def stage(rank: int, width: int = 4) -> dict[str, Any]:
    """The state of one stage of a pipeline."""
    return {"model": {f"layer{rank}": torch.full((width,), float(rank))}, "step": 5}


def test_equal_ranks_say_sixteen_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ear, store = Ear(monkeypatch), MemoryStore()

    def body(rank: int, group: Any) -> None:
        for step in range(3):
            state = {"w": torch.full((4,), float(step)), "step": step}
            dcp.save(state, store.substore(str(step)), process_group=group)
            assert ear.before_writing(rank) == [16]

    run_ranks(SIZE, body)
    assert dcp.open(store.substore("2"))["w"][...].tolist() == [2.0] * 4


def test_stages_speak_once_and_then_say_only_that_nothing_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ear, store = Ear(monkeypatch), MemoryStore()
    gate = threading.Barrier(SIZE)

    def body(rank: int, group: Any) -> list[list[int]]:
        heard: list[list[int]] = []
        for step in range(3):
            state = stage(rank)["model"]
            if step == 2 and rank == 1:
                state = {"layer1": torch.zeros(5)}
            dcp.save({"model": state}, store.substore(str(step)), process_group=group)
            heard.append(ear.before_writing(rank))
            gate.wait()
        return heard

    for first, second, changed in run_ranks(SIZE, body):
        assert first[:2] == [16, 96]
        assert first[2] > 72, "it tells its tensors and its tree"
        assert second[:2] == [16, 96]
        assert 0 < second[2] < first[2], "its tree alone: the tensors are known"
        assert changed[2] > second[2], "one new shape on one rank: all speak of tensors again"
    assert dcp.open(store.substore("2"))["model/layer1"].shape == (5,)
    assert dcp.open(store.substore("1"))["model/layer1"].shape == (4,)


def test_changed_values_do_not_cost_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    merge = module.merge_tensors

    def count(reports: Any) -> Any:
        made.append(len(reports))
        return merge(reports)

    monkeypatch.setattr(module, "merge_tensors", count)
    store = MemoryStore()
    tensors = {f"layer{i}": torch.zeros(3) for i in range(5)}
    for step in range(4):
        for tensor in tensors.values():
            tensor.fill_(step)
        dcp.save({**tensors, "step": step}, store.substore(f"tested-{step}"))
    assert len(made) <= 1, "the second save finds the plan of the first"
    assert dcp.open(store.substore("tested-3"))["layer4"][...].tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("dtype", torch.zeros(4, dtype=torch.float16)),
        ("shape", torch.zeros(2, 2)),
        ("value", torch.ones(4)),
    ],
)
def test_a_rank_that_differs_is_named_also_after_a_good_save(name: str, other: Any) -> None:
    def body(rank: int, group: Any) -> None:
        good = {"x": torch.zeros(4)}
        dcp.save(good, store.substore("good"), process_group=group)
        bad = {"x": other} if rank == 1 else good
        try:
            dcp.save(bad, store.substore("bad"), process_group=group)
        finally:
            dcp.save(good, store.substore("again"), process_group=group)

    store = MemoryStore()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(SIZE, body)
    errors = failure.value.errors
    assert {type(e) for e in errors.values()} == {LayoutMismatch}
    assert len({str(e) for e in errors.values()}) == 1
    assert "'x'" in str(errors[0])
    assert "rank 1" in str(errors[0])
    assert [s for s in ("good", "bad", "again") if store.exists(f"{s}/manifest.json")] == [
        "good",
        "again",
    ]


def test_alternating_states_keep_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    assign = module.assign_writers

    def count(tensors: Any) -> Any:
        tensors = tuple(tensors)
        if tensors:
            made.append(len(tensors))
        return assign(tensors)

    monkeypatch.setattr(module, "assign_writers", count)
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        for step in range(3):
            for part in ("model", "optim"):
                state = {f"{part}/{i}": torch.zeros(2) for i in range(2)}
                dcp.save(state, store.substore(f"{part}-{step}"), process_group=group)

    run_ranks(2, body)
    assert len(made) == 4, "each rank planned the model once and the optimizer once"


def test_the_plans_that_were_not_used_for_the_longest_are_forgotten() -> None:
    memory, plan = PlanMemory(), SharedPlan(agreement=b"", tensors=(), stored=(), chunks=())
    names = [bytes([number]) for number in range(module._MAX_PLANS)]
    for name in names:
        memory.keep(name, plan)
    assert all(memory.get(name) for name in names)
    memory.keep(names[1], plan)  # used again
    memory.keep(b"new", plan)
    gone = [name for name in (*names, b"new") if name not in memory]
    assert gone == [names[0], *names[2:9]], "eight and the new one are there"
