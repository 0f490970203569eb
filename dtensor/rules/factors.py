"""Factors: einsum-like rules, from which the rows of every mesh axis follow.

``(i,k),(k,j)->(i,j)`` says that a matrix product has three factors. An axis may split one of
them: then every input that has it is sharded there and the others are replicated. An output
without the factor is Partial if the operator reduces over it. A factor that must be whole is never
split. A factor may stand for several dims that a view joins: ``Dim(f, unit)`` is a tensor dim of
which one index makes ``unit`` steps of the factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..box import Box
from ..layout import Layout
from ..mesh import Mesh
from ..placement import REDUCE_OPS, Partial, Placement, Ragged, Replicate, Shard
from .table import Cuts, OpCall, Row


@dataclass(frozen=True, slots=True)
class Dim:
    """The factor that a tensor dim belongs to."""

    factor: int
    unit: int = 1


Dims = tuple[Dim | None, ...]
"""One factor per tensor dim; None for dims that belong to none (broadcast, or must be whole)."""

LINEAR_OPS = ("sum", "avg")
"""Reductions that commute with linear operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The factors of one call."""

    call: OpCall
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduce: Mapping[int, str] = field(default_factory=dict[int, str])
    """Factors that may be split although an output lacks them, with the reduction."""
    addends: frozenset[int] = frozenset()
    """Inputs that are added to a reduction: Partial where it is, so that they count once."""
    linear: tuple[frozenset[int], ...] = ()
    """Sets of inputs that the operator is linear in together: those Partial, the others
    replicated, make the outputs Partial."""
    linear_ops: tuple[str, ...] = LINEAR_OPS
    ignores_values: bool = False
    """Whether the outputs depend on shape and dtype of the inputs only."""

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return all-replicate, one row per factor, and one per linear set."""
        count = len(self.inputs)
        rows = [Row((Replicate(),) * count, (Replicate(),) * len(self.outputs))]
        rows.extend(
            row
            for factor in self._factors()
            if (row := self._split(factor, axis, cuts)) is not None
        )
        for op in self.linear_ops:
            for chosen in self.linear:
                if op in LINEAR_OPS and self._has_bools(chosen):
                    continue
                ins = tuple(Partial(op) if i in chosen else Replicate() for i in range(count))
                rows.append(Row(ins, (Partial(op),) * len(self.outputs)))
        if self.ignores_values:
            outputs = (Replicate(),) * len(self.outputs)
            rows.extend(Row((Partial(op),) * count, outputs) for op in REDUCE_OPS)
        return rows

    def _has_bools(self, chosen: frozenset[int]) -> bool:
        """Whether bools take part, whose terms do not add up."""
        dtypes = [self.call.specs[i].dtype for i in chosen]
        return torch.bool in dtypes + [meta.dtype for meta in self.call.outputs if meta]

    def _factors(self) -> list[int]:
        found = {dim.factor for dims in self.inputs for dim in dims if dim is not None}
        return sorted(found)

    def _split(self, factor: int, axis: int, cuts: Cuts) -> Row | None:
        reduce_op = self.reduce.get(factor)
        outputs = tuple(self._placement(dims, factor, reduce_op) for dims in self.outputs)
        if None in outputs or not self._cuts_at_units(factor, axis, cuts):
            return None
        inputs: list[Placement] = []
        for index, dims in enumerate(self.inputs):
            position = dim_of(dims, factor)
            if position is not None:
                inputs.append(Shard(position))
            elif index in self.addends and reduce_op is not None:
                inputs.append(Partial(reduce_op))
            else:
                inputs.append(Replicate())
        return Row(tuple(inputs), tuple(p for p in outputs if p is not None), factor)

    @staticmethod
    def _placement(dims: Dims, factor: int, reduce_op: str | None) -> Placement | None:
        position = dim_of(dims, factor)
        if position is not None:
            return Shard(position)
        return None if reduce_op is None else Partial(reduce_op)

    def _cuts_at_units(self, factor: int, axis: int, cuts: Cuts) -> bool:
        """Whether every cut falls between two indices of each dim of a joined factor."""
        tensors = [*self.inputs, *self.outputs]
        shapes = [spec.shape for spec in self.call.specs]
        shapes += [meta.shape if meta else () for meta in self.call.outputs]
        found = [
            (dim.unit, shape[position])
            for dims, shape in zip(tensors, shapes, strict=True)
            for position, dim in enumerate(dims)
            if dim is not None and dim.factor == factor
        ]
        units = {unit for unit, _ in found}
        if len(units) <= 1:
            return True
        earlier = cuts.axes.get(factor, [])
        if earlier:
            pieces = cuts.mesh_shape[axis]
            for other in earlier:
                pieces *= cuts.mesh_shape[other]
            return all(size % pieces == 0 for _, size in found)
        bounds = self._bounds(factor, axis, cuts)
        return all(bound % unit == 0 for bound in bounds for unit in units)

    def _bounds(self, factor: int, axis: int, cuts: Cuts) -> list[int]:
        """Return where the first input is cut by ``axis``, in steps of the factor."""
        for spec, dims in zip(self.call.specs, self.inputs, strict=True):
            position = dim_of(dims, factor)
            dim = None if position is None else dims[position]
            if position is not None and dim is not None:
                sizes = piece_sizes(
                    spec.shape[position], cuts.mesh_shape[axis], spec.placements[axis], position
                )
                total, bounds = 0, [0]
                for size in sizes:
                    total += size * dim.unit
                    bounds.append(total)
                return bounds
        return []


def dim_of(dims: Dims, factor: int) -> int | None:
    """Return the tensor dim of a factor, if the tensor has it."""
    for position, dim in enumerate(dims):
        if dim is not None and dim.factor == factor:
            return position
    return None


def piece_sizes(size: int, count: int, placement: Placement, dim: int) -> tuple[int, ...]:
    """Return the sizes of the pieces of a dim: those of a ragged placement, or even chunks."""
    if isinstance(placement, Ragged) and placement.dim == dim:
        return placement.sizes
    layout = Layout(Mesh((count,)), (Shard(0),), (size,))
    boxes: list[Box] = [layout.box((i,)) for i in range(count)]
    return tuple(box.sizes[0] for box in boxes)


def numbered(*names: str) -> tuple[Dims, ...]:
    """Return dims from letters: the same letter is the same factor, '.' is none.

    >>> numbered("ik", "kj", "ij")[2]
    (Dim(factor=0, unit=1), Dim(factor=2, unit=1))
    """
    order: dict[str, int] = {}
    return tuple(
        tuple(None if c == "." else Dim(order.setdefault(c, len(order))) for c in name)
        for name in names
    )
