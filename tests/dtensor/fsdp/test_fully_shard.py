"""Sharded modules train as the whole ones do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DeviceMesh, DTensor, PlacementError, Replicate, Shard
from dtckpt.dtensor.comm.traffic import Collective, Observer, observing
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from dtckpt.dtensor.fsdp.state import states_below
from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.dtensor.rank_meshes import run_on_mesh

BATCH = 12


class Layer(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, dtype=torch.float64)
        self.down = nn.Linear(hidden, width, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 9, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.remade = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.remade else layer(x)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens_of(step: int) -> Tensor:
    return torch.randint(9, (BATCH, 3), generator=torch.Generator().manual_seed(step))


def part(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    here = sum(
        i * math.prod(mesh.shape[axis + 1 :]) for axis, i in enumerate(mesh.get_coordinate() or ())
    )
    return whole.chunk(mesh.size())[here]


def trained(model: Any, batch: Callable[[Tensor], Tensor], steps: int = 3) -> list[float]:
    """Train by plain steps; the losses of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses: list[float] = []
    for step in range(steps):
        tokens = batch(tokens_of(step))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_like(model: nn.Module, whole: nn.Module) -> None:
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        torch.testing.assert_close(parameter.full_tensor(), wanted[name].data)


def sharded(mesh: DeviceMesh, start: nn.Module, **options: Any) -> Any:
    model: Any = copy.deepcopy(start)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
@pytest.mark.parametrize("remade", [False, True])
def test_training_is_that_of_one_device(shape: tuple[int, ...], remade: bool) -> None:
    start = made()
    start.remade = remade
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, Net)
        assert type(model).__name__ == "FSDPNet"
        assert model.head.weight is model.embed.weight
        assert list(model.state_dict()) == list(whole.state_dict())
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)

    run_on_mesh(shape, body)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_each_module_has_one_collective_in_each_direction(reshard: bool | None) -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, reshard_after_forward=reshard)
        tokens = part(tokens_of(0), mesh)
        with CommDebugMode() as forward:
            loss = model(tokens).square().mean()
        assert forward.get_total_counts() == 4
        with CommDebugMode() as backward:
            loss.backward()
        again = {True: 4, False: 0, None: 3}[reshard]
        assert backward.get_total_counts() == again + 4
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements

    run_on_mesh((2,), body)


def test_memory_of_whole_parameters_comes_and_goes() -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        units = [state.unit for state in states_below(model)]
        loss = model(part(tokens_of(0), mesh)).square().mean()
        assert [unit.is_whole for unit in units] == [True, False, False, False]
        for unit in units[1:]:
            assert all(one.whole is None for one in unit.held)
        loss.backward()
        assert not any(unit.is_whole for unit in units)
        with torch.no_grad():
            model(part(tokens_of(0), mesh))
        assert not any(unit.is_whole for unit in units)
        model.unshard()
        assert [unit.is_whole for unit in units] == [True, False, False, False]
        assert not isinstance(model.embed.weight, DTensor)
        handle = model.layers[0].unshard(async_op=True)
        handle.wait()
        assert units[1].is_whole
        model.reshard(recurse=True)
        assert not any(unit.is_whole for unit in units)

    run_on_mesh((2,), body)


def test_what_is_gathered_anew_is_freed_before() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        (state,) = states_below(model)
        model(torch.ones(1, 4))  # kept for a backward pass, which does not come
        whole = state.unit.held[0].whole
        assert whole is not None
        before = ref(whole)
        del whole
        is_gone: list[bool] = []

        class Look(Observer):
            def before(self, collective: Collective) -> None:
                is_gone.append(before() is None)

        with observing([Look()]):
            model(torch.ones(1, 4))
        assert is_gone == [True]

    run_on_mesh((2,), body)


def test_gradients_may_wait() -> None:
    start = made()
    whole = copy.deepcopy(start)
    for step in range(3):
        (whole(tokens_of(step)).square().mean() / 3).backward()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            with CommDebugMode() as comm:
                (model(part(tokens_of(step), mesh)).square().mean() / 3).backward()
            if step < 2:
                assert all(parameter.grad is None for parameter in model.parameters())
                assert comm.get_total_counts() == 7
        wanted = {name: p.grad for name, p in whole.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name])

    run_on_mesh((2,), body)


