"""Torch's operator database: its operators, its sizes and its sample inputs.

It is private to torch's own tests. This module alone imports it, and only when asked to.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .values import flattened, map_tensors

DATABASE = "torch.testing._internal.common_methods_invocations"

SIZES: dict[str, dict[str, int]] = {
    "even": {"L": 24, "M": 12, "S": 4, "XS": 2},
    "uneven": {"L": 21, "M": 10, "S": 5, "XS": 3},
}
"""The sizes that sample inputs are made of, beside those that the database writes out."""

_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
_MAX_SEEN = 60
_MAX_NUMEL = 100_000


class NoDatabase(Exception):
    """Torch's operator database cannot be imported."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of an operator on plain tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    """Takes from a result what its gradient is defined for."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of ``with_tensors``."""
        return [leaf for leaf in flattened([self.args, self.kwargs]) if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        remaining = iter(tensors)
        args = map_tensors(lambda _: next(remaining), self.args)
        return args, map_tensors(lambda _: next(remaining), self.kwargs)


def load(sizes: str) -> dict[str, Any]:
    """Return the operators by name, with sample inputs of the given sizes.

    Raises NoDatabase where this torch has none or what it needs is not installed.
    """
    try:
        invocations = import_module(DATABASE)
    except ImportError as error:
        raise NoDatabase(
            f"torch's operator database cannot be imported ({error}); it needs the package "
            "'expecttest' and a torch with torch.testing._internal"
        ) from error
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for size, value in SIZES[sizes].items():
                if isinstance(vars(module).get(size), int):
                    setattr(module, size, value)
    return {_name(info): info for info in invocations.op_db}


def _name(info: Any) -> str:
    variant = info.variant_test_name
    return f"{info.name}.{variant}" if variant else str(info.name)


def samples_of(info: Any, count: int, dtypes: Sequence[torch.dtype] = _DTYPES) -> list[Sample]:
    """Return up to ``count`` samples, the first ones and others spread over the rest.

    They are of the first of ``dtypes`` that the operator supports, and always the same for the same
    operator, dtype and sizes.
    """
    supported = info.supported_dtypes("cpu")
    dtype = next((dtype for dtype in dtypes if dtype in supported), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    grads = bool(info.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    made = info.sample_inputs("cpu", dtype, requires_grad=grads)
    found: list[Sample] = []
    with closing(_made(made, found)) as yielded:
        for sample in itertools.islice(yielded, _MAX_SEEN):
            args, kwargs = _plain((sample.input, *sample.args)), _plain(sample.kwargs)
            found.append(Sample(args, kwargs, _process(sample)))
            if count == 1 and _is_small(found[-1]):
                return found[-1:]  # each one costs milliseconds: torch seeds all its generators
    return _spread(list(filter(_is_small, found)), count)


def _is_small(sample: Sample) -> bool:
    return sum(tensor.numel() for tensor in sample.tensors) <= _MAX_NUMEL


def _made(samples: Iterable[Any], found: Sized) -> Generator[Any]:
    """Yield samples until one cannot be made, as some that expect the database's own sizes."""
    try:
        yield from samples
    except Exception:
        if not len(found):
            raise


def _plain(value: Any) -> Any:
    """Return arguments with contiguous tensors of their own, as distributing makes them."""

    def plain(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach()
        made = tensor.detach().resolve_conj().resolve_neg().clone()
        return made.contiguous().requires_grad_(tensor.requires_grad)

    return map_tensors(plain, value)


def _process(sample: Any) -> Callable[[Any], Any]:
    return sample.output_process_fn_grad or (lambda result: result)


def _spread(samples: list[Sample], count: int) -> list[Sample]:
    if len(samples) <= count:
        return samples
    first = -(-count // 2)
    rest = samples[first:]
    step = len(rest) / (count - first) if count > first else 1
    return samples[:first] + [rest[int((i + 1) * step) - 1] for i in range(count - first)]
