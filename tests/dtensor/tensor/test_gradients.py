"""Gradients: checked against finite differences, and all that autograd does around them."""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard, strict
from dtckpt.dtensor.dtensor import DTensor, distribute_tensor
from dtckpt.dtensor.geometry.placement import Placement
from dtckpt.errors import PlacementError

from ..rank_meshes import assert_holds, run_on_mesh, scattered

Body = Callable[..., Tensor]

CHECKED: list[tuple[str, Body, tuple[tuple[int, ...], ...]]] = [
    ("pointwise", lambda a, b: (a * b).tanh() / (b * b + 1), ((3, 2), (2,))),
    ("reduction", lambda a: a.var(0) + a.mean(0).square() + a.logsumexp(0), ((3, 2),)),
    ("extremes", lambda a: a.amax(0) + a.max(0).values, ((3, 2),)),
    ("norm", lambda a: torch.linalg.vector_norm(a, dim=0) + a.norm(3), ((3, 2),)),
    ("scan", lambda a: a.cumsum(0) * a.cumprod(1), ((3, 2),)),
    ("contraction", lambda a, b: torch.einsum("ik,kj->ij", a, b), ((3, 2), (2, 3))),
    ("view", lambda a: a.reshape(2, 3).t()[1:] * 2, ((3, 2),)),
    ("join", lambda a, b: torch.cat([a, b]).unbind(1)[0], ((3, 2), (2, 2))),
    ("softmax", lambda a: a.softmax(0) * a.log_softmax(1), ((3, 2),)),
    ("layer_norm", lambda a, w: F.layer_norm(a, (2,), w), ((3, 2), (2,))),
    ("where", lambda a, b: torch.where(a > b, a * a, b * a), ((3, 2), (3, 2))),
]

LAYOUTS: list[list[Placement]] = [[Shard(0)], [Shard(1)]]


def _laid_out(mesh: DeviceMesh, whole: Tensor, placements: list[Placement]) -> DTensor:
    """Return a plain, whole input distributed, differentiably."""
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, shape=whole.shape)
    fitting = [
        p if not isinstance(p, Shard) or p.dim < whole.ndim else Shard(0) for p in placements
    ]
    return replicated.redistribute(placements=fitting)


def _run(function: Body, mesh: DeviceMesh, placements: list[Placement], *wholes: Tensor) -> Tensor:
    result: Any = function(*(_laid_out(mesh, whole, placements) for whole in wholes))
    return result.full_tensor()


def test_gradients_of_first_and_second_order() -> None:
    def body(mesh: DeviceMesh) -> None:
        for index, (name, function, shapes) in enumerate(CHECKED):
            wholes = [
                (torch.arange(1.0, 1 + torch.Size(s).numel(), dtype=torch.float64) * 0.37 + i)
                .sin()
                .view(s)
                .requires_grad_()
                for i, s in enumerate(shapes)
            ]
            for placements in LAYOUTS:
                run = partial(_run, function, mesh, placements)
                try:
                    with strict():
                        assert torch.autograd.gradcheck(run, wholes)
                        if placements != LAYOUTS[index % 2]:  # second order costs most
                            continue
                        # Given, as torch would draw another one on every rank.
                        weights = torch.linspace(1, 2, run(*wholes).numel(), dtype=torch.float64)
                        weights = weights.view_as(run(*wholes)).requires_grad_()
                        assert torch.autograd.gradgradcheck(run, wholes, weights)
                except Exception as error:
                    raise AssertionError(f"{name} with {placements}: {error}") from error

    run_on_mesh((2,), body)


