"""Random programs of views and writes in place: ranks end with what one device ends with."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor

from ..rank_meshes import run_on_mesh, scattered

View = Callable[[Tensor], Tensor]
Write = Callable[[Tensor, Callable[[Tensor], Tensor]], object]
Step = tuple[int, Callable[..., Any], bool]
"""The tensor that is taken, what is done to it, and whether that is a view."""

PROGRAMS = 40


def _view(rng: random.Random, shape: tuple[int, ...]) -> View:
    dim = rng.randrange(max(len(shape), 1))
    size = shape[dim] if shape else 1
    index, parts = rng.randrange(max(size, 1)), rng.randrange(1, 4)
    start, step = rng.randrange(size + 1), rng.choice([1, 2])
    stop = rng.randrange(start, size + 1)
    order = rng.sample(range(len(shape)), len(shape))
    place = (*[slice(None)] * dim, slice(start, stop, step))
    columns = rng.choice([1, 2, 3])
    views: list[View] = [
        lambda x: x.view(-1),
        lambda x: x.view(-1, columns),
        lambda x: x.reshape(columns, -1),
        lambda x: x.flatten(),
        lambda x: x.select(dim, index),
        lambda x: x[(*[slice(None)] * dim, index)],
        lambda x: x[place],
        lambda x: x.narrow(dim, start, stop - start),
        lambda x: x.permute(order),
        lambda x: x.t(),
        lambda x: x.unsqueeze(dim),
        lambda x: x.squeeze(),
        lambda x: x.diagonal(),
        lambda x: x.unbind(dim)[index],
        lambda x: x.split(parts, dim)[-1],  # pyright: ignore[reportUnknownLambdaType]
        lambda x: x.chunk(parts, dim)[0],
        lambda x: x.unfold(dim, parts, parts),
        lambda x: x.view_as(x),
        lambda x: x.data,
        lambda x: x.detach(),
    ]
    return rng.choice(views)


def _write(rng: random.Random, shape: tuple[int, ...], *, follows: bool) -> Write:
    values = torch.tensor([rng.randrange(-4, 5) for _ in range(torch.Size(shape).numel())])
    values = values.to(torch.float32).view(shape)
    writes: list[Write] = [
        lambda x, _: x.zero_(),
        lambda x, _: x.fill_(7),
        lambda x, _: x.add_(3),
        lambda x, _: x.mul_(-2),
        lambda x, _: x.relu_(),
        lambda x, _: x.masked_fill_(x > 1, -1),
        lambda x, _: x.copy_(values),
        lambda x, there: x.copy_(there(values)),
        lambda x, there: x.sub_(there(values)),
        lambda x, _: x.__setitem__(..., 5),
    ]
    if not follows:
        writes.append(lambda x, _: vars(torch)["_foreach_add_"]([x], [2.0]))
        writes.append(lambda x, there: torch.add(there(values), 1, out=x))
    return rng.choice(writes)


def _program(rng: random.Random, whole: Tensor, *, follows: bool) -> list[Step]:
    """Return steps that one device can do; each view adds a tensor."""
    steps: list[Step] = []
    tensors = [whole.clone()]
    while len(steps) < 7:
        taken = rng.randrange(len(tensors))
        shape = tuple(tensors[taken].shape)
        if rng.random() < 0.55 and len(steps) < 5:
            view = _view(rng, shape)
            try:
                tensors.append(view(tensors[taken]))
            except (RuntimeError, IndexError):
                continue
            steps.append((taken, view, True))
        else:
            steps.append((taken, _write(rng, shape, follows=follows), False))
    return steps


def _run(steps: list[Step], x: Tensor, there: Callable[[Tensor], Tensor]) -> list[Tensor]:
    tensors = [x]
    for taken, do, is_view in steps:
        made = do(tensors[taken]) if is_view else do(tensors[taken], there)
        if is_view:
            tensors.append(made)
    return tensors


def _same(values: Tensor) -> Tensor:
    return values


def _case(rng: random.Random, ndim: int) -> tuple[Tensor, list[Any]]:
    shape = [rng.choice([1, 2, 3, 4, 5, 6]) for _ in range(rng.choice([1, 2, 2, 3]))]
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    kinds = [Shard(rng.randrange(len(shape))) for _ in range(3)] + [Replicate(), Partial()]
    return whole, [rng.choice(kinds) for _ in range(ndim)]


@pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning")
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2)])
def test_writes_through_chains_of_views_reach_all_of_them(mesh_shape: tuple[int, ...]) -> None:
    def body(mesh: DeviceMesh) -> None:
        for seed in range(PROGRAMS):
            rng = random.Random(f"{mesh_shape}{seed}")
            whole, placements = _case(rng, mesh.ndim)
            steps = _program(rng, whole, follows=False)
            expected = _run(steps, whole.clone(), _same)
            x = scattered(whole, mesh, placements)
            found: list[Any] = [*_run(steps, x, partial(distribute_tensor, device_mesh=mesh))]
            assert x.placements == scattered(whole, mesh, placements).placements
            for ours, one in zip(found, expected, strict=True):
                assert torch.equal((ours * 1).full_tensor(), one), (seed, whole.shape, placements)

    run_on_mesh(mesh_shape, body)


@pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning")
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_gradients_of_writes_through_chains_of_views(mesh_shape: tuple[int, ...]) -> None:
    def gradient(steps: list[Step], x: Tensor, there: Any) -> Tensor | None:
        leaf = x.requires_grad_()
        loss = (leaf * 0).sum()
        try:
            for index, tensor in enumerate(_run(steps, leaf * 1, there)):
                loss = loss + (tensor * tensor).sum() * (index + 1)
            loss.backward()
        except RuntimeError:  # a write that torch refuses, or of what the gradient needs
            return None
        return leaf.grad

    def body(mesh: DeviceMesh) -> None:
        for seed in range(PROGRAMS):
            rng = random.Random(f"{mesh_shape}{seed}")
            whole, placements = _case(rng, mesh.ndim)
            steps = _program(rng, whole, follows=True)
            expected = gradient(steps, whole.clone(), _same)
            x = scattered(whole, mesh, placements)
            found: Any = gradient(steps, x, partial(distribute_tensor, device_mesh=mesh))
            assert (found is None) == (expected is None)
            if expected is not None:
                assert torch.equal(found.full_tensor(), expected), (seed, whole.shape, placements)

    run_on_mesh(mesh_shape, body)
