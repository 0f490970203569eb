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
from dtckpt.dtensor.placement import Placement

from .rank_meshes import assert_holds, run_on_mesh, scattered


@dataclass(frozen=True, slots=True)
class Case:
    """An operator and the shapes that it is tried on."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    grad: bool = True
    wholes: Callable[[], Sequence[Tensor]] | None = None
    """Makes the inputs where small whole numbers will not do; of the shapes above."""


def check_on(shape: tuple[int, ...], cases: Sequence[Case], count: int) -> None:
    """Check every case on a mesh for ``count`` choices of placements, drawn alike every time."""

    def body(mesh: DeviceMesh) -> None:
        for case in cases:
            options = [placements_of(s, len(shape)) for s in case.shapes]
            draw = Random(case.name)  # products of all options may be millions
            check(case, mesh, [[draw.choice(o) for o in options] for _ in range(count)])

    run_on_mesh(shape, body)


def placements_of(shape: tuple[int, ...], axes: int) -> list[Any]:
    """All placements of one tensor on a mesh of ``axes`` axes, of the usual kinds."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    kinds.append(Partial())
    return list(itertools.product(kinds, repeat=axes))


def check(case: Case, mesh: DeviceMesh, choices: Sequence[Any]) -> None:
    """Compare values and gradients with one device for every choice of input placements."""
    wholes = _counted(case) if case.wholes is None else case.wholes()
    for placements in choices:
        expected_inputs = [_leaf(w.clone()) for w in wholes]
        inputs = [
            _leaf(scattered(w, mesh, p).detach()) for w, p in zip(wholes, placements, strict=True)
        ]
        try:
            with strict():
                found = case.run(*inputs)
            expected = case.run(*expected_inputs)
            pairs = list(zip(_listed(found), _listed(expected), strict=True))
            for a, b in pairs:
                assert_holds(a, b, rtol=1e-4, atol=1e-4)
            if case.grad:
                _check_gradients(pairs, inputs, expected_inputs)
        except BaseException as error:
            text = f"{case.name} on {mesh.shape} with {placements}: {error!r}"
            raise AssertionError(text) from error


def _counted(case: Case) -> list[Tensor]:
    return [
        torch.arange(1.0, 1 + torch.Size(s).numel()).view(s).remainder(5 + i) + 1
        for i, s in enumerate(case.shapes)
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _check_gradients(
    pairs: list[tuple[Tensor, Tensor]], inputs: list[Any], expected: list[Tensor]
) -> None:
    if not any(b.requires_grad for _, b in pairs):
        return
    loss = sum(_squared(b) for _, b in pairs if b.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    with strict():
        ours = sum(_squared(a) for a, b in pairs if b.requires_grad)
        assert isinstance(ours, Tensor)
        ours.backward()
    for a, b in zip(inputs, expected, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert_holds(a.grad, b.grad, rtol=1e-3, atol=1e-3)


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


def check_everywhere(cases: Sequence[Case], shape: tuple[int, ...], limit: int = 5) -> None:
    """Check cases on one mesh, for no more than so many choices of placements of each.

    On two axes of two, ordered and ragged placements are among them.
    """

    def body(mesh: DeviceMesh) -> None:
        for case in cases:
            options = [placements_of(s, len(shape)) for s in case.shapes]
            every = list(itertools.product(*options))
            choices: list[Any] = every[:: -(-len(every) // limit)]
            if shape == (2, 2) and all(case.shapes):
                special = special_placements(case)
                choices = [*choices, *special[:: len(special) // 2]]
            check(case, mesh, choices)

    run_on_mesh(shape, body)
