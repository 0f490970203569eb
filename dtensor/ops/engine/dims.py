"""Dims as arguments name them, and a factor for each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...mesh.spec import DTensorSpec
from .factors import Dim, Dims


def dims_of(tensor: Tensor | DTensorSpec, dim: Sequence[int] | int | None) -> tuple[int, ...]:
    """Return the dims that an argument names: all of them for None and for an empty list.

    Raises IndexError for a dim that the tensor does not have.
    """
    ndim = tensor.ndim
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    listed = [dim] if isinstance(dim, int) else dim
    size = max(ndim, 1)
    for d in listed:
        if not -size <= d < size:
            raise IndexError(f"dim {d} of a tensor of {ndim} dims: expected {-size} to {size - 1}")
    return tuple(sorted({d % size for d in listed})) if ndim else ()


def all_dims(ndim: int) -> Dims:
    """Return a factor for every dim."""
    return tuple(Dim(i) for i in range(ndim))


def with_dim(dims: Dims, at: int, dim: Dim | None) -> Dims:
    """Return dims of which one is another."""
    return (*dims[:at], dim, *dims[at + 1 :])


def without(ndim: int, *whole: int) -> tuple[Dims, Dims]:
    """Return a factor for every dim but some, once in place of all dims and once alone."""
    excluded = {dim % max(ndim, 1) for dim in whole}
    dims: Dims = tuple(None if i in excluded else Dim(i) for i in range(ndim))
    return dims, tuple(dim for dim in dims if dim is not None)


def broadcast_dims(spec: DTensorSpec, shape: tuple[int, ...]) -> Dims:
    """Return the factors of an input that broadcasts to ``shape``: its dims from the right."""
    lead = len(shape) - spec.ndim
    return tuple(
        Dim(lead + i) if lead + i >= 0 and size == shape[lead + i] else None
        for i, size in enumerate(spec.shape)
    )


def only(ndim: int, dim: int) -> Dims:
    """Return a factor for one dim alone."""
    return tuple(Dim(i) if i == dim % max(ndim, 1) else None for i in range(ndim))


def leading(ndim: int, count: int) -> Dims:
    """Return a factor for each of the first dims."""
    return tuple(Dim(i) if i < count else None for i in range(ndim))
