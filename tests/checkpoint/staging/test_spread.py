"""Saves with ``spread=True``: what is saved is the state of the call, or nothing."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.errors import Busy, Cancelled, CheckpointError, StateChanged, Timeout
from dtckpt.storage import FaultyStore, MemoryStore, RaiseError, Rule

from ...ranks import run_ranks
from .training import (
    LATE,
    SIDE,
    Training,
    assert_same,
    content_of,
    left,
    no_grad,
    saved_through,
    several,
)

# What is right as it is: the hook of steps is in time, the memory stays, or it was copied.


def new_optimizer(training: Training) -> None:
    training.forward_backward()
    params = [param for param in training.model.parameters() if param.requires_grad]
    torch.optim.SGD(params, lr=1.0).step()


def step_of(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()


def step_within_backward(training: Training) -> None:
    for param in training.model.parameters():
        if param.requires_grad:
            one = torch.optim.SGD([param], lr=1.0)
            param.register_post_accumulate_grad_hook(partial(step_of, one))
    training.forward_backward()


def bare_step(training: Training) -> None:
    """A step that finds nothing copied, since no backward pass came before it."""
    for param in training.model.parameters():
        param.grad = torch.ones_like(param)
    training.optimizer.step()


def assign(training: Training) -> None:
    training.weight.data = torch.zeros(SIDE, SIDE)


def assign_all(training: Training) -> None:
    other = copy.deepcopy(training.model)
    training.model.load_state_dict(other.double().state_dict(), assign=True)


def swap(training: Training) -> None:
    torch.utils.swap_tensors(training.weight, torch.nn.Parameter(torch.zeros(SIDE, SIDE)))


def closure_step(training: Training) -> None:
    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.model(torch.ones(4, SIDE)).sum()
        loss.backward()
        return loss

    torch.optim.LBFGS(training.model[0].parameters()).step(closure)


def average(training: Training) -> None:
    training.run()
    with torch.no_grad():
        for param in training.model.parameters():
            param.lerp_(torch.zeros_like(param), 0.5)


HARMLESS: dict[str, Callable[[Training], object]] = {
    "nothing": lambda t: None,
    "a step": Training.run,
    "a step without a pass": bare_step,
    "several steps": several(Training.run, Training.run),
    "forward alone": lambda t: t.model(torch.randn(4, SIDE)),
    "backward alone": Training.forward_backward,
    "two passes and a step": several(Training.forward_backward, Training.run),
    "gradients": lambda t: t.optimizer.zero_grad(),
    "a new optimizer": new_optimizer,
    "steps within backward": step_within_backward,
    "a step with a closure": closure_step,
    "new data": assign,
    "new parameters": assign_all,
    "other tensors": swap,
    "another dtype": lambda t: t.model.double(),
    "an average after a step": average,
    "a buffer": lambda t: torch.nn.init.ones_(t.norm.get_buffer("running_mean")),
    "a small parameter": no_grad(lambda t: t.first.bias.fill_(7.0)),
    "settings": lambda t: t.optimizer.param_groups[0].update(lr=7.0),
    "state dropped": lambda t: t.optimizer.state.clear(),
    "a value": lambda t: t.state.update(step=7),
    "after the copies": lambda t: None,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_the_state_of_the_call_is_saved(name: str) -> None:
    training = Training()
    handle, store, expected = saved_through(training, HARMLESS[name])
    handle.result(30)
    assert_same(content_of(store), expected)
    assert left(handle) == 0


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_steps_of_every_kind_are_waited_for(settings: dict[str, bool]) -> None:
    """That of a fused one counts no writes."""
    handle, store, expected = saved_through(Training(**settings), bare_step)
    assert left(handle) == 0
    handle.result(30)
    assert_same(content_of(store), expected)


# Who copies, and when.


def test_gradients_drive_the_copies() -> None:
    training = Training()
    handle = ckpt.async_save(training.state, MemoryStore(), spread=True)
    before = left(handle)
    assert before == LATE
    seen: list[int] = []

    def look(_: torch.Tensor) -> None:
        seen.append(left(handle))

    training.weight.register_post_accumulate_grad_hook(look)
    training.model(torch.randn(4, SIDE))
    assert left(handle) == before, "nothing is copied in a forward pass"
    training.forward_backward()
    assert 0 <= seen[0] < before
    assert left(handle) == 0, "one backward pass is enough"
    training.optimizer.step()
    for param in training.model.parameters():
        hooks: Any = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        assert len(hooks) == (param is training.weight), "no hook stays"
    handle.result(30)


def test_only_what_steps_change_waits() -> None:
    training = Training()
    training.state["ema"] = {"weight": training.weight.detach().clone()}
    training.model.register_buffer("average", torch.zeros(SIDE, SIDE))
    training.state["teacher"] = torch.nn.Linear(SIDE, SIDE)
    training.state["array"] = training.weight.detach().numpy().copy()
    handle = ckpt.async_save(training.state, MemoryStore(), spread=True)
    assert left(handle) == LATE
    handle.result(30)


def test_state_dicts_are_spread_for_objects_that_are_named() -> None:
    training = Training()
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "step": 0,
    }
    store = MemoryStore()
    handle = ckpt.async_save(state, store, spread=True)
    assert left(handle) == 0
    handle.result(30)
    expected = content_of(store)
    store = MemoryStore()
    named = [training.model, training.optimizer]
    handle = ckpt.async_save(state, store, spread=named)
    assert left(handle) == LATE
    training.run()
    handle.result(30)
    assert_same(content_of(store), expected)


@pytest.mark.parametrize("wrong", ["yes", [1], 1, torch.nn.Linear(1, 1)])
def test_a_wrong_choice_is_refused(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="spread is True, False, 'checked'"):
        ckpt.async_save({"x": 1}, MemoryStore(), spread=wrong)


def test_staging_may_be_finished() -> None:
    training = Training()
    handle, store, expected = saved_through(training, lambda t: None)
    handle.finish_staging()
    assert left(handle) == 0
    training.weight.data.zero_()
    training.moment.zero_()
    handle.result(30)
    assert_same(content_of(store), expected)


def test_the_next_save_finishes_the_one_before() -> None:
    training = Training()
    first, store, expected = saved_through(training, lambda t: None)
    ckpt.save(training.state, MemoryStore())
    assert first.done()
    assert_same(content_of(store), expected)
    first, store, expected = saved_through(training, lambda t: None)
    second = ckpt.async_save(training.state, MemoryStore(), spread=True)
    assert first.done()
    assert_same(content_of(store), expected)
    with pytest.raises(Busy):
        ckpt.async_save(training.state, MemoryStore(), spread=True, if_busy="refuse")
    third = ckpt.async_save(training.state, MemoryStore(), spread=True, if_busy="supersede")
    assert isinstance(second.exception(30), Cancelled)
    third.result(30)


def test_a_save_that_is_cancelled_copies_no_more() -> None:
    training = Training()
    handle, store, _ = saved_through(training, lambda t: None)
    handle.cancel()
    assert isinstance(handle.exception(30), Cancelled)
    assert left(handle) > 0
    training.run()
    assert left(handle) > 0
    assert list(store.list()) == []


def test_a_training_that_does_not_go_on_fails_the_save() -> None:
    training = Training()
    ended = threading.Event()
    options = {"timeout": timedelta(milliseconds=200)}
    handle, store, _ = saved_through(training, lambda t: None, **options)
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(30)
    with pytest.raises(Timeout, match=r"neither a backward pass .*finish_staging\(\)"):
        handle.result(30)
    training.run()
    assert list(store.list()) == []


def test_other_threads_wait_for_the_one_that_trains() -> None:
    training = Training()
    handle, store, expected = saved_through(training, lambda t: None)
    with pytest.raises(Timeout, match="has not ended"):
        in_thread(lambda: handle.result(0.2))
    in_thread(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]).step)
    assert left(handle) > 0, "it is none of its business"
    in_thread(lambda: bare_step(training))
    assert left(handle) == 0
    handle.result(30)
    assert_same(content_of(store), expected)


def test_steps_in_other_threads_are_waited_for_where_only_their_state_is_written() -> None:
    """As by a rank of which another one writes the parameter."""
    training = Training()
    small = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([small], momentum=0.9)
    optimizer.state[small]["history"] = torch.zeros(SIDE, SIDE)
    training.state |= {"small": small, "other": optimizer}

    def step() -> None:
        small.grad = torch.ones(3)
        optimizer.step()
        optimizer.state[small]["history"].add_(1)

    handle, store, expected = saved_through(training, lambda _: in_thread(step))
    handle.result(30)
    assert_same(content_of(store), expected)


def test_a_thread_that_has_ended_is_stood_in_for() -> None:
    training = Training()
    handle = in_thread(lambda: ckpt.async_save(training.state, MemoryStore(), spread=True))
    assert left(handle) > 0
    handle.result(30)


def in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if errors:
        raise errors[0]
    return found[0]


@pytest.mark.parametrize("ends", [ckpt.SaveHandle.cancel, ckpt.SaveHandle.finish_staging])
def test_a_training_that_ends_is_let_go(ends: Callable[[ckpt.SaveHandle], None]) -> None:
    training = Training()
    handle, _, _ = saved_through(training, lambda t: None)
    ends(handle)
    handle.exception(30)
    weight = weakref.ref(training.weight)
    del training
    gc.collect()
    assert weight() is None


def test_a_change_on_one_rank_fails_all() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> str:
        training = Training()
        state = {"own": ckpt.PerRank(training.model.state_dict())}
        handle = ckpt.async_save(
            state, store, process_group=group, spread=[training.model, training.optimizer]
        )
        assert left(handle) == 3 * SIDE * SIDE * 4
        if rank == 1:
            with torch.no_grad():
                training.weight.add_(1)
        training.run()
        error = handle.exception(30)
        assert isinstance(error, StateChanged)
        return str(error)

    texts = run_ranks(3, body)
    assert len(set(texts)) == 1
    assert "save: write failed on rank 1" in texts[0]
    assert "0.weight" in texts[0]
    assert list(store.list()) == []


def test_a_rank_that_fails_ends_the_copies_of_the_others() -> None:
    store = MemoryStore()
    broken = Rule(RaiseError(OSError("disk on fire")), op="create")
    met = threading.Barrier(2)

    def body(rank: int, group: Any) -> None:
        training = Training()
        mine = FaultyStore(store, [broken]) if rank == 0 else store
        state = {"own": ckpt.PerRank(training.model.state_dict())}
        named = [training.model, training.optimizer]
        handle = ckpt.async_save(state, mine, process_group=group, spread=named)
        ended = threading.Event()
        handle.add_done_callback(lambda _: ended.set())
        if rank == 0:
            training.run()
        assert ended.wait(30)
        assert "disk on fire" in str(handle.exception(30))
        assert (left(handle) == 0) == (rank == 0)
        training.run()
        met.wait(30)

    run_ranks(2, body)
    assert list(store.list()) == []


def test_ranks_as_threads_step_for_themselves() -> None:
    store, met = MemoryStore(), threading.Barrier(2)

    def body(rank: int, group: Any) -> None:
        training = Training()
        state = {"own": ckpt.PerRank(training.model.state_dict())}
        expected = training.weight.detach().clone()
        named = [training.model, training.optimizer]
        handle = ckpt.async_save(state, store, process_group=group, spread=named)
        met.wait(30)
        if rank == 0:
            training.run()
        met.wait(30)
        assert (left(handle) == 0) == (rank == 0)
        training.run()
        handle.result(30)
        into = {"own": ckpt.PerRank({n: torch.empty(SIDE, SIDE) for n in ["0.weight"]})}
        ckpt.load(into, store, process_group=group, strict=False)
        assert torch.equal(into["own"].value["0.weight"], expected)

    run_ranks(2, body)


def test_a_failure_to_stage_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("dtckpt.checkpoint.saving.job.copy_all", fail)
    handle = ckpt.async_save(training.state, MemoryStore(), spread=True)
    monkeypatch.undo()
    training.run()
    hooks: Any = getattr(training.weight, "_post_accumulate_grad_hooks", None) or {}
    assert not hooks
    with pytest.raises(CheckpointError, match="no room"):
        handle.result(30)
