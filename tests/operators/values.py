"""Tensors inside of arguments and results, and how results are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Layout
from dtckpt.dtensor.comm.reductions import all_reduce
from dtckpt.dtensor.geometry.placement import format_placements

FORWARD_TOLERANCE = (1e-3, 1e-4)
GRADIENT_TOLERANCE = (5e-3, 1e-3)
"""Relative, and absolute in units of the largest element: terms are added in another order."""


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in its lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([map_tensors(function, item) for item in value])
    if type(value) is dict:
        entries = cast(dict[Any, Any], value)
        return {key: map_tensors(function, item) for key, item in entries.items()}
    return value


def flattened(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        return flattened(list(cast(dict[Any, Any], value).values()))
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [leaf for item in cast(list[Any], value) for leaf in flattened(item)]
    return [value]


def equal_values(found: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> str:
    """Return how two tensors differ, or an empty string."""
    if found.numel() == 0:
        return ""
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        wrong = found != expected
    else:
        wrong = ~torch.isclose(
            found, expected, rtol=tolerance[0], atol=tolerance[1] * _scale(expected), equal_nan=True
        )
    count = int(wrong.sum())
    if not count:
        return ""
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{count} of {wrong.numel()} elements differ, first at {list(first)}: "
        f"{found[first].item()}, expected {expected[first].item()}"
    )


def _scale(expected: Tensor) -> float:
    finite = expected[torch.isfinite(expected)]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def same_seen(one: Any, other: Any) -> bool:
    """Whether two results of one device are equal bit for bit, not-a-number included."""
    pairs = list(zip(flattened(one), flattened(other), strict=False))
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a == b or (a != a and b != b)
        for a, b in pairs
    )


class PlainResult(Exception):
    """A plain tensor came back where a distributed one belongs, with the right values."""


def problems_of(
    found: Any,
    expected: Any,
    mesh: DeviceMesh,
    tolerance: tuple[float, float],
    *,
    values: bool = True,
    gather: bool = False,
) -> list[str]:
    """Return all that is wrong with a result on this rank; empty where it is right.

    Local parts are compared with the expected result cut by the layout; a Partial result, and any
    with ``gather``, is gathered and compared as a whole. All ranks call it together. Raises
    PlainResult.
    """
    ours, theirs = flattened(found), flattened(expected)
    if len(ours) != len(theirs):
        return [f"{len(ours)} results, expected {len(theirs)}"]
    pairs = list(zip(ours, theirs, strict=True))
    problems = [_problem(a, b, mesh, tolerance, values) for a, b in pairs]
    for index, (a, b) in enumerate(pairs):
        if values and isinstance(a, DTensor) and (gather or _is_partial(a)):
            fits = everyone(not problems[index], mesh)  # or some ranks would gather alone
            problems[index] = problems[index] or (_gathered(a, b, tolerance) if fits else "")
    several = len(pairs) > 1
    return [f"result {i}: {p}" if several else p for i, p in enumerate(problems) if p]


def _problem(a: Any, b: Any, mesh: DeviceMesh, tolerance: tuple[float, float], values: bool) -> str:
    """Return what can be seen to be wrong without any communication."""
    if not isinstance(b, Tensor):
        return "" if not values or _same_number(a, b) else f"{a!r}, expected {b!r}"
    if not isinstance(a, DTensor):
        _require_wrong(a, b, tolerance)
        return f"a {type(a).__name__}, expected a DTensor of shape {list(b.shape)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{_described(a)} {_where(a)}, expected {_described(b)}"
    here = mesh.get_coordinate() or ()
    local = a.to_local().detach()
    sizes = list(a.global_layout.box(here).sizes)
    if list(local.shape) != sizes or local.dtype != b.dtype:
        return f"local {_described(local)}, expected {b.dtype}{sizes} by {_where(a)}"
    if not values or _is_partial(a):
        return ""
    problem = equal_values(local, cut(b, a.global_layout, mesh), tolerance)
    return f"local part of {_where(a)}: {problem}" if problem else ""


def _require_wrong(a: Any, b: Tensor, tolerance: tuple[float, float]) -> None:
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return
    if not equal_values(a, b, tolerance):
        raise PlainResult(f"a plain {_described(a)} with the right values, expected a DTensor")


def _gathered(a: DTensor, b: Tensor, tolerance: tuple[float, float]) -> str:
    problem = equal_values(a.full_tensor().detach(), b, tolerance)
    return f"whole of {_where(a)}: {problem}" if problem else ""


def everyone(flag: bool, mesh: DeviceMesh) -> bool:
    """Return whether ``flag`` is true on all ranks, which call it together."""
    votes = torch.tensor([int(flag)])
    return bool(all_reduce(votes, "min", mesh.peers(tuple(range(mesh.ndim)))))


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _where(tensor: DTensor) -> str:
    return f"({format_placements(tensor.placements)})"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) or (a != a and b != b) or a == b
    return bool(a == b)


def cut(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    here = mesh.get_coordinate() or ()
    part = whole.new_empty(layout.box(here).sizes)
    for held, within in layout.parts(here):
        part[within.slices] = whole[held.slices]
    return part


def laid_out(whole: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensor:
    """Return a tensor that all ranks have, laid out without any communication."""
    layout = Layout(mesh.layout_mesh, placements, tuple(whole.shape))
    local = cut(whole, layout, mesh).clone().contiguous()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape).detach()
