"""Programs that ask for whole parameters at unusual times, or change them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.dtensor.fsdp import fully_shard, register_fsdp_forward_method
from dtckpt.dtensor.fsdp.state import states_below
from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.dtensor.rank_meshes import run_on_mesh

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear() -> nn.Linear:
    return nn.Linear(4, 4, dtype=torch.float64)


def half(values: Tensor, mesh: DeviceMesh) -> Tensor:
    return values.chunk(mesh.size())[mesh.get_local_rank()]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def assert_same_gradients(made: nn.Module, whole: nn.Module) -> None:
    wanted = gradients(whole)
    for name, grad in gradients(made).items():
        torch.testing.assert_close(grad, wanted[name], msg=name)


def assert_trains_sharded(start: nn.Module) -> None:
    """Compare gradients of one sharded unit on two ranks with those of the whole module."""
    whole = copy.deepcopy(start)
    whole(X).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        model(half(X, mesh)).square().mean().backward()
        assert_same_gradients(model, whole)

    run_on_mesh((2,), body)


class Inner(nn.Module):
    """Elementwise on its parameters, and perhaps made anew in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.v = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))
        self.deep = linear()
        self.reentrant = reentrant

    def part(self, z: Tensor) -> Tensor:
        return torch.tanh(self.deep(z * self.w)) * self.v

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("around", [False, True])
def test_parts_made_anew_within_a_unit_and_around_it(reentrant: bool | None, around: bool) -> None:
    start = nn.Sequential(linear(), Inner(reentrant), linear())
    whole = copy.deepcopy(start)
    whole(X).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        if around:
            fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(half(X, mesh)).square().mean().backward()
        assert_same_gradients(model, whole)
        assert not any(state.unit.is_whole for state in states_below(model))

    run_on_mesh((2,), body)


def test_activations_of_a_unit_that_is_made_anew_are_not_kept() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Sequential(linear(), nn.Tanh(), linear()), mesh=mesh)
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = model(half(X, mesh))
        assert len(kept) == 3  # the inputs of the layers and the result of tanh, no parameter
        out.sum().backward()

    run_on_mesh((2,), body)


@dataclass
class Out:
    """An output that torch's trees do not look into."""

    value: Tensor