def test_weights_kept_whole_are_gathered_again_once_they_were_written() -> None:
    start = made()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        trained(model, lambda tokens: part(tokens, mesh))
        assert_like(model, whole)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("dim", [0, 1])
def test_over_modules_that_are_parallel_already(dim: int) -> None:
    start = made()
    whole = copy.deepcopy(start)
    trained(whole, lambda tokens: tokens)

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        choose = (lambda p: Shard(1) if p.ndim == 2 else None) if dim else None  # pyright: ignore
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=choose)
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=choose)
        up = model.layers[0].up.weight
        if dim == 0:
            assert up.placements == (Shard(0, order=1), Shard(0, order=0))
        else:
            assert up.placements == (Shard(1), Shard(0))
        trained(model, lambda tokens: part(tokens, mesh["dp"]))
        assert_like(model, whole)

    run_on_mesh((2, 2), body, ("dp", "tp"))


def test_mixed_precision() -> None:
    start = made().float()
    whole = copy.deepcopy(start).bfloat16()
    tokens = tokens_of(0)
    wanted = whole(tokens)

    def body(mesh: DeviceMesh) -> None:
        seen: list[torch.dtype] = []
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = copy.deepcopy(start)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float64))

        def see(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen.append(output.dtype)

        hook = model.layers[0].up.register_forward_hook(see)
        found = model(tokens)
        hook.remove()
        assert seen == [torch.bfloat16]
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.bfloat16(), wanted, atol=0.05, rtol=0.05)
        found.sum().backward()
        for parameter in model.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32

    run_on_mesh((2,), body)


def test_frozen_parts_and_those_without_gradients() -> None:
    start = made()
    start.embed.weight.requires_grad_(False)
    start.layers[1].requires_grad_(False)
    whole = copy.deepcopy(start)
    whole(tokens_of(0)).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        model(part(tokens_of(0), mesh)).square().mean().backward()
        wanted = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            if wanted[name].grad is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("remade", [False, True])
def test_frozen_parts_are_freed_once_the_gradient_has_passed(remade: bool) -> None:
    start = made()
    start.remade = remade
    start.layers.requires_grad_(False)
    whole = copy.deepcopy(start)
    whole(tokens_of(0)).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        units = [state.unit for state in states_below(model)][1:]
        seen: list[list[bool]] = []

        for i, layer in enumerate(model.layers):

            def look(grad: Tensor, i: int = i) -> None:
                seen.append([unit.is_whole for unit in units[i:]])

            def hook(module: nn.Module, args: Any, look: Any = look) -> None:
                args[0].register_hook(look)

            layer.register_forward_pre_hook(hook)
        loss = model(part(tokens_of(0), mesh)).square().mean()
        with CommDebugMode() as comm:
            loss.backward()
        assert seen
        assert not any(map(any, seen))
        assert comm.get_total_counts() == len(units) + 1
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), whole.embed.weight.grad)

    run_on_mesh((2,), body)


def test_two_forward_passes_before_their_backward_passes() -> None:
    start = made()
    whole = copy.deepcopy(start)
    (whole(tokens_of(0)).square().mean() + whole(tokens_of(1)).square().mean()).backward()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        losses = [model(part(tokens_of(step), mesh)).square().mean() for step in range(2)]
        (losses[0] + losses[1]).backward()
        wanted = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)

    run_on_mesh((2,), body)


def test_what_does_not_fit_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
        with pytest.raises(PlacementError, match="is sharded already"):
            fully_shard(model, mesh=mesh)
        with pytest.raises(PlacementError, match="do not implement forward"):
            fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
        number: Any = "2"
        with pytest.raises(PlacementError, match="or a number of ranks, got '2'"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=number)
        with pytest.raises(PlacementError, match="or a number of ranks, got '2'"):
            model.set_reshard_after_forward(number)
        with pytest.raises(PlacementError, match="must return Shard"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p: Replicate())
        with pytest.raises(PlacementError, match="Shard dim 2 is invalid"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p: Shard(2))

    run_on_mesh((2,), body)


def test_parameters_on_the_meta_device_and_ignored_ones() -> None:
    def body(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            model = Net()
        model = sharded(mesh, model)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        assert model(part(tokens_of(0), mesh)).isfinite().all()
        layer = Layer()
        kept: Any = layer.up.weight
        fully_shard(layer, mesh=mesh, ignored_params={kept})
        assert layer.up.weight is kept
        assert isinstance(layer.up.bias, DTensor)

    run_on_mesh((2,), body)
