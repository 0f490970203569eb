"""Saves with ``spread=True`` while something else writes to what waits: nothing is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.staging import spread as spreading
from dtckpt.errors import StateChanged
from dtckpt.storage import MemoryStore

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

foreach_add: Any = vars(torch)["_foreach_add_"]


def add_one(training: Training) -> None:
    training.weight.add_(1)


@torch.inference_mode()
def inferring(training: Training) -> None:
    training.weight.add_(1)


WRITES: dict[str, Callable[[Training], object]] = {
    "in place": no_grad(lambda t: t.weight.add_(1)),
    "one element": no_grad(lambda t: t.weight[5, 7].zero_()),
    "in inference mode": inferring,
    "detached": lambda t: t.weight.detach().add_(1),
    "in a list": no_grad(lambda t: foreach_add([t.weight], 1)),
    "state of the optimizer": lambda t: t.moment.zero_(),
    "a frozen weight": no_grad(lambda t: t.frozen.weight.zero_()),
    "load_state_dict": lambda t: t.model.load_state_dict(t.model.state_dict()),
    "initialised": lambda t: torch.nn.init.zeros_(t.weight),
    "back again": no_grad(several(add_one, lambda t: t.weight.sub_(1))),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("then", [Training.run, several()], ids=["step", "nothing"])
def test_a_write_that_is_counted_is_found(name: str, then: Callable[[Training], object]) -> None:
    training = Training()
    handle, store, _ = saved_through(training, several(WRITES[name], then))
    with pytest.raises(StateChanged, match=r"tensor '\w+/.*' was written to \(\d times\)"):
        handle.result(30)
    assert list(store.list()) == []


def storage_of(training: Training) -> Any:
    return training.weight.untyped_storage()


SILENT: dict[str, Callable[[Training], object]] = {
    "data": lambda t: t.weight.data.mul_(0.5),
    "NumPy": lambda t: t.weight.detach().numpy().fill(0),
    "DLPack": lambda t: torch.from_dlpack(t.weight.detach()).zero_(),
    "storage": lambda t: storage_of(t).fill_(0),
}
FEW: dict[str, Callable[[Training], object]] = {
    "an element": lambda t: t.weight.data[101, 103].add_(1),
    "clipped": lambda t: t.weight.data.clamp_(max=float(t.weight.detach().max()) * 0.99),
}


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize(
    "then", [Training.run, Training.forward_backward], ids=["step", "backward"]
)
def test_a_write_that_is_not_counted_is_found_by_elements(
    name: str, then: Callable[[Training], object]
) -> None:
    handle, store, _ = saved_through(Training(), several(SILENT[name], then))
    with pytest.raises(StateChanged, match=r"'model/0.weight' was changed .* does not count"):
        handle.result(30)
    assert list(store.list()) == []


@pytest.mark.parametrize("name", [*SILENT, *FEW])
def test_all_bytes_may_be_looked_at(name: str) -> None:
    handle, store, _ = saved_through(Training(), (SILENT | FEW)[name], spread="checked")
    with pytest.raises(StateChanged, match=r"'model/0.weight' was changed"):
        handle.result(30)
    assert list(store.list()) == []


def test_what_is_looked_at_as_a_whole_is_saved() -> None:
    handle, store, expected = saved_through(Training(), Training.run, spread="checked")
    handle.result(30)
    assert_same(content_of(store), expected)


def test_memory_that_is_given_away_is_not_read() -> None:
    handle, store, _ = saved_through(Training(), lambda t: storage_of(t).resize_(0))
    with pytest.raises(StateChanged, match=r"its memory \(65536 bytes\) was .* resized \(to 0"):
        handle.result(30)
    assert list(store.list()) == []


def test_a_write_in_a_forward_pass_is_found() -> None:
    training = Training()

    def follow(*_: object) -> None:
        with torch.no_grad():
            training.frozen.weight.lerp_(training.weight, 0.5)

    training.frozen.register_forward_pre_hook(follow)
    handle, _, _ = saved_through(training, Training.run)
    with pytest.raises(StateChanged, match=r"'model/3.weight' was written to \(1 times\)"):
        handle.result(30)
    # From then on it is copied within the call.
    handle, store, expected = saved_through(training, Training.run)
    handle.result(30)
    assert_same(content_of(store), expected)


def test_all_that_had_changed_is_copied_at_the_next_save() -> None:
    """Else as many saves would fail as a training by hand has tensors."""

    def by_hand(training: Training) -> None:
        with torch.no_grad():
            for param in training.model.parameters():
                param.mul_(0.5)
        training.run()

    training = Training()
    handle, _, _ = saved_through(training, by_hand)
    with pytest.raises(StateChanged):
        handle.result(30)
    handle, store, expected = saved_through(training, by_hand)
    handle.result(30)
    assert_same(content_of(store), expected)


def in_one_storage(training: Training) -> torch.Tensor:
    """Let a weight and a buffer lie in one storage, in which writes are counted apart."""
    flat = torch.zeros(3, SIDE, SIDE)
    flat[0] = training.weight.detach()
    training.weight.data = flat[0]
    training.first.register_buffer("cache", flat[1])
    return flat


def test_what_shares_a_storage_with_parameters_does_not_wait() -> None:
    training = Training()
    in_one_storage(training)

    def cached(training: Training) -> None:
        training.first.get_buffer("cache")[5, 7] = 9.0
        training.run()

    handle, store, expected = saved_through(training, cached)
    handle.result(30)
    assert_same(content_of(store), expected)


def test_a_write_through_another_tensor_of_the_state_is_found() -> None:
    training = Training()
    flat = training.state["flat"] = in_one_storage(training)

    def through_it(_: Training) -> None:
        flat[0, 5, 7] = 9.0

    handle, store, _ = saved_through(training, several(through_it, Training.run))
    with pytest.raises(StateChanged, match=r"'model/0.weight' was written to"):
        handle.result(30)
    assert list(store.list()) == []


def test_writes_between_parts_of_a_tensor_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "_SLICE_BYTES", 1 << 10)
    training = Training()

    training = Training()
    handle = ckpt.async_save(training.state, MemoryStore(), spread=True)
    spread: Any = vars(handle)["_job"].spread
    spread._advance(5 << 10)
    assert left(handle) == LATE - (5 << 10)
    training.weight.detach().add_(1)  # the first one of the file, of which some rows are copied
    with pytest.raises(StateChanged, match=r"'model/0.weight' was written to"):
        handle.result(30)