class Odd(nn.Module):
    """Hands on tensors where hooks do not see them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin = linear()
        self.scale = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.kind = kind
        self.aside: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.lin(x) * self.scale) * self.scale
        if self.kind == "class":
            return Out(y)
        if self.kind == "aside":
            self.aside = y.square().sum()
        if self.kind == "weight":
            return y, self.lin.weight[:2]
        return y


@pytest.mark.parametrize("kind", ["class", "aside", "weight"])
@pytest.mark.parametrize("is_root", [False, True])
def test_memory_is_there_wherever_a_backward_pass_begins(kind: str, is_root: bool) -> None:
    start = Odd(kind)

    def loss_of(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        if kind == "class":
            return out.value.square().mean()
        if kind == "aside":
            found: Any = (model if isinstance(model, Odd) else model[0]).aside
            return found / 16
        return out[0].square().mean() + out[1].square().sum()

    whole = copy.deepcopy(start)
    if kind == "aside":
        whole(X)
        assert whole.aside is not None
        (whole.aside / 32).backward()
    else:
        loss_of(whole, X).backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        if not is_root:
            model = nn.Sequential(fully_shard(model, mesh=mesh))
        fully_shard(model, mesh=mesh)
        loss_of(model, half(X, mesh)).backward()
        assert_same_gradients(model if is_root else model[0], whole)
        with torch.no_grad():
            out = model(X)
        if kind == "weight":
            torch.testing.assert_close(out[1], start.lin.weight[:2].detach())

    run_on_mesh((2,), body)


class Either(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return (self.a if first else self.b)(x)


def test_a_parameter_that_only_some_ranks_use_counts_as_zero_on_others() -> None:
    start = Either()
    whole = copy.deepcopy(start)
    ((whole(X[:2], True).square().sum() + whole(X[2:], False).square().sum()) / 2).backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        model(half(X, mesh), mesh.get_local_rank() == 0).square().sum().backward()
        assert_same_gradients(model, whole)
        model.zero_grad()
        model(X, True).sum().backward()
        assert model.a.weight.grad is not None
        assert model.b.weight.grad is None

    run_on_mesh((2,), body)


@pytest.mark.parametrize("sharded", [[1], [0, 1]])
def test_tied_parameters_of_two_units_are_refused(sharded: list[int]) -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = nn.Sequential(linear(), linear())
        model[1].weight = model[0].weight
        for place in sharded:
            fully_shard(model[place], mesh=mesh)
        with pytest.raises(PlacementError, match=r"'0.weight' is tied to '1.weight' of a part"):
            fully_shard(model, mesh=mesh)

    run_on_mesh((1,), body)


def test_copies_of_units_are_not_tied_to_them() -> None:
    def body(mesh: DeviceMesh) -> None:
        first = fully_shard(linear(), mesh=mesh)
        fully_shard(nn.Sequential(first, copy.deepcopy(first), linear()), mesh=mesh)(X)
        pair = nn.Sequential(linear(), linear())
        fully_shard(list(pair), mesh=mesh)
        fully_shard(nn.Sequential(pair[0], linear()), mesh=mesh)(X)  # has one of them

    run_on_mesh((1,), body)


def test_a_step_between_the_passes_is_an_error() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Sequential(linear(), linear()), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        first, second = (model(X).square().mean() for _ in range(2))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="between the forward pass and the backward pass"):
            second.backward()
        model(X).square().mean().backward()

    run_on_mesh((1,), body)


def test_second_derivatives_are_an_error() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Sequential(linear(), nn.Tanh(), linear()), mesh=mesh)
        parameters = list(model.parameters())
        loss = model(X).square().mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (loss + sum(g.square().sum() for g in grads)).backward()

    run_on_mesh((1,), body)


def test_lists_that_a_module_fills_are_the_callers() -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(self.lin(x))
            return cache[-1]

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(Fills(), mesh=mesh)
        cache: list[Tensor] = []
        model(X, cache)
        assert len(cache) == 1

    run_on_mesh((1,), body)


def test_loads_and_writes_between_passes_are_seen(tmp_path: Any) -> None:
    start = linear()

    def body(mesh: DeviceMesh) -> None:
        where = str(tmp_path / f"rank{mesh.get_local_rank()}")
        for keeps in (False, True):
            model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
            model.set_reshard_after_backward(not keeps)
            ckpt.save({"m": model.state_dict()}, where, no_dist=True, overwrite=True)
            before = model(X).detach()
            model.reshard()
            with torch.no_grad():
                model.weight.add_(1)
            assert not torch.equal(model(X), before)
            ckpt.load({"m": model.state_dict()}, where, no_dist=True)
            assert torch.equal(model(X), before)
            model.reshard()
            if not keeps:
                model.weight.data.zero_()
                model.bias.data.zero_()
                assert not model(X).any()

    run_on_mesh((1,), body)


def test_parameters_put_in_the_place_of_others_are_gathered_though_those_are_kept() -> None:
    start = linear()

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        other: Any = fully_shard(linear(), mesh=mesh)
        with torch.no_grad():
            other.weight.fill_(2.0)
            other.bias.fill_(3.0)
            wanted = other(X)
        model.set_reshard_after_backward(False)
        model.set_reshard_after_forward(False)
        model(X).sum().backward()
        # As many writes as those that were kept have had: none.
        state = {name: 1 * tensor for name, tensor in other.state_dict().items()}
        model.load_state_dict(state, assign=True)
        torch.testing.assert_close(model(X), wanted)
        asked: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        asked.unshard()
        asked.load_state_dict(state, assign=True)
        torch.testing.assert_close(asked(X), wanted)

    run_on_mesh((2,), body)


def test_another_dtype_is_taken_up_and_another_layout_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        model(X.float())
        model.double()
        out = model(X)
        assert out.dtype == torch.float64
        out.sum().backward()
        assert model.weight.grad.dtype == torch.float64
        whole = {
            name: distribute_tensor(value.full_tensor(), mesh, [Replicate()])
            for name, value in model.state_dict().items()
        }
        model.load_state_dict(whole, assign=True)
        with pytest.raises(PlacementError, match="'weight' was replaced by a parameter that is"):
            model(X)

    run_on_mesh((2,), body)


def test_writes_to_whole_parameters_are_refused() -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.lin.weight.clamp_(max=0.0)
            return self.lin(x)

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(Clamps(), mesh=mesh)
        with pytest.raises(PlacementError, match=r"lin.weight.* were written to"):
            model(X)
        assert isinstance(model.lin.weight, DTensor)

    run_on_mesh((1,), body)


def test_inference_first_leaves_training_as_it_is() -> None:
    start = nn.Sequential(linear(), linear())
    whole = copy.deepcopy(start)
    whole(X).square().mean().backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        with torch.inference_mode():
            model(X)
        model(half(X, mesh)).square().mean().backward()
        assert_same_gradients(model, whole)
        assert not any(state.unit.is_whole for state in states_below(model))

    run_on_mesh((2,), body)


def test_a_module_that_calls_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self.lin(self(x, again=False) if again else x)

    assert_trains_sharded(Twice())


def test_state_dicts_are_sharded_at_any_time() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()
            self.seen: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.state_dict(prefix="net.")
            return self.lin(x)

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(Looks(), mesh=mesh)
        model(X)
        assert list(model.seen) == ["net.lin.weight", "net.lin.bias"]
        assert all(isinstance(value, DTensor) for value in model.seen.values())

    run_on_mesh((1,), body)


def test_other_methods_may_have_whole_parameters() -> None:
    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x).square()

        def encode(self, x: Tensor, *, fails: bool = False) -> Tensor:
            """The layer alone."""
            if fails:
                raise ValueError("on purpose")
            return self.lin(x)

    start = Encodes()
    whole = copy.deepcopy(start)
    (whole.encode(X).mean() + whole(X).mean()).backward()

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        register_fsdp_forward_method(model, "encode")  # not sharded: nothing is done
        fully_shard(model, mesh=mesh)
        with pytest.raises(PlacementError, match="has no method 'decode'"):
            register_fsdp_forward_method(model, "decode")
        register_fsdp_forward_method(model, "encode")
        assert model.encode.__doc__ == "The layer alone."
        with pytest.raises(ValueError, match="on purpose"):
            model.encode(X, fails=True)
        assert isinstance(model.lin.weight, DTensor)
        (model.encode(half(X, mesh)).mean() + model(half(X, mesh)).mean()).backward()
        assert_same_gradients(model, whole)

    run_on_mesh((2,), body)


def test_inputs_may_be_distributed() -> None:
    """A plain whole parameter has a distributed gradient then."""
    start = nn.Sequential(linear(), nn.LayerNorm(4, dtype=torch.float64), linear())
    whole = copy.deepcopy(start)
    whole(X).square().mean().backward()

    def along_data(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(start), mesh=mesh)
        model(distribute_tensor(X, mesh, [Shard(0)])).square().mean().backward()
        assert_same_gradients(model, whole)

    def along_the_layers(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        row = RowwiseParallel(input_layouts=Shard(-1), use_local_output=False)
        plan = {"0": ColwiseParallel(use_local_output=False), "2": row}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        part = X.chunk(2)[mesh.get_local_rank("dp")]
        model(part).square().mean().backward()
        assert_same_gradients(model, whole)

    run_on_mesh((2,), along_data)
    run_on_mesh((2, 2), along_the_layers, ("dp", "tp"))
