"""What one rank does for one case: run the operator on distributed tensors and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Placement, Replicate, strict
from dtckpt.dtensor.random import manual_seed

from .choices import Choice
from .expected import RANDOM, VALUES, Draws, Expected, copies, differentiable
from .team import Step
from .values import (
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    PlainResult,
    everyone,
    flattened,
    laid_out,
    problems_of,
    same_seen,
)

NO_RULE = " has no sharding rule"
"""What warnings and errors say of operators that are gathered and run whole."""

_SEED = 7


class NoGradient(Exception):
    """A result does not require grad though it does on one device, or the other way round."""


class NotWritten(Exception):
    """Torch writes nothing to ``out=`` where anything but its own kernels looks at the call."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that every rank does, and what it is called in reports."""

    label: str
    step: Step
    writes: bool = False
    """Whether it writes in place or to ``out=``."""


def _tensors(expected: Expected, mesh: DeviceMesh, choice: Choice, *, grad: bool) -> list[Tensor]:
    return [
        laid_out(whole.detach(), mesh, placements).requires_grad_(grad and whole.requires_grad)
        for whole, placements in zip(expected.sample.tensors, choice, strict=True)
    ]


def forward_backward(
    call: Callable[..., Any], expected: Expected, choice: Choice, number: int
) -> Step:
    """Return the case of a result and of the gradients of all tensors.

    By the number of the case among those of a sample, the first result is gathered as well, and
    gradients arrive replicated or laid out as the results are.
    """

    def step(mesh: DeviceMesh) -> list[str]:
        inputs = _tensors(expected, mesh, choice, grad=expected.gradients is not None)
        args, kwargs = expected.sample.with_tensors(inputs)
        manual_seed(_SEED, mesh)
        result = call(*args, **kwargs)
        known = expected.compared == VALUES
        problems = problems_of(
            result, expected.result, mesh, FORWARD_TOLERANCE, values=known, gather=number == 0
        )
        if not everyone(not problems, mesh):  # or some ranks would go on alone
            return problems
        gradients = _gradients(expected, inputs, result, mesh, alike=number % 2 == 1)
        if expected.compared == RANDOM:
            case = (mesh.shape, choice)
            return expected.agreement.problems(case, [result, gradients], GRADIENT_TOLERANCE)
        return _gradient_problems(expected, inputs, gradients, mesh)

    return step


def _gradients(
    expected: Expected, inputs: list[Tensor], result: Any, mesh: DeviceMesh, *, alike: bool
) -> list[Tensor | None]:
    """Return the gradients of all inputs that require them; NoGradient where a result has none."""
    if expected.gradients is None:
        return []
    outputs = differentiable(expected.sample.process(result))
    cotangents = expected.gradients.cotangents
    if len(outputs) != len(cotangents):
        raise NoGradient(f"{len(outputs)} results require grad, expected {len(cotangents)}")
    given = [
        laid_out(cotangent, mesh, _reduced(output) if alike else (Replicate(),) * mesh.ndim)
        for cotangent, output in zip(cotangents, outputs, strict=True)
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))


def _reduced(output: Any) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in output.placements)


def _gradient_problems(
    expected: Expected, inputs: list[Tensor], found: list[Tensor | None], mesh: DeviceMesh
) -> list[str]:
    if expected.gradients is None:
        return []
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    problems: list[str] = []
    for index, (a, b) in enumerate(zip(found, expected.gradients.values, strict=True)):
        try:
            here = _compared(a, b, wanted[index], mesh)
        except PlainResult as error:
            raise PlainResult(f"gradient {index} is {error}") from error
        problems += [f"gradient {index}: {problem}" for problem in here]
    return problems


def _compared(a: Tensor | None, b: Tensor | None, tensor: Tensor, mesh: DeviceMesh) -> list[str]:
    """Return how gradients differ; none at all is as good as zeros."""
    if a is None and b is None:
        return []
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    ours = laid_out(zeros, mesh, (Replicate(),) * mesh.ndim) if a is None else a
    return problems_of(ours, zeros if b is None else b, mesh, GRADIENT_TOLERANCE)


def in_place(call: Callable[..., Any], expected: Expected, choice: Choice) -> Step | None:
    """Return the case of the in-place form, which must change the tensor itself, if it has one."""
    args, kwargs = expected.sample.with_tensors(copies(expected.sample, grad=False))
    try:
        call(*args, **kwargs)
    except Exception:  # such as a result that does not fit into the tensor
        return None
    whole = flattened(args[0])[0]
    if whole.numel() != flattened(expected.sample.args[0])[0].numel():
        return None  # one device has silently made the tensor larger

    def step(mesh: DeviceMesh) -> list[str]:
        inputs = _tensors(expected, mesh, choice, grad=False)
        ours, kwargs = expected.sample.with_tensors(inputs)
        call(*ours, **kwargs)
        return problems_of(flattened(ours[0])[0], whole, mesh, FORWARD_TOLERANCE)

    return step


def into_out(call: Callable[..., Any], expected: Expected, choice: Choice) -> Step | None:
    """Return the case of a result that is written to a tensor that is given, if it can be.

    Raises NotWritten where torch itself forgets to.
    """
    if len(expected.result) != 1 or not isinstance(expected.result[0], Tensor):
        return None
    whole = expected.result[0]
    out = torch.zeros_like(whole)
    args, kwargs = expected.sample.with_tensors(copies(expected.sample, grad=False))
    try:
        with Draws():
            call(*args, **kwargs, out=out)
    except Exception:  # some have no such form in spite of what the database says
        return None
    if not same_seen(out, whole):
        raise NotWritten

    def step(mesh: DeviceMesh) -> list[str]:
        inputs = _tensors(expected, mesh, choice, grad=False)
        args, kwargs = expected.sample.with_tensors(inputs)
        placements = choice[0] if inputs[0].ndim == whole.ndim else (Replicate(),) * mesh.ndim
        out = laid_out(torch.zeros_like(whole), mesh, placements)
        result = call(*args, **kwargs, out=out)
        return problems_of([result, out], [whole, whole], mesh, FORWARD_TOLERANCE)

    return step


def by_rules(step: Step, if_not: Callable[[], None]) -> Step:
    """Return the case by rules alone, and where one is missing, ``if_not`` and then as it is."""

    def run(mesh: DeviceMesh) -> list[str]:
        try:
            with strict():
                return step(mesh)
        except Exception as error:
            if NO_RULE not in str(error):
                raise
        if_not()
        return step(mesh)

    return run
