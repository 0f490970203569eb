"""Parameters on their way while other modules run, and those that lie on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dtckpt.dtensor import DeviceMesh, DTensor, PlacementError
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from dtckpt.dtensor.fsdp.state import State, state_of, states_below
from tests.dtensor.rank_meshes import collectives, run_on_mesh

from .test_fully_shard import assert_like, made, part, sharded, tokens_of, trained


def layers_coming(model: Any) -> list[int]:
    states = [state_of(layer) for layer in model.layers]
    return [i for i, state in enumerate(states) if state is not None and state.unit.is_coming]


def watch(model: Any, *, forward: bool) -> list[tuple[int, list[int]]]:
    """Note for every layer which other ones are on their way while it runs."""
    seen: list[tuple[int, list[int]]] = []
    for i, layer in enumerate(model.layers):

        def look(*_: Any, i: int = i) -> None:
            seen.append((i, layers_coming(model)))

        if forward:
            layer.up.register_forward_hook(look)
        else:
            layer.up.register_full_backward_hook(look)
    return seen


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_modules_that_are_named_are_on_their_way(shape: tuple[int, ...]) -> None:
    start = made()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        first, second, third = model.layers
        model.set_modules_to_forward_prefetch([first])
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second])
        forward, backward = watch(model, forward=True), watch(model, forward=False)
        with CommDebugMode() as comm:
            model(part(tokens_of(0), mesh)).square().mean().backward()
        plain = sharded(mesh, start)
        with CommDebugMode() as other:
            plain(part(tokens_of(0), mesh)).square().mean().backward()
        assert comm.get_total_counts() == other.get_total_counts()
        assert forward == [(0, [1, 2]), (1, [2]), (2, [])]
        assert backward == [(2, [1]), (1, []), (0, [])]
        model.zero_grad()
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)
        with pytest.raises(PlacementError, match="that fully_shard treated, got a Linear"):
            model.set_modules_to_forward_prefetch([first.up])

    run_on_mesh(shape, body)


def test_the_order_of_the_last_pass_is_prefetched() -> None:
    start = made()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens, 4)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        root: Any = state_of(model)
        root.prefetches = True  # as it is on accelerators
        trained(model, lambda tokens: part(tokens, mesh), 2)
        forward, backward = watch(model, forward=True), watch(model, forward=False)
        del forward[:], backward[:]
        model(part(tokens_of(0), mesh)).square().mean().backward()
        assert forward == [(0, [1]), (1, [2]), (2, [])]
        assert backward == [(2, [1]), (1, [0]), (0, [])]
        assert not any(s.unit.is_whole or s.unit.is_coming for s in states_below(model))

    run_on_mesh((2,), body)

    def again(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        root: Any = state_of(model)
        root.prefetches = True
        trained(model, lambda tokens: part(tokens, mesh), 4)
        assert_like(model, whole)

    run_on_mesh((3,), again)


def test_modules_that_run_without_the_outermost_one_leave_its_order() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, made())
        root: Any = state_of(model)
        root.prefetches = True
        model(part(tokens_of(0), mesh))
        order = list(root.order)
        x = torch.ones(1, 6, dtype=torch.float64)
        for layer in model.layers:
            layer(x)
        assert root.order == order
        assert layers_coming(model) == []

    run_on_mesh((1,), body)


def test_what_was_prefetched_and_not_used_is_gathered_anew() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
            self.skip = True

        def forward(self, x: Any) -> Any:
            return self.a(x) if self.skip else self.b(self.a(x))

    x = torch.ones(2, 4, dtype=torch.float64)

    def body(mesh: DeviceMesh) -> None:
        model: Any = Skips()
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        for layer in (model.a, model.b):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.a.set_modules_to_forward_prefetch([model.b])
        model(x)
        unit = state_of(model.b)
        assert unit is not None
        assert unit.unit.is_coming
        with torch.no_grad():
            model.b.weight.mul_(0)
        model.skip = False
        assert torch.equal(model(x), torch.ones(2, 4, dtype=torch.float64))
        model.b.unshard(async_op=True)
        assert unit.unit.is_coming
        with collectives() as seen:
            model.b(x)
        assert not seen
        model.reshard(recurse=True)
        assert not unit.unit.is_coming

    run_on_mesh((2,), body)


def test_modules_that_need_no_parameters_in_the_backward_pass() -> None:
    start = made()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        model: Any = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model[0].set_unshard_in_backward(False)
        loss = model(tokens_of(0)).sum()
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == 1 + 2  # the linear layer again, and two reductions
        # What needs them after all has them.
        second = sharded(mesh, start)
        for layer in second.layers:
            layer.set_unshard_in_backward(False)
        second.remade = True
        trained(second, lambda tokens: part(tokens, mesh))
        assert_like(second, whole)

    run_on_mesh((2,), body)


class Event:
    """What an event of an accelerator has."""

    def __init__(self) -> None:
        self.count = 0

    def synchronize(self) -> None:
        self.count += 1


def test_events_are_waited_for_once() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        event = Event()
        model.set_post_optim_event(event)
        for _ in range(2):
            model(torch.ones(1, 4))
        assert event.count == 1

    run_on_mesh((1,), body)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_parameters_on_the_cpu(shape: tuple[int, ...]) -> None:
    start = made()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        assert isinstance(CPUOffloadPolicy(), OffloadPolicy)
        model = sharded(mesh, start, offload_policy=CPUOffloadPolicy())
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().device.type == "cpu"
        wrong: Any = "cpu"
        with pytest.raises(PlacementError, match="must be an OffloadPolicy"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy=wrong)

    run_on_mesh(shape, body)


def test_sharded_modules_are_let_go() -> None:
    import gc
    from weakref import ref

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, made())
        model(part(tokens_of(0), mesh)).sum().backward()
        gone = [ref(state) for state in states_below(model)]
        assert all(isinstance(state(), State) for state in gone)
        del model
        gc.collect()
        assert not any(state() for state in gone)

    run_on_mesh((1,), body)
