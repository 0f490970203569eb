"""Parameters of modules that stay gathered: after ``unshard()``, and after a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import DeviceMesh, DTensor, PlacementError
from dtckpt.dtensor.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    gradient_state_dict,
    load_gradient_state_dict,
)
from dtckpt.dtensor.parallel import ColwiseParallel, parallelize_module
from tests.dtensor.rank_meshes import groups_over_several_axes, run_on_mesh

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def linear() -> nn.Linear:
    return nn.Linear(4, 4, dtype=torch.float64)


def made() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.Tanh(), linear())


def kinds(module: nn.Module) -> list[bool]:
    return [isinstance(p, DTensor) for p in module.parameters()]


def sharded(mesh: DeviceMesh, start: nn.Module, **options: Any) -> Any:
    model: Any = copy.deepcopy(start)
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("reshard", "inner", "outer"),
    [(True, True, True), (False, False, False), (None, True, False), (2, True, True)],
)
def test_parameters_are_plain_while_gathered(
    reshard: bool | int | None, inner: bool, outer: bool
) -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, reshard_after_forward=reshard)
        before = dict(model.named_parameters())
        loss = model(X).square().mean()
        assert kinds(model) == [inner, inner, outer, outer]
        for (name, p), whole in zip(model.named_parameters(), start.parameters(), strict=True):
            full = p.full_tensor() if isinstance(p, DTensor) else p
            assert torch.equal(full, whole), name
        loss.backward()
        after = dict(model.named_parameters())
        assert all(after[name] is one for name, one in before.items())
        model(X)
        for part in (model, model[0]):
            part.reshard()
        after = dict(model.named_parameters())
        assert all(after[name] is one for name, one in before.items())
        with torch.no_grad():
            model(X)
        assert all(kinds(model))

    with groups_over_several_axes():
        run_on_mesh((4,), body)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("within", [torch.no_grad, torch.enable_grad])
def test_parameters_can_be_used_after_unshard(waits: bool, within: Callable[[], Any]) -> None:
    start = linear()

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        parameters = list(model.parameters())
        with within():
            handle = model.unshard(async_op=waits)
            if waits:
                assert kinds(model) == [True, True]
                handle.wait()
        assert kinds(model) == [False, False]
        assert torch.equal(model.weight, start.weight)
        nn.functional.linear(X, model.weight, model.bias).sum().backward()
        assert kinds(model) == [True, True]
        whole = copy.deepcopy(start)
        whole(X).sum().backward()
        wanted: list[Any] = [p.grad for p in whole.parameters()]
        for one, grad in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), grad)
        # And in the forward pass, from which gradients come on.
        model.unshard()
        model(X).sum().backward()
        for one, grad in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), 2 * grad)

    run_on_mesh((2,), body)


def test_gradients_of_a_penalty_on_gathered_parameters_are_reduced() -> None:
    start = made()
    whole = copy.deepcopy(start)
    (whole(X).square().mean() + sum(p.square().sum() for p in whole.parameters())).backward()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, start, reshard_after_forward=False)
        loss = model(X).square().mean()
        (loss + sum(p.square().sum() for p in model.parameters())).backward()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)

    run_on_mesh((2,), body)


def test_parameters_of_the_model_keep_their_distribution_over_its_mesh() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = linear()
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        sharded: Any = fully_shard(model, mesh=mesh["dp"])
        sharded.unshard()
        assert sharded.weight.device_mesh == mesh["tp"]
        sharded.reshard()
        assert sharded.weight.device_mesh.ndim == 2

    run_on_mesh((2, 2), body, ("dp", "tp"))


def test_unshard_gives_parameters_in_the_dtype_of_the_computation() -> None:
    def body(mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model: Any = fully_shard(linear(), mesh=mesh, mp_policy=policy)
        model.unshard()
        assert model.weight.dtype == torch.bfloat16

    run_on_mesh((2,), body)


def gathered_by_forward(model: Any) -> None:
    model(X)


def gathered_by_unshard(model: Any) -> None:
    model.unshard(recurse=True)


@pytest.mark.parametrize("gather", [gathered_by_forward, gathered_by_unshard])
def test_state_dicts_have_sharded_parameters(gather: Callable[[Any], None]) -> None:
    start, other = made(), made()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)

    def body(mesh: DeviceMesh) -> None:
        for whole_model in (True, False):
            model = sharded(mesh, start, reshard_after_forward=False)
            names = dict(model.named_parameters())
            gather(model)
            # Of a part that is sharded with another one, too.
            part = model if whole_model else model[2]
            prefix = "" if whole_model else "2."
            kept = part.state_dict(keep_vars=True)
            assert all(one is names[prefix + name] for name, one in kept.items())
            gather(model)
            state = part.state_dict()
            assert all(isinstance(one, DTensor) for one in state.values())
            gather(model)
            filled = {name: one.detach() + 1 for name, one in state.items()}
            part.load_state_dict(filled)
            wanted = dict((other if whole_model else other[2]).named_parameters())
            for name, one in part.named_parameters():
                assert torch.equal(one.full_tensor(), wanted[name])
            model(X)
            for name, one in part.named_parameters():
                assert torch.equal(one, wanted[name])

    run_on_mesh((2,), body)


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.told: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append(self.linear.state_dict())
        self.told.append(self.linear.state_dict(keep_vars=True))
        return self.linear(x)


def test_state_dicts_of_parts_within_a_forward_pass_have_sharded_parameters() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(Telling(), mesh=mesh)
        model(X)
        model.reshard()
        first, second = model.told
        assert all(isinstance(one, DTensor) for one in first.values())
        assert second["weight"] is model.linear.weight

    run_on_mesh((2,), body)


@pytest.mark.parametrize("gather", [gathered_by_forward, gathered_by_unshard])
def test_checkpoints_are_saved_and_loaded_while_parameters_are_gathered(
    tmp_path: Path, gather: Callable[[Any], None]
) -> None:
    start = made()

    def body(mesh: DeviceMesh) -> None:
        where = str(tmp_path / f"rank{mesh.get_local_rank()}")
        model = sharded(mesh, start, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(X).square().mean().backward()
        optimizer.step()
        wanted = [p.full_tensor() for p in model.parameters()]
        moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
        gather(model)
        ckpt.save({"model": model, "optimizer": optimizer}, where, no_dist=True)
        again = sharded(mesh, made(), reshard_after_forward=False)
        other = torch.optim.AdamW(again.parameters(), lr=0.1)
        gather(again)
        ckpt.load({"model": again, "optimizer": other}, where, no_dist=True)
        again.reshard()
        again[0].reshard()
        for one, whole, moment in zip(again.parameters(), wanted, moments, strict=True):
            assert torch.equal(one.full_tensor(), whole)
            assert torch.equal(other.state[one]["exp_avg"].full_tensor(), moment)

    run_on_mesh((1,), body)


def test_gradients_are_those_of_the_sharded_parameters_while_gathered() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, made(), reshard_after_forward=False)
        parameters = list(model.parameters())
        model(X).square().mean().backward()
        model(X)
        grads = gradient_state_dict(model)
        assert all(grad is p.grad for grad, p in zip(grads.values(), parameters, strict=True))
        model(X)
        load_gradient_state_dict(model, {name: 2 * grad for name, grad in grads.items()})
        model(X)
        model.zero_grad()
        assert all(p.grad is None for p in parameters)

    run_on_mesh((2,), body)


def test_gathered_modules_move_and_are_copied_as_sharded_ones() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, made(), reshard_after_forward=False)
        model(X)
        twin = copy.deepcopy(model)
        assert all(kinds(twin))
        model(X)
        model.float()
        assert all(kinds(model))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model(X.float()).dtype == torch.float32
        assert twin(X).dtype == torch.float64

    run_on_mesh((2,), body)


def written(model: Any) -> None:
    with torch.no_grad():
        model.weight.add_(1)


def frozen(model: Any) -> None:
    with torch.no_grad():
        model.unshard()
    model.bias.requires_grad_(True)


@pytest.mark.parametrize("change", [written, frozen])
@pytest.mark.parametrize("then", ["reshard", "forward", "backward"])
def test_changes_of_gathered_parameters_are_refused(
    change: Callable[[Any], None], then: str
) -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = linear()
        model.bias.requires_grad_(False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        model.unshard()
        loss = model(X).sum()
        change(model)
        follow = {"reshard": model.reshard, "forward": partial(model, X), "backward": loss.backward}
        with pytest.raises(PlacementError, match="changes a copy"):
            follow[then]()
        assert kinds(model) == [True, True]
        model(X).sum().backward()

    run_on_mesh((2,), body)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gathered_parameters_have_no_gradients_to_clip() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        model.unshard()
        assert not nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model.reshard()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.full_tensor() > 1

    run_on_mesh((2,), body)
