"""The dtypes in which sharded modules compute, and in which their gradients are summed and kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import DeviceMesh, DTensor
from dtckpt.dtensor.fsdp import MixedPrecisionPolicy, fully_shard, gradient_state_dict
from tests.dtensor.rank_meshes import run_on_mesh

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        return self.norm(self.linear(x).to(self.norm.weight.dtype))


torch.manual_seed(0)
START = Net()  # the ranks are threads, and share torch's generator


def made(mesh: DeviceMesh, prepare: Any = None, **options: Any) -> Any:
    model = copy.deepcopy(START)
    if prepare is not None:
        prepare(model)
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, **options))


def stepped(model: Any, rank: int) -> list[Tensor]:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def terms(model: Any, size: int) -> list[dict[str, Tensor]]:
    """The gradients of each rank before they are summed, as one device has them."""
    found: list[dict[str, Tensor]] = []
    for rank in range(size):
        one = copy.deepcopy(model).to(BF16)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank)).to(BF16)
        one(x).square().sum().backward()
        found.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    return found


def test_gradients_are_reduced_in_the_dtype_of_parameters_by_default() -> None:
    parts = terms(START, 4)

    def body(mesh: DeviceMesh) -> None:
        model = made(mesh)
        stepped(model, mesh.get_rank())
        for name, p in model.named_parameters():
            wanted = torch.stack([part[name].float() for part in parts]).mean(0)
            assert p.grad.dtype == torch.float32
            # A sum in bf16, or one that is rounded to it, is further away.
            torch.testing.assert_close(p.grad.full_tensor(), wanted, rtol=1e-6, atol=1e-6)

    run_on_mesh((4,), body)


@pytest.mark.parametrize(
    ("options", "grad_dtype", "sent", "kept"),
    [
        ({}, torch.float32, torch.float32, torch.float32),
        ({"reduce_dtype": BF16}, torch.float32, BF16, torch.float32),
        ({}, BF16, BF16, BF16),
        ({"reduce_dtype": torch.float32}, BF16, torch.float32, BF16),
        ({}, None, BF16, BF16),
        ({"reduce_dtype": torch.float32}, None, torch.float32, torch.float32),
    ],
)
def test_grad_dtype_of_parameters_is_followed(
    options: dict[str, Any],
    grad_dtype: torch.dtype | None,
    sent: torch.dtype,
    kept: torch.dtype,
) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch has no Tensor.grad_dtype")

    def prepare(model: nn.Module) -> None:
        for p in model.parameters():
            given: Any = p
            given.grad_dtype = grad_dtype

    def body(mesh: DeviceMesh) -> None:
        model = made(mesh, prepare, **options)
        model.set_requires_gradient_sync(False)
        stepped(model, 0)
        (state,) = model._states(recurse=True)
        assert {one.dtype for one in state.unit.gradients.waiting.values()} == {sent}
        model.set_requires_gradient_sync(True)
        grads = stepped(model, 0)
        for p, grad in zip(model.parameters(), grads, strict=True):
            assert p.grad_dtype == grad_dtype
            assert isinstance(grad, DTensor)
            assert grad.dtype == grad.to_local().dtype == kept

    run_on_mesh((2,), body)


def test_parameters_in_which_a_state_dict_is_assigned_keep_grad_dtype() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch has no Tensor.grad_dtype")

    def body(mesh: DeviceMesh) -> None:
        def prepare(model: Any) -> None:
            model.linear.weight.grad_dtype = BF16

        model = made(mesh, prepare)
        state = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        stepped(model, 0)
        assert model.linear.weight.grad.dtype == BF16
        assert model.norm.weight.grad.dtype == torch.float32
        assert gradient_state_dict(model)["linear.weight"].dtype == BF16

    run_on_mesh((2,), body)


def test_chosen_parameters_keep_their_dtype() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(START)
        asked: list[nn.Parameter] = []

        def choose(parameter: nn.Parameter) -> torch.dtype | None:
            asked.append(parameter)
            return torch.float32 if parameter in set(model.norm.parameters()) else None

        before = list(model.parameters())
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose)
        sharded: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
        wanted = {
            "linear.weight": BF16,
            "linear.bias": BF16,
            "norm.weight": torch.float32,
            "norm.bias": torch.float32,
        }
        for one in (sharded, copy.deepcopy(sharded)):
            stepped(one, mesh.get_rank())
            assert one.seen == wanted
        assert all(one is other for one, other in zip(asked, before, strict=True))

    run_on_mesh((2,), body)


def test_choosing_another_dtype_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = nn.Linear(2, 2)
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: torch.float16)
        with pytest.raises(ValueError, match="float16 for 'weight'"):
            fully_shard(model, mesh=mesh, mp_policy=policy)
        assert not isinstance(model.weight, DTensor)

    run_on_mesh((1,), body)
