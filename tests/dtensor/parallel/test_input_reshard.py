"""Replicated tensors that are saved for a backward pass are kept sharded."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import DeviceMesh, Mesh, PlacementError, distribute_module
from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtckpt.dtensor.parallel.input_reshard import input_reshard
from tests.dtensor.rank_meshes import run_on_mesh


class Mlp(nn.Module):
    """A sharded layer, a plain function and another sharded layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, dtype=torch.float64)
        self.down = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * 2).pow(2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_without_it(ranks: int) -> None:
    torch.manual_seed(0)
    model, given = Mlp(), torch.randn(5, 4, dtype=torch.float64)
    plain = given.clone().requires_grad_()
    model(plain).sum().backward()
    expected_of_x = 2 * torch.autograd.grad(model(plain).sum(), plain)[0]

    def body(mesh: DeviceMesh) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        made = parallelize_module(copy.deepcopy(model), mesh, plan)
        made.zero_grad()
        assert input_reshard(made, mesh, 0) is made
        x = given.clone().requires_grad_()
        for _ in range(2):
            made(x).sum().backward()
        torch.testing.assert_close(x.grad, expected_of_x)
        for name, parameter in made.named_parameters():
            whole: Any = parameter.grad
            expected: Any = model.get_parameter(name).grad
            torch.testing.assert_close(whole.full_tensor(), 2 * expected)

    run_on_mesh((ranks,), body)


def test_ranks_keep_their_parts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(8, 4, dtype=torch.float64)
    packed: dict[int, list[int]] = {}
    real = torch.autograd.graph.saved_tensors_hooks

    class Noting(real):
        def __init__(self, pack: Any, unpack: Any) -> None:
            def noting(tensor: Tensor) -> Any:
                kept = pack(tensor)
                if not isinstance(kept, Tensor):
                    own = packed.setdefault(threading.get_ident(), [])
                    own.append(kept.tensor.to_local().numel())
                return kept

            super().__init__(noting, unpack)

    # Once for all ranks, which are threads of this process.
    monkeypatch.setattr("dtckpt.dtensor.parallel.input_reshard.saved_tensors_hooks", Noting)

    def body(mesh: DeviceMesh) -> None:
        module = input_reshard(nn.Sequential(nn.Tanh(), nn.Tanh()), mesh, 0)
        x = given.clone().requires_grad_()
        module(x).sum().backward()
        assert packed[threading.get_ident()] == [16, 16]  # of 32 each

    run_on_mesh((2,), body)


def test_what_differs_between_ranks_is_kept_whole() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = torch.full((4, 4), 0.1 * (1 + mesh.get_rank()), requires_grad=True)
        module = input_reshard(nn.Tanh(), mesh, 0)
        module(x).sum().backward()
        expected = 1 - torch.tanh(x.detach()) ** 2
        torch.testing.assert_close(x.grad, expected)

    run_on_mesh((2,), body)


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    mesh = DeviceMesh("cpu", Mesh((1,)))
    module = input_reshard(Failing(), mesh, 0)
    with pytest.raises(RuntimeError, match="no"):
        module(torch.ones(2))
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        pass


def test_no_dim_changes_nothing_and_meshes_of_several_dims_are_refused() -> None:
    module = distribute_module(nn.Linear(2, 2), DeviceMesh("cpu", Mesh((1,))))
    assert input_reshard(module, DeviceMesh("cpu", Mesh((1,)))) is module
    assert not module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(PlacementError, match="a mesh of one dim"):
        input_reshard(module, DeviceMesh("cpu", Mesh((1, 1))), 0)