def test_ways_between_local_and_distributed() -> None:
    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        local = torch.full((2,), 1.0 + rank, requires_grad=True)
        made = DTensor.from_local(local, mesh, [Shard(0)], shape=(4,))
        (made * scattered(torch.arange(4.0), mesh, [Shard(0)])).sum().backward()
        torch.testing.assert_close(local.grad, torch.arange(4.0)[2 * rank : 2 * rank + 2])

        terms = torch.ones(4, requires_grad=True)
        made = DTensor.from_local(terms, mesh, [Partial()], grad_placements=[Replicate()])
        (made * scattered(torch.arange(4.0), mesh, [Replicate()])).sum().backward()
        torch.testing.assert_close(terms.grad, torch.arange(4.0))

        leaf = scattered(torch.ones(4), mesh, [Replicate()]).detach().requires_grad_()
        part: Any = leaf.to_local(grad_placements=[Partial()])  # each rank does another half
        part[2 * rank : 2 * rank + 2].sum().backward()
        assert leaf.grad is not None
        assert_holds(leaf.grad, torch.ones(4))

        leaf = scattered(torch.ones(4), mesh, [Shard(0)]).detach().requires_grad_()
        moved = leaf.redistribute(
            placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
        assert moved.dtype == torch.bfloat16
        moved.float().square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert_holds(leaf.grad, torch.full((4,), 2.0))
        assert leaf.grad.placements == (Shard(0),)

    run_on_mesh((2,), body)


class Net(nn.Module):
    """Two layers, of which the first may be recomputed in backward."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        for index, parameter in enumerate(self.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            parameter.data.copy_(values * (index + 1))
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""

        def hidden(given: Tensor) -> Tensor:
            return self.first(given).tanh()

        if self.recompute is None:
            return self.second(hidden(inputs))
        made: Any = checkpoint(hidden, inputs, use_reentrant=self.recompute)
        return self.second(made)


def _distributed(net: Net, mesh: DeviceMesh) -> Net:
    for module, placement in ((net.first, Shard(0)), (net.second, Replicate())):
        for name, parameter in list(module.named_parameters()):
            made = distribute_tensor(parameter.detach(), mesh, [placement])
            setattr(module, name, nn.Parameter(made))
    return net


INPUTS = torch.linspace(-1, 2, 24).view(6, 4)


def _reference() -> Net:
    net = Net()
    net(INPUTS).square().sum().backward()
    return net


def _assert_same_gradients(net: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    for ours, whole in zip(net.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert whole.grad is not None
        assert_holds(ours.grad, whole.grad, **tolerance)


def test_recomputing_and_accumulating() -> None:
    reference = _reference()

    def body(mesh: DeviceMesh) -> None:
        for recompute in (None, False, True):
            net = _distributed(Net(recompute), mesh)
            for rows in INPUTS.split(2):  # micro-batches, of which one rank may have no row
                inputs = scattered(rows, mesh, [Shard(0)]).detach().requires_grad_()
                with strict():
                    net(inputs).square().sum().backward()
            _assert_same_gradients(net, reference)

    run_on_mesh((3,), body)


def test_hooks_of_tensors_and_modules() -> None:
    reference = _reference()

    def body(mesh: DeviceMesh) -> None:
        net = _distributed(Net(), mesh)
        seen: list[str] = []
        for name, parameter in net.named_parameters():

            def note(gradient: Tensor, name: str = name) -> None:
                assert isinstance(gradient, DTensor)
                seen.append(f"before {name}")

            def step(parameter: Tensor, name: str = name) -> None:
                assert isinstance(parameter.grad, DTensor)
                seen.append(f"after {name}")

            parameter.register_hook(note)
            parameter.register_post_accumulate_grad_hook(step)
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            output.retain_grad()
            kept.append(output)

        def back(module: nn.Module, inputs: Any, outputs: Any) -> None:
            assert all(isinstance(gradient, DTensor) for gradient in outputs)
            seen.append("module")

        net.first.register_forward_hook(keep)
        net.second.register_full_backward_hook(back)
        packed: list[torch.Size] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = net(scattered(INPUTS, mesh, [Shard(0)])).square().sum()
        loss.backward()
        _assert_same_gradients(net, reference)
        names = [name for name, _ in net.named_parameters()]
        assert sorted(seen) == sorted(
            ["module", *(f"{when} {name}" for when in ("before", "after") for name in names)]
        )
        assert isinstance(kept[0].grad, DTensor)
        assert torch.Size((6, 5)) in packed

    run_on_mesh((2,), body)


def test_modules_without_gradients_and_copies_of_them() -> None:
    reference = _reference()

    def body(mesh: DeviceMesh) -> None:
        net = _distributed(Net(), mesh)
        inputs = scattered(INPUTS, mesh, [Shard(0)])
        with torch.no_grad():
            assert not net(inputs).requires_grad
        with torch.inference_mode():
            assert_holds(net(inputs), reference(INPUTS).detach())
        twin = copy.deepcopy(net)
        twin(inputs).square().sum().backward()
        _assert_same_gradients(twin, reference)
        assert all(parameter.grad is None for parameter in net.parameters())
        parameters = {name: parameter * 1 for name, parameter in net.named_parameters()}
        outputs = torch.func.functional_call(net, parameters, (inputs,))
        gradients = torch.autograd.grad(outputs.square().sum(), list(parameters.values()))
        for gradient, whole in zip(gradients, reference.parameters(), strict=True):
            assert whole.grad is not None
            assert_holds(gradient, whole.grad)

    run_on_mesh((2,), body)


def test_gradients_of_gradients() -> None:
    def penalty(net: nn.Module, inputs: Tensor) -> Tensor:
        gradients = torch.autograd.grad(
            net(inputs).square().sum(), list(net.parameters()), create_graph=True
        )
        total: Any = sum(gradient.square().sum() for gradient in gradients)
        return total

    reference = Net()
    penalty(reference, INPUTS).backward()

    def body(mesh: DeviceMesh) -> None:
        net = _distributed(Net(), mesh)
        with strict():
            penalty(net, scattered(INPUTS, mesh, [Shard(0)])).backward()
        _assert_same_gradients(net, reference, rtol=1e-3, atol=1e-2)

    run_on_mesh((3,), body)


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference = Net()
        expected = reference(INPUTS)
        expected.float().square().sum().backward()

    def body(mesh: DeviceMesh) -> None:
        net = _distributed(Net(), mesh)
        with torch.autocast("cpu", dtype=torch.bfloat16), strict():
            outputs = net(scattered(INPUTS, mesh, [Shard(0)]))
            assert_holds(outputs, expected.detach(), rtol=0.02, atol=0.02)
            outputs.float().square().sum().backward()
        for ours, whole in zip(net.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            assert whole.grad is not None
            assert_holds(ours.grad, whole.grad, rtol=0.05, atol=0.5)

    run_on_mesh((2,), body)


def _leaves(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> list[DTensor]:
    """The same leaf, made in all ways."""
    assigned = scattered(whole, mesh, placements)
    assigned.requires_grad = True
    stored = scattered(whole.t().contiguous(), mesh, [Replicate()] * mesh.ndim).requires_grad_()
    with torch.no_grad():
        stored.t_()
    stored.data = scattered(whole, mesh, placements)
    made: Any = nn.Parameter(scattered(whole, mesh, placements))
    frozen = copy.deepcopy(made).requires_grad_(False)
    constructed = DTensor(made.to_local().detach(), made._spec, requires_grad=True)
    return [made, assigned, stored, copy.deepcopy(made), frozen.requires_grad_(), constructed]


def test_gradients_of_leaves_lie_where_these_do() -> None:
    whole, inputs = torch.randn(5, 3), torch.randn(6, 3)
    reference = whole.clone().requires_grad_()
    for _ in range(2):
        (inputs @ reference.t()).square().sum().backward()
    assert reference.grad is not None

    def body(mesh: DeviceMesh) -> None:
        rows = scattered(inputs, mesh, [Shard(0), Replicate()])
        for placements in ([Shard(0)] * 2, [Replicate(), Shard(1)], [Replicate()] * 2):
            leaves = _leaves(whole, mesh, list(placements))
            for leaf in leaves:
                for _ in range(2):
                    (rows @ leaf.t()).square().sum().backward()
                assert type(leaf.grad) is DTensor
                assert leaf.grad.placements == leaf.placements == tuple(placements)
                assert_holds(leaf.grad, reference.grad, rtol=1e-4, atol=1e-4)  # pyright: ignore
            loss = (rows @ leaves[0].t()).square().sum()
            found = torch.autograd.grad(loss, leaves[0], create_graph=True)
            assert found[0].placements == leaves[0].placements  # pyright: ignore
            assert found[0].requires_grad
        pending = scattered(whole, mesh, [Partial(), Replicate()]).requires_grad_()
        (rows @ pending.t()).sum().backward()
        assert pending.grad.placements == (Replicate(), Replicate())  # pyright: ignore
        moved = scattered(whole, mesh, [Shard(1), Replicate()]).requires_grad_()
        weights = scattered(torch.arange(15.0), mesh, [Shard(0), Replicate()])
        (moved.view(-1) * weights).sum().backward()
        assert type(moved.grad) is DTensor
        moved.grad[1:3].mul_(2)  # a tensor, not a view that was copied
        twice = torch.arange(15.0).view(5, 3)
        twice[1:3] *= 2
        assert_holds(moved.grad, twice)
        copied: Any = nn.Parameter(moved.detach().view(-1))
        (copied * weights).sum().backward()
        assert type(copied.grad) is DTensor
        assert_holds(copied.grad, torch.arange(15.0))

    run_on_mesh((2, 2), body)


def test_optimizer_states_of_partial_gradients_are_no_larger_than_parameters() -> None:
    def body(mesh: DeviceMesh) -> None:
        for name in ("SGD", "Rprop", "Muon"):
            options: dict[str, Any] = {} if name == "Rprop" else {"momentum": 0.9}
            net = nn.Linear(3, 5, bias=False)
            net.weight = nn.Parameter(scattered(torch.ones(5, 3), mesh, [Shard(0)]))
            optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1, **options)
            net(scattered(torch.ones(8, 3), mesh, [Shard(0)])).sum().backward()
            optimizer.step()
            states = [s for s in optimizer.state[net.weight].values() if s.ndim == 2]
            assert states
            assert all(state.placements == (Shard(0),) for state in states)

    run_on_mesh((4,), body)


def test_plain_gradients_of_leaves() -> None:
    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: DTensor, scale: float) -> Tensor:
            ctx.scale = scale
            return tensor * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return torch.full((4,), ctx.scale), None

    def body(mesh: DeviceMesh) -> None:
        leaf = scattered(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        Ones.apply(leaf, 3.0).sum().backward()  # pyright: ignore
        assert leaf.grad.placements == (Shard(0),)
        assert_holds(leaf.grad, torch.full((4,), 3.0))
        with pytest.raises(PlacementError, match="differs between ranks"):
            Ones.apply(leaf, float(mesh.get_rank())).sum().backward()  # pyright: ignore

    run_on_mesh((2,), body)


def test_gradients_that_a_formula_leaves_out() -> None:
    whole = torch.arange(1.0, 7.0).view(3, 2)

    def body(mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Replicate()):
            x = scattered(whole, mesh, [placement]).requires_grad_()
            assert torch.autograd.grad(x.norm(0), x, allow_unused=True) == (None,)
            same = x.redistribute(placements=[placement])
            assert torch.autograd.grad(same.norm(0), x, allow_unused=True) == (None,)
            (x.norm(0) + x.sum() + same.norm(0)).backward()
            assert_holds(x.grad, torch.ones_like(whole))

    run_on_mesh((2,), body)
