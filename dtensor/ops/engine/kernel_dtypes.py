"""Dtypes that kernels take and return where devices differ, asked of the kernels themselves.

The means of a norm are in the dtype of the values on one device, in that of the weights or in
single precision on another, and torch's functions for tensors without data know one answer only. So
the kernel runs once on stand-ins of one element, never on tensors of the call. What it refuses
(mixed dtypes) is then refused on every rank before anything is sent. Other kernels look at dtypes
when they come to the first element, and ranks without any would not refuse; of these, too, the
kernel is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from ...comm.caches import remembered
from ...tensor.arguments import collect_tensors, substituted
from ...tensor.schemas import Op, functional_of
from ...torch_private import has_modes, outside_modes, schema_of
from .forms import operators

Dtypes = tuple[torch.dtype | None, ...]
"""By result; None for one that is no tensor."""

_OPS: set[Op] = set()

_REFUSE_DTYPES = frozenset(
    operators(
        torch.ops.aten,
        "_cdist_forward _euclidean_dist _log_softmax _softmax addbmm addmm addmv amax amin aminmax"
        " argmax argmin baddbmm bmm cummax cummin cumprod cumsum dot"
        " max.dim median.dim min.dim mm mode mv nanmedian.dim nansum vdot",
    )
)
"""Operators whose kernels refuse some dtypes at the first element, and not before.

All of them take tensors of one element.
"""

_REFUSE_ALWAYS = frozenset(operators(torch.ops.aten, "argmax argmin max.dim min.dim"))
"""Those of them that look at dtypes without elements, too."""

_Argument = tuple[str, Any]


def dtypes_by_kernel(*ops: Op) -> None:
    """Register operators all of whose numbers that are integers are sizes of their tensors."""
    _OPS.update(ops)


def refuse_dtypes(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> None:
    """Raise what the kernel of a device raises for the dtypes of tensors like these.

    Not where some are empty: most kernels without elements refuse nothing.
    """
    functional = functional_of(op)
    if functional not in _REFUSE_DTYPES or not has_device(device):
        return
    given: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], given)
    if functional not in _REFUSE_ALWAYS and any(0 in t.shape for t in given):
        return
    with outside_modes() if has_modes() else nullcontext():
        ones = [torch.ones((1,) * t.ndim, dtype=t.dtype, device=device) for t in given]
        small_args, small_kwargs = substituted(args, kwargs, ones)
        op(*small_args, **small_kwargs)


@remembered(16)
def has_device(device: str) -> bool:
    """Whether kernels of a device can be asked; for others calls are planned without data."""
    try:
        torch.empty((), device=device)
    except (RuntimeError, AssertionError):
        return False
    return device != "meta"


def kernel_dtypes(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> Dtypes | None:
    """Return the dtypes of what the kernel of a device returns for tensors like these.

    None for an operator that is not registered, and where the device has no kernel of it.
    """
    if op not in _OPS or not has_device(device):
        return None
    names = [argument.name for argument in schema_of(op).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return _dtypes(op, tuple((name, _described(value)) for name, value in given.items()), device)


@remembered(1024)
def _dtypes(op: Op, arguments: tuple[tuple[str, _Argument], ...], device: str) -> Dtypes | None:
    given = {name: _stand_in(argument, device) for name, argument in arguments}
    with outside_modes() if has_modes() else nullcontext():
        try:
            results = op(**given)
        except NotImplementedError:
            return None
    listed = cast("Sequence[Any]", results if isinstance(results, list | tuple) else [results])
    return tuple([out.dtype if isinstance(out, Tensor) else None for out in listed])


def _described(value: Any) -> _Argument:
    """Return what a stand-in is made of; equal for arguments that have the same."""
    if isinstance(value, Tensor):
        return "tensor", (value.ndim, value.dtype)
    if isinstance(value, list | tuple):
        return "list", tuple(map(_described, cast("Sequence[Any]", value)))
    # With its type, as 1, 1.0 and True are equal.
    if isinstance(value, float):
        return "value", (float, 1.0)
    is_size = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    return "value", (int, 1) if is_size else (type(value), value)


def _stand_in(argument: _Argument, device: str) -> Any:
    kind, value = argument
    if kind == "tensor":
        ndim, dtype = value
        return torch.ones((1,) * ndim, dtype=dtype, device=device)
    return [_stand_in(item, device) for item in value] if kind == "list" else value[1]
