"""Parameters of tensor subclasses, and those whose classes say what is gathered of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtckpt.dtensor import DeviceMesh, DTensor, PlacementError
from dtckpt.dtensor.fsdp import MixedPrecisionPolicy, fully_shard
from tests.dtensor.rank_meshes import groups_over_several_axes, run_on_mesh

X = torch.linspace(-1, 1, 24).view(3, 8)
_tensor: Any = Tensor


class Wrapped(Tensor):
    """A tensor in a tensor; its views are not known to torch as such."""

    value: Tensor

    @staticmethod
    def __new__(cls: Any, value: Tensor) -> Any:
        return _tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), dtype=value.dtype, device=value.device
        )

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["value"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(tensors["value"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.value})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda one: one.value, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            return args[0]
        return pytree.tree_map_only(Tensor, cls, result)


class Rounded(Wrapped):
    """Gathered as whole numbers of a scale that all ranks share, and used so."""

    seen: list[tuple[Any, ...]]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        module.seen.append((mesh, outer_size, outer_stride, mp_policy))
        scale = torch.tensor(0.01)
        return ((self.value / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert out is None
        assert isinstance(outputs, tuple)
        (numbers,), (scale,) = outputs, metadata
        whole = (numbers * scale).to(param_dtype)
        return whole, (numbers, whole)


class Old(Wrapped):
    """Takes the mesh alone, and gives two tensors, padded to one size where rows are too few."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        rows = -(-8 // mesh.size())
        padded = torch.full((rows, *self.value.shape[1:]), torch.nan)
        padded[: self.value.shape[0]] = self.value
        return (padded, torch.tensor(1.0)), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        padded, ones = outputs
        assert ones.tolist() == [1.0] * len(ones)
        return Wrapped(padded), (padded,)


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wrapped: Any) -> Tensor:
        return wrapped.value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Any = nn.functional.linear(x, self.weight, self.bias)
        return Unwrap.apply(result) if isinstance(result, Wrapped) else result


torch.manual_seed(0)
START = nn.Sequential(Layer(), nn.Tanh(), Layer())


def made(kind: type[Wrapped]) -> Any:
    model: Any = copy.deepcopy(START)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def sharded(mesh: DeviceMesh, kind: type[Wrapped], **options: Any) -> Any:
    model = made(kind)
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class Straight(torch.autograd.Function):
    """Weights as they are gathered, whose gradients go to those that are trained."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (weight / torch.tensor(0.01)).round().to(torch.int8) * torch.tensor(0.01)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class RoundedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = Straight.apply(self.weight)
        return nn.functional.linear(x, weight, self.bias)


def rounded() -> nn.Module:
    whole: Any = copy.deepcopy(START)
    for layer in (whole[0], whole[2]):
        layer.__class__ = RoundedLayer
    return whole


def assert_trains_like(model: Any, whole: nn.Module) -> None:
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, whole)]
    for _ in range(3):
        losses = [one(X).square().mean() for one in (model, whole)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        for (name, p), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(p.grad, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), other.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("shape", "reshard"), [((1,), True), ((2,), True), ((2,), False), ((3,), True), ((2, 2), True)]
)
def test_classes_say_what_is_gathered(shape: tuple[int, ...], reshard: bool) -> None:
    whole = rounded()

    def body(mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        model = sharded(mesh, Rounded, reshard_after_forward=reshard, mp_policy=policy)
        assert_trains_like(model, copy.deepcopy(whole))
        assert isinstance(model[0].weight.to_local(), Rounded)
        given, size, stride, seen_policy = model[0].seen[0]
        assert given.size() == shape[-1]
        assert given.ndim == 1
        assert (size, stride) == (torch.Size([8, 8]), (8, 1))
        assert seen_policy is policy
        gathers = 3 * (2 if reshard else 1)
        assert len(model[0].seen) == gathers

    run_on_mesh(shape, body, ("replicate", "shard")[-len(shape) :])


def test_a_smaller_group_keeps_no_parts_of_what_a_class_has_gathered() -> None:
    whole = rounded()

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, Rounded, reshard_after_forward=2)
        assert_trains_like(model, copy.deepcopy(whole))

    with groups_over_several_axes():
        run_on_mesh((4,), body)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [Old, Wrapped])
def test_subclasses_train_as_plain_parameters(kind: type[Wrapped], size: int) -> None:
    """``Old`` pads what it has gathered, and gets a whole subclass; ``Wrapped`` has no methods."""

    def body(mesh: DeviceMesh) -> None:
        model = sharded(mesh, kind)
        local = model[0].weight.to_local()
        assert type(local) is kind
        assert_trains_like(model, copy.deepcopy(START))
        assert type(model[0].weight.to_local()) is kind
        model.unshard()
        assert isinstance(model[2].weight, Wrapped) == (kind is Old)

    run_on_mesh((size,), body)


def test_methods_may_be_attributes_of_a_local_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(copy.deepcopy(START), mesh=mesh)
        local: Any = model[0].weight._local_tensor
        for name, method in vars(Rounded).items():
            if name.startswith("fsdp_"):
                setattr(local, name, method.__get__(local))
        local.value = local
        whole: Any = copy.deepcopy(START)
        whole[0].__class__ = RoundedLayer
        torch.testing.assert_close(model(X), whole(X))
        assert model[0].seen

    run_on_mesh((2,), body)


def test_parameters_on_meta_are_made_and_gathered() -> None:
    def body(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            model: Any = nn.Sequential(Layer())
            model[0].weight = nn.Parameter(Rounded(model[0].weight.detach()))
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        weight: Any = model[0].weight
        assert type(weight.to_local()) is Rounded
        with torch.no_grad():
            model[0].weight.fill_(0.5)
            model[0].bias.zero_()
        assert torch.equal(model(torch.ones(1, 8)), torch.full((1, 8), 4.0))

    run_on_mesh((2,), body)


class Half(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError


class Wrong(Old):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Short(Old):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.value[1:],), None


class Bare(Old):
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return outputs[0]


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Half, "must have both"),
        (Wrong, "must take mesh"),
        (Short, "'0.weight'.*parts of unequal sizes"),
        (Bare, "must return the whole tensor"),
    ],
)
def test_what_cannot_be_gathered_is_refused_on_all_ranks(kind: type[Wrapped], match: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        model = fully_shard(nn.Sequential(made(kind)[0]), mesh=mesh)
        with pytest.raises(PlacementError, match=match):
            model(X)

    run_on_mesh((3,), body)
