"""Two ranks of a job: transforms of ``torch.func`` and forward-mode derivatives of DTensors.

Run by test_transforms, one process per rank: levels of forward mode belong to a process.
"""

# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    redistribute_many,
)
from dtckpt.errors import PlacementError, UnsupportedOp
from tests.processes import import_compiler, join_group, leave_group

X, T = torch.arange(12.0).view(4, 3).sin(), torch.arange(12.0).view(4, 3).cos()
WEIGHT = torch.arange(15.0).view(3, 5).sin()
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def whole(found: Any) -> Any:
    if isinstance(found, tuple | list):
        return [whole(item) for item in found]
    return found.full_tensor() if isinstance(found, DTensor) else found


def sums(x: Tensor) -> Tensor:
    return (x.sin() * x).sum(0)


def transforms(weight: Tensor) -> list[Callable[[Tensor, Tensor], Any]]:
    def loss(x: Tensor) -> Tensor:
        return (x @ weight).tanh().sum()

    return [
        lambda x, t: jvp(sums, (x,), (t,)),
        lambda x, t: jvp(loss, (x,), (t,)),
        lambda x, t: vjp(sums, x)[1](t[0]),
        lambda x, t: grad(loss)(x),
        lambda x, t: grad(lambda y: grad(loss)(y).square().sum())(x),
        lambda x, t: vmap(lambda row: row @ weight)(x),
        lambda x, t: vmap(lambda column: column.sin().sum(), in_dims=1)(x),
        lambda x, t: vmap(grad(loss))(x),
        lambda x, t: jacrev(sums)(x),
        lambda x, t: jacfwd(sums)(x),
        lambda x, t: hessian(loss)(x),
        lambda x, t: jacobian(sums, x, vectorize=True),
    ]


def check_transforms(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(WEIGHT, mesh, [Replicate()])
    for placement in PLACEMENTS:
        x, t = (distribute_tensor(tensor, mesh, [placement]) for tensor in (X, T))
        for one, other in zip(transforms(weight), transforms(WEIGHT), strict=True):
            torch.testing.assert_close(whole(one(x, t)), whole(other(X, T)))


def tangents(function: Callable[[Any], Sequence[Tensor]], x: Tensor, t: Tensor) -> list[Any]:
    with forward.dual_level():
        return [forward.unpack_dual(made).tangent for made in function(forward.make_dual(x, t))]


def moves(a: Any) -> list[Tensor]:
    beside = a.detach()
    return [
        a.redistribute(placements=[Replicate()]).sin(),
        a.redistribute(placements=[Shard(1)], forward_dtype=torch.float64).sin(),
        a.full_tensor().sin(),
        DTensor.from_local(a.to_local(), a.device_mesh, a.placements, shape=a.shape).sin(),
        redistribute_many([beside, a], placements=[Shard(1)])[1].sin(),
    ]


def check_tangents_where_tensors_move(mesh: DeviceMesh) -> None:
    """They were dropped by redistribute, and by to_local without gradients."""
    expected = X.cos() * T
    for placement in PLACEMENTS:
        x, t = (distribute_tensor(tensor, mesh, [placement]) for tensor in (X, T))
        for tangent in tangents(moves, x, t):
            torch.testing.assert_close(whole(tangent).float(), expected)
        with torch.no_grad():
            (local,) = tangents(lambda a: [a.to_local()], x, t)
        torch.testing.assert_close(local, t.to_local())
        # One of a tensor that is not reduced: its terms add up to that of the whole.
        (term,) = tangents(lambda a: [a.sum(0).to_local()], x, t)
        parts = [Partial()] if placement == Shard(0) else [Shard(0)]
        parts = [Replicate()] if placement == Replicate() else parts
        torch.testing.assert_close(DTensor.from_local(term, mesh, parts).full_tensor(), T.sum(0))
    local = distribute_tensor(X, mesh, [Shard(0)]).to_local()
    (of_terms,) = tangents(
        lambda a: [DTensor.from_local(a, mesh, [Partial()]).redistribute()], local, local.cos()
    )
    of_parts = DTensor.from_local(local.cos(), mesh, [Partial()])
    torch.testing.assert_close(of_terms.to_local(), of_parts.full_tensor())


def check_refusals(mesh: DeviceMesh) -> None:
    x, t = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (X, T))
    with pytest.raises(UnsupportedOp, match=r"take torch\.func\.jvp"):
        linearize(sums, x)
    for make in (
        lambda part: DTensor.from_local(part, mesh, [Shard(0)]),
        lambda part: distribute_tensor(part, mesh, [Shard(0)]),
    ):
        # One rank raised where the other waited for what it would send.
        with pytest.raises(PlacementError, match=r"transform of torch\.func"):
            vmap(make)(X)
    with pytest.raises(PlacementError, match="reduced by other means than sums"):
        tangents(lambda a: [a.amax(0).to_local()], x, t)
    for gathered in (lambda a: sums(a.redistribute()), lambda a: sums(a.full_tensor())):
        with pytest.raises(PlacementError, match="one by one"):
            jacobian(gathered, x, vectorize=True)


def check_compiled_autograd(mesh: DeviceMesh) -> None:
    """Dynamo looked into the hook that reduces the gradient, and raised what nobody understands."""
    found: list[Tensor] = []
    enabled = compiled_autograd._enable(torch.compile(backend="eager"))
    for context in (nullcontext(), enabled):
        x = distribute_tensor(X, mesh, [Shard(0)])
        weight = distribute_tensor(WEIGHT, mesh, [Replicate()]).requires_grad_()
        total: Any = (x @ weight).tanh().sum()
        loss = total.redistribute().to_local()
        with context:
            loss.backward()
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.placements == (Replicate(),)
        found.append(weight.grad.to_local())
    torch.testing.assert_close(*found)


def main() -> None:
    join_group()
    mesh = init_device_mesh("cpu", (2,))
    check_transforms(mesh)
    check_tangents_where_tensors_move(mesh)
    check_refusals(mesh)
    check_compiled_autograd(mesh)
    leave_group()


before_fork = import_compiler


if __name__ == "__main__":
    main()
