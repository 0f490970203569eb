"""What a manager takes for a state, and what it asks for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import CheckpointManager
from dtckpt.errors import CheckpointError, Unsavable

from ...ranks import run_ranks


class Counter:
    """A state that is asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        return {"num_asked": self.num_asked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_asked = state_dict["num_asked"]


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_module_alone_is_a_state_though_it_can_be_called(
    tmp_path: Path, in_background: bool, is_given: bool
) -> None:
    model = torch.nn.Linear(3, 2)
    with CheckpointManager(tmp_path, in_background=in_background) as manager:
        assert manager.save(1, (lambda: model) if is_given else model)
        manager.wait()
        got = torch.nn.Linear(3, 2)
        manager.restore(got)
    assert torch.equal(got.weight, model.weight)


def test_a_function_is_asked_once_for_each_save_and_never_for_others(tmp_path: Path) -> None:
    counter = Counter()
    with CheckpointManager(tmp_path, when=dcp.EverySteps(2)) as manager:
        assert [manager.save(step, lambda: counter) for step in range(1, 5)] == [False, True] * 2
        manager.wait()
        assert counter.num_asked == 2
        manager.restore({}, step=2, strict=False)
        assert manager.all_steps() == (2, 4)


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    for none in ([1, 2], lambda: [1, 2], object()):
        with (
            pytest.raises(Unsavable, match="a state to save is a dict, or an object"),
            CheckpointManager(tmp_path) as manager,
        ):
            manager.save(1, none)  # pyright: ignore[reportArgumentType]


def test_all_ranks_learn_of_an_error_of_the_function_on_one(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> str:
        def give() -> dict[str, Any]:
            if rank == 1:
                raise RuntimeError("no state here")
            return {"w": torch.zeros(3)}

        with CheckpointManager(tmp_path, process_group=group) as manager:
            with pytest.raises(CheckpointError, match="no state here") as found:
                manager.save(1, give)
            assert manager.save(2, lambda: {"w": torch.zeros(3)})
        return str(found.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert [step.number for step in dcp.committed_steps(tmp_path)] == [2]
