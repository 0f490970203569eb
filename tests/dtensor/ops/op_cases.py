"""Cases of operators, and their check against one device for given placements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Partial, Ragged, Replicate, Shard, strict
from dtckpt.dtensor.geometry.placement import Placement

from ..rank_meshes import assert_holds, run_on_mesh, scattered


@dataclass(frozen=True, slots=True)
class Case:
    """An operator and the shapes that it is tried on."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    grad: bool = True
    wholes: Callable[[], Sequence[Tensor]] | None = None
    """Makes the inputs where small whole numbers will not do; of the shapes above."""


def check_on(shape: tuple[int, ...], cases: Sequence[Case], count: int, special: int = 0) -> None:
    """Check every case on a mesh for ``count`` choices of placements, and some special ones."""
    expected = [expected_of(case) for case in cases]  # once for all ranks and placements

    def body(mesh: DeviceMesh) -> None:
        for case, wanted in zip(cases, expected, strict=True):
            choices = choices_of(case, len(shape), count)
            if special and all(case.shapes):
                choices += special_placements(case)[:special]
            check(case, mesh, choices, wanted)

    run_on_mesh(shape, body)


def choices_of(case: Case, axes: int, count: int) -> list[list[Any]]:
    """Choices of the placements of all arguments, no more than so many and alike every time.

    Each goes through its own placements in its own order, Replicate last (a lone argument leaves it
    out): a few choices then have every argument cut along every dim and Partial, beside others that
    lie differently.
    """
    draw = Random(case.name)
    options: list[list[Any]] = []
    for shape in case.shapes:
        replicated, *others = placements_of(shape, axes)
        options.append(draw.sample(others, len(others)))
        if len(case.shapes) > 1:
            options[-1].append(replicated)
    longest = max(len(each) for each in options)
    return [[each[k % len(each)] for each in options] for k in range(min(count, longest))]


def placements_of(shape: tuple[int, ...], axes: int) -> list[Any]:
    """All placements of one tensor on a mesh of ``axes`` axes, of the usual kinds."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    kinds.append(Partial())
    return list(itertools.product(kinds, repeat=axes))


@dataclass(frozen=True, slots=True)
class Expected:
    """What a case gives on one device."""

    wholes: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    """Those of the inputs; none for a case without gradients."""


def check(case: Case, mesh: DeviceMesh, choices: Sequence[Any], expected: Expected) -> None:
    """Compare values and gradients with one device for every choice of input placements."""
    for placements in choices:
        inputs = [
            _leaf(scattered(w, mesh, p).detach())
            for w, p in zip(expected.wholes, placements, strict=True)
        ]
        try:
            with strict():
                found = _listed(case.run(*inputs))
            for a, b in zip(found, expected.outputs, strict=True):
                assert_holds(a, b, rtol=1e-4, atol=1e-4)
            if case.grad:
                _check_gradients(found, inputs, expected)
        except BaseException as error:
            text = f"{case.name} on {mesh.shape} with {placements}: {error!r}"
            raise AssertionError(text) from error


def expected_of(case: Case) -> Expected:
    """Run a case on one device."""
    wholes = list(_counted(case) if case.wholes is None else case.wholes())
    inputs = [_leaf(w.clone()) for w in wholes]
    outputs = _listed(case.run(*inputs))
    if not case.grad:
        return Expected(wholes, outputs, [])
    _differentiate(outputs, outputs)
    return Expected(wholes, outputs, [tensor.grad for tensor in inputs])


def _counted(case: Case) -> list[Tensor]:
    return [
        torch.arange(1.0, 1 + torch.Size(s).numel()).view(s).remainder(5 + i) + 1
        for i, s in enumerate(case.shapes)
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _check_gradients(found: list[Tensor], inputs: list[Any], expected: Expected) -> None:
    with strict():
        _differentiate(found, expected.outputs)
    for a, b in zip(inputs, expected.gradients, strict=True):
        assert (a.grad is None) == (b is None)
        if b is not None:
            assert_holds(a.grad, b, rtol=1e-3, atol=1e-3)


def _differentiate(outputs: list[Tensor], expected: list[Tensor]) -> None:
    """Go back from the outputs whose like on one device have gradients."""
    pairs = zip(outputs, expected, strict=True)
    squares = [_squared(a) for a, b in pairs if b.requires_grad]
    if squares:
        sum(squares[1:], squares[0]).backward()


def _squared(tensor: Tensor) -> Tensor:
    return (tensor.abs() if tensor.is_complex() else tensor).square().sum()


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def special_placements(case: Case) -> list[list[Any]]:
    """Ordered and ragged placements of every argument in turn, on two axes of two."""
    choices: list[list[Any]] = []
    for first, kind in itertools.product(range(len(case.shapes)), ("ordered", "ragged")):
        choice: list[Any] = []
        for index, shape in enumerate(case.shapes):
            size = shape[0]
            ragged = (Ragged(0, (size - size // 4, size // 4)), Shard(len(shape) - 1))
            special = (Shard(0, 1), Shard(0, 0)) if kind == "ordered" else ragged
            choice.append(special if index == first else (Shard(0), Replicate()))
        choices.append(choice)
    return choices
