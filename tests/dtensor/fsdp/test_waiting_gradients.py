"""Gradients that wait: how far they are reduced, hooks, and checkpoints in between."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    PlacementError,
    UnsupportedOp,
    distribute_tensor,
    partial_gradients,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    gradient_state_dict,
    load_gradient_state_dict,
)
from dtckpt.dtensor.fsdp.state import states_below
from dtckpt.errors import LayoutMismatch
from tests.dtensor.rank_meshes import run_on_mesh

from .test_fully_shard import Net, made, part, sharded, tokens_of
from .test_hazards import Either, Out, X, assert_same_gradients, half


def losses(model: Any, mesh: DeviceMesh | None, *steps: int) -> None:
    for step in steps:
        tokens = tokens_of(step)
        model(tokens if mesh is None else part(tokens, mesh)).square().mean().backward()


def gradients_of(start: Net, *steps: int) -> dict[str, Any]:
    whole = copy.deepcopy(start)
    losses(whole, None, *steps)
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def assert_gradients(model: Any, wanted: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name])


@pytest.mark.parametrize("factor", [None, 8.0])
def test_sums_of_one_group_wait_for_the_others(factor: float | None) -> None:
    start = made()
    scale = 1 if factor is None else 4 / factor
    wanted = {name: grad * scale for name, grad in gradients_of(start, 0, 1, 2).items()}

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        units = [state.unit for state in states_below(model)]
        if factor is not None:
            for layer in (*model.layers, model):
                layer.set_gradient_divide_factor(factor)
        counts: list[int] = []
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            tokens = part(tokens_of(step), mesh)
            loss = model(tokens).square().mean()
            with CommDebugMode() as comm:
                loss.backward()
            counts.append(comm.get_total_counts())
            if step < 2:
                assert all(parameter.grad is None for parameter in model.parameters())
                for unit in units:
                    for place, local in unit.gradients.scattered.items():
                        if place >= 0 and unit.held[place].about.dim is not None:
                            assert local.shape == unit.held[place].sharded.local.shape
        assert counts[0] == counts[1] == counts[2] - len(units)
        assert_gradients(model, wanted)
        assert not any(unit.gradients.are_pending for unit in units)

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("freezes", [False, True])
def test_parameters_may_be_frozen_while_sums_wait_for_other_groups(freezes: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return self.layer(x) * self.scale

    start = Scaled()
    x = torch.arange(32.0).view(8, 4) / 32
    wanted = copy.deepcopy(start)
    wanted(x).square().mean().backward()
    once = copy.deepcopy(wanted.layer.weight.grad)
    wanted(x).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        weight = model.layer.weight
        weight.requires_grad_(freezes)
        model.set_requires_all_reduce(False)
        model(part(x, mesh)).square().mean().backward()
        weight.requires_grad_(not freezes)
        model.set_requires_all_reduce(True)
        model(part(x, mesh)).square().mean().backward()
        for name in ("layer.bias", "scale"):
            grad = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(grad, wanted.get_parameter(name).grad)
        if freezes:
            assert weight.grad is None
        else:
            torch.testing.assert_close(weight.grad.full_tensor(), once)
        assert not any(state.unit.gradients.are_pending for state in states_below(model))

    run_on_mesh((2, 2), body)


def test_hooks_have_the_reduced_gradients() -> None:
    start = made()
    wanted = gradients_of(start, 0)

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start)
        rows: list[int] = []

        def double(row: Any) -> None:
            rows.append(row.numel())
            row.mul_(2)

        layer = model.layers[0]
        layer.set_all_reduce_hook(double)
        losses(model, mesh, 0)
        assert rows == [sum(p.grad.to_local().numel() for p in layer.parameters())]
        mine = {id(p) for p in layer.parameters()}
        for name, parameter in model.named_parameters():
            scale = 2 if id(parameter) in mine else 1
            torch.testing.assert_close(parameter.grad.full_tensor(), scale * wanted[name])
        if mesh.ndim == 2:
            with pytest.raises(PlacementError, match="stream cannot be set"):
                layer.set_all_reduce_hook(double, stream=object())

    run_on_mesh((2,), body)
    run_on_mesh((2, 2), body)


def test_gradients_that_wait_are_reduced_though_the_last_pass_has_none() -> None:
    start = Either()
    whole = copy.deepcopy(start)
    (whole(X, True).square().mean() + whole(X, False).square().mean()).backward()
    again = copy.deepcopy(start)
    again(X, True).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        for layer in (model.a, model.b):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_requires_gradient_sync(False)
        model(half(X, mesh), False).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model(half(X, mesh), True).square().mean().backward()
        assert_same_gradients(model, whole)
        model.set_requires_gradient_sync(False)
        model(half(X, mesh), True).square().mean().backward()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        model(half(X, mesh), True).square().mean().backward()
        torch.testing.assert_close(model.a.weight.grad.full_tensor(), again.a.weight.grad)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("hides_output", [False, True])
def test_gradients_that_wait_are_reduced_wherever_a_pass_begins(hides_output: bool) -> None:
    class Hidden(Either):
        def forward(self, x: Tensor, first: bool) -> Any:
            y = super().forward(x, first)
            return Out(y) if hides_output else y

    start = Hidden()
    whole = copy.deepcopy(start)

    def loss_of(model: Any, x: Tensor, first: bool) -> Tensor:
        out = model(x, first)
        return (out.value if hides_output else out).square().mean()

    (loss_of(whole, X, False) + loss_of(whole, X, True)).backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        fully_shard(model.b, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_requires_gradient_sync(False)
        loss_of(model, half(X, mesh), False).backward()
        model.set_requires_gradient_sync(True)
        if hides_output:  # the root has what runs, and its output has no hook
            loss_of(model, half(X, mesh), True).backward()
        else:
            with torch.no_grad():
                model(half(X, mesh), True)
            model.b(half(X, mesh)).mean().backward()
            assert model.a.weight.grad is None  # nothing of it has come
            model.zero_grad()
            model.set_requires_gradient_sync(False)
            loss_of(model, half(X, mesh), False).backward()
            loss_of(model, half(X, mesh), True).backward()
            model.set_requires_gradient_sync(True)
            (0 * model.b(half(X, mesh)).mean()).backward()
        assert_same_gradients(model, whole)

    run_on_mesh((2,), body)


def test_last_backward_passes_reduce_what_others_left() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = Either()
        for layer in (model.a, model.b):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.b.set_requires_gradient_sync(False)
        model(X, False).sum().backward()
        model.b.set_requires_gradient_sync(True)
        model.set_is_last_backward(False)
        model(X, True).sum().backward()
        assert model.b.weight.grad is None
        assert model.a.weight.grad is not None
        model.set_is_last_backward(True)
        model(X, True).sum().backward()
        assert model.b.weight.grad is not None

    run_on_mesh((2,), body)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_waiting_gradients_are_saved_and_loaded_on_another_mesh(
    shape: tuple[int, ...], tmp_path: Any
) -> None:
    start = made()
    wanted = gradients_of(start, 0, 1, 2)

    def save(mesh: DeviceMesh) -> dict[str, Any]:
        model = sharded(mesh, start)
        model.set_requires_gradient_sync(False)
        losses(model, mesh, 0, 1)
        model.state_dict()  # warns, once for each unit
        found: dict[str, Any] = gradient_state_dict(model)
        model.state_dict()  # does not
        kept = copy.deepcopy({name: grad.full_tensor() for name, grad in found.items()})
        assert list(found) == list(wanted)
        losses(model, mesh, 2)  # waits anew, and is added
        model.reduce_gradients()
        assert_gradients(model, wanted)
        return kept

    # Around all ranks: they are threads, and what is done about warnings is one for a process.
    with pytest.warns(UserWarning, match="wait in this module, and no state dict has them") as seen:
        saved = run_on_mesh(shape, save)[0]
    assert len(seen) == math.prod(shape) * (1 + len(start.layers))
    torch.testing.assert_close(saved, gradients_of(start, 0, 1))

    def go_on(mesh: DeviceMesh) -> None:
        where = str(tmp_path / f"rank{mesh.get_rank()}")
        ckpt.save({"gradients": saved}, where, no_dist=True)
        model = sharded(mesh, start)
        model.set_requires_gradient_sync(False)
        losses(model, mesh, 5)  # of no consequence
        loaded = {
            name: distribute_tensor(torch.empty_like(grad), mesh) for name, grad in saved.items()
        }
        ckpt.load({"gradients": loaded}, where, no_dist=True)
        load_gradient_state_dict(model, loaded)
        model.set_requires_gradient_sync(True)
        losses(model, mesh, 2)
        assert_gradients(model, wanted)

    run_on_mesh((3,), go_on)


def test_gradient_state_dicts_that_do_not_fit_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()
        before = model.weight.grad
        for wrong, message in (
            ({"nowhere": torch.ones(4, 4)}, "does not have.*nowhere"),
            ({"weight": torch.ones(4, 5)}, "'weight': expected shape .4, 4.*4, 5"),
            ({"weight": torch.ones(4, 4)}, "'weight': expected a DTensor .*got a Tensor"),
        ):
            with pytest.raises(LayoutMismatch, match=message):
                load_gradient_state_dict(model, wrong)
        assert model.weight.grad is before
        load_gradient_state_dict(model, {})
        assert model.weight.grad is None
        with pytest.raises(UnsupportedOp, match="needs process groups of NCCL"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_allocate_memory_from_process_group_for_comm(False)
        model.set_force_sum_reduction_for_comms(True)

    run_on_mesh((2,), body)


def test_gradient_state_dicts_of_leaves_that_stay_partial() -> None:
    def body(mesh: DeviceMesh) -> None:
        from dtckpt.dtensor import Shard, distribute_module

        model: Any = distribute_module(nn.Linear(4, 4, dtype=torch.float64), mesh)
        x = distribute_tensor(torch.ones(4, 4, dtype=torch.float64), mesh, [Shard(0)])
        with partial_gradients():
            model(x).sum().backward()
        with CommDebugMode() as comm:
            found: dict[str, Any] = gradient_state_dict(model)
        assert comm.get_total_counts() == 1
        assert all(isinstance(grad, DTensor) for grad in found.values())
        assert torch.equal(found["weight"].to_local(), torch.full((4, 4), 4.0).double())

    run_on_mesh((2,), body)


@pytest.mark.parametrize("over_tp", [False, True])
def test_clipping_makes_one_reduction_for_each_group(over_tp: bool) -> None:
    from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    start = made()
    whole = copy.deepcopy(start)
    losses(whole, None, 0)
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        if over_tp:
            plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            data = mesh["dp"]
        else:
            data = mesh
        for layer in model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
        losses(model, data, 0)
        with CommDebugMode() as comm:
            found: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        # Over dp what only that shards, over both what the model shards, too.
        assert comm.get_total_counts() <= (2 if over_tp else 1)
        torch.testing.assert_close(found.full_tensor(), norm)
        assert_gradients(model, {name: p.grad for name, p in whole.named_parameters()})

    run_on_mesh((2, 2), body, ("dp", "tp"))


def test_gradients_wait_in_the_dtype_of_sums() -> None:
    def body(mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 4)).sum().backward()
        (state,) = states_below(model)
        assert {t.dtype for t in state.unit.gradients.waiting.values()} == {torch.float32}
        copied = copy.deepcopy(model)
        copied.reduce_gradients()
        assert copied.weight.grad is not None
        assert model.weight.grad is None
        model.zero_grad()
        assert not state.unit.gradients.are_pending

    run_on_mesh((2,), body)
