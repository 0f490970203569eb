"""What one device computes for a sample: results and gradients to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .agreement import Agreement
from .database import Sample
from .values import flattened

VALUES = "values"
RANDOM = "random numbers: shape, dtype, the same for all placements and replicas"
NOT_OUT = "values, but not those in out=, which torch forgets to write for tensor subclasses"
SHAPES = "uninitialised memory: shape and dtype"

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)

_SHARED = "draws random numbers of its own, from the one generator that ranks as threads share"
_UNFIT = {
    "_segment_reduce.offsets": "torch reads beyond the end of the data of its samples",
    "nn.functional.fractional_max_pool2d": _SHARED,
    "nn.functional.fractional_max_pool3d": _SHARED,
    "pca_lowrank": _SHARED,
    "svd_lowrank": _SHARED,
}


class Untestable(Exception):
    """A sample has nothing to compare with; says why."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the tensors that require them, for given ones of the results."""

    cotangents: list[Tensor]
    values: list[Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one device computes for a sample."""

    sample: Sample
    compared: str
    """VALUES, RANDOM or SHAPES."""
    result: Any
    gradients: Gradients | None
    """Of a random result only their number means anything."""
    agreement: Agreement = field(default_factory=Agreement)
    """What all cases of a random result have in common."""


def expect(call: Callable[..., Any], name: str, sample: Sample) -> Expected:
    """Return what ``call`` computes for a sample on plain tensors.

    Raises Untestable where that is nothing that a distributed result can be compared with.
    """
    if name in _UNFIT:
        raise Untestable(_UNFIT[name])
    if not sample.tensors:
        raise Untestable("no tensor among the arguments")
    if any(tensor.layout != torch.strided for tensor in sample.tensors):
        raise Untestable("sparse arguments")
    draws = Draws()
    result, inputs = _result(call, sample, draws)
    tensors = [leaf for leaf in flattened(result) if isinstance(leaf, Tensor)]
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise Untestable("sparse result")
    compared = _compared(name, draws)
    gradients = _gradients(sample, result, inputs) if compared != SHAPES else None
    return Expected(sample=sample, compared=compared, result=_detached(result), gradients=gradients)


def copies(sample: Sample, *, grad: bool = True) -> list[Tensor]:
    """Return leaves with the values of a sample's tensors."""
    return [t.detach().clone().requires_grad_(grad and t.requires_grad) for t in sample.tensors]


def _result(call: Callable[..., Any], sample: Sample, draws: Draws) -> tuple[Any, list[Tensor]]:
    for grad in (True, False):
        inputs = copies(sample, grad=grad)
        args, kwargs = sample.with_tensors(inputs)
        try:
            with draws:
                return call(*args, **kwargs), inputs
        except Exception as error:  # whatever one device refuses is not ours to compute
            refusal = f"fails on one device: {type(error).__name__}: {str(error)[:200]}"
    raise Untestable(refusal)


class Draws(TorchDispatchMode):
    """Within it, notices whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _compared(name: str, draws: Draws) -> str:
    if name.partition(".")[0] in _UNINITIALISED:
        return SHAPES
    return RANDOM if draws.seen else VALUES


def _gradients(sample: Sample, result: Any, inputs: list[Tensor]) -> Gradients | None:
    outputs = differentiable(sample.process(result))
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not outputs or not wanted:
        return None
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in outputs]
    try:
        values = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    except RuntimeError:  # this sample has no gradient on one device either
        return None
    return Gradients(cotangents, list(values))


def differentiable(result: Any) -> list[Tensor]:
    """Return the tensors of a result that a gradient can be asked of."""
    leaves = [leaf for leaf in flattened(result) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.requires_grad]


def _detached(result: Any) -> list[Any]:
    return [r.detach() if isinstance(r, Tensor) else r for r in flattened(result)]
