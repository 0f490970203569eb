"""Passes that an error stops, or Ctrl-C in a notebook: programs go on after it."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DeviceMesh, DTensor, fsdp
from dtckpt.dtensor.fsdp import fully_shard, register_fsdp_forward_method
from dtckpt.dtensor.fsdp.notes import Noting
from dtckpt.dtensor.fsdp.state import states_below
from dtckpt.dtensor.torch_private import saved_hooks
from tests.dtensor.rank_meshes import run_on_mesh

from .test_hazards import X, assert_same_gradients, assert_trains_sharded, half, linear

STOPS = [ValueError, KeyboardInterrupt]
"""torch calls hooks of a forward pass that fails only for the first."""


class Net(nn.Module):
    """Units in each other and beside each other; one calls itself, and one is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.middle = Middle()
        self.again = nn.Sequential(linear(), nn.Tanh())
        self.scale = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x)) * self.scale
        made: Any = checkpoint(self.again, x, use_reentrant=False)
        return self.last(made)

    def ends(self, x: Tensor) -> Tensor:
        """Another method of it."""
        return self.last(self.first(x) * self.scale)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.deep = linear(), nn.Sequential(linear(), nn.Tanh())

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = self.deep(self.lin(x)).tanh()
        return self(x, again=False) if again else x


FOLDER = os.path.dirname(fsdp.__file__)
UNITS = ["first", "middle.deep", "middle", "again", "last", ""]


def sharded(start: Net, mesh: DeviceMesh) -> Any:
    model = copy.deepcopy(start)
    for name in UNITS:
        fully_shard(model.get_submodule(name), mesh=mesh)
    register_fsdp_forward_method(model, "ends")
    return model


def assert_nothing_runs(model: nn.Module) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert saved_hooks() is None
    for state in states_below(model):
        assert not any((state.saving, state.is_in_backward, state.unit.shown))
        assert state.is_root or not state.unit.is_whole
    copy.deepcopy(model)


def assert_trains(model: Any, whole: nn.Module, mesh: DeviceMesh) -> None:
    """Train from other weights than those that were whole as the pass was stopped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model(half(X, mesh)).square().mean().backward()
    assert_same_gradients(model, whole)
    assert_nothing_runs(model)


def trained(start: Net) -> Net:
    whole = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2)
    whole(X).square().mean().backward()
    return whole


@pytest.mark.parametrize("stop", STOPS)
def test_forward_passes_that_something_stops(stop: type[BaseException]) -> None:
    start = Net()
    whole = trained(start)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(start, mesh)

        def fail(*_: Any) -> None:
            raise stop("on purpose")

        for name in ("first", "middle.deep.0", "middle", "again.1", "last"):
            module = model.get_submodule(name)
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                handle = register(fail)
                with pytest.raises(stop, match="on purpose"):
                    model(X)
                if name in ("first", "last"):
                    with pytest.raises(stop, match="on purpose"):
                        model.ends(X)
                handle.remove()
                assert_nothing_runs(model)
        assert_trains(model, whole, mesh)

    run_on_mesh((2,), body)


def test_what_a_module_stops_in_itself_leaves_it_running() -> None:
    class Retries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()

        def forward(self, x: Tensor, fails: bool = False) -> Tensor:
            if fails:
                raise KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                self(x, fails=True)
            return self.lin(x)

    assert_trains_sharded(Retries())


@pytest.mark.parametrize("stop", STOPS)
def test_backward_passes_that_something_stops(stop: type[BaseException]) -> None:
    start = Net()
    whole = trained(start)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(start, mesh)
        model(X).sum().backward()  # gradients from before are dropped, too

        def fail(*_: Any) -> None:
            raise stop("on purpose")

        def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(fail)

        for name in UNITS:
            module = model.get_submodule(name)
            # Before the hook of the unit, and after it.
            for prepend in (True, False):
                handle = module.register_forward_hook(fail_in_backward, prepend=prepend)
                loss = model(X).sum()
                with pytest.raises(stop, match="on purpose"):
                    loss.backward()
                handle.remove()
                assert not any(state.is_in_backward for state in states_below(model))
                model.reshard()  # as the forward pass left it, where the other did not come to it
                assert_nothing_runs(model)
        loss = model(X).sum()
        handle = model.again[0].register_forward_hook(fail)  # as it is made anew
        with pytest.raises(stop, match="on purpose"):
            loss.backward()
        handle.remove()
        assert_nothing_runs(model)
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_trains(model, whole, mesh)

    run_on_mesh((2,), body)


def test_a_pass_after_one_that_failed_reduces_what_waits() -> None:
    start = nn.Sequential(linear(), linear())
    whole = copy.deepcopy(start)
    whole[0](X).square().mean().backward()

    def fail(grad: Tensor) -> None:
        raise ValueError("on purpose")

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        with torch.no_grad():
            model(X)  # the root, which reduces what waits
        model[0].set_requires_gradient_sync(False)
        model[0](half(X, mesh)).square().mean().backward()
        model[0].set_requires_gradient_sync(True)
        out, loss = model[1](X), model[1](X).sum()
        out.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            out.sum().backward()
        assert model[0].weight.grad is None
        (0 * loss).backward()
        assert_same_gradients(model[0], whole[0])

    run_on_mesh((2,), body)


class Lines:
    """Counts the lines of the package that run, and stops at one of them as Ctrl-C would."""

    def __init__(self, stop: int | None = None) -> None:
        self.count, self.stop = 0, stop

    def run(self, body: Callable[[], None]) -> None:
        """Call something; KeyboardInterrupt where it is stopped."""
        sys.settrace(self._trace)
        try:
            body()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if os.path.dirname(frame.f_code.co_filename) != FOLDER:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.stop:
                raise KeyboardInterrupt
        return self._trace


def test_a_pass_after_one_that_was_stopped_at_any_line() -> None:
    start = Net()
    start.middle.deep.requires_grad_(False)
    whole = trained(start)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(start, mesh)

        def step() -> None:
            model(X).square().mean().backward()

        step()  # the first one runs others
        lines = Lines()
        lines.run(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        for line in range(1, lines.count, 53):  # of some 5300; each of them costs 16 ms
            model.zero_grad()
            with pytest.raises(KeyboardInterrupt):
                Lines(line).run(step)
            model.zero_grad()
            step()
            assert_same_gradients(model, whole)
            assert_nothing_runs(model)

    run_on_mesh((1,), body)


def test_notes_are_of_memory_that_whole_parameters_have_now() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(linear(), mesh=mesh)
        (state,) = states_below(model)
        unit = state.unit
        unit.gather()
        before: Any = unit.held[0].whole
        notes = Noting(unit)
        assert notes.note(before) is not before
        unit.gather(anew=True)
        assert notes.note(before) is before  # that of another tensor, for all it knows

    run_on_mesh((1,), body)


def test_hooks_are_left_once() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(linear(), mesh=mesh)
        (state,) = states_below(model)
        state.unit.gather()
        notes = Noting(state.unit)
        notes.leave()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            others = saved_hooks()
            for _ in range(2):
                notes.enter()
                for _ in range(2):
                    notes.leave()
                    assert saved_hooks() == others

    run_on_mesh((1,), body)
