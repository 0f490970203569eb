"""Factors: einsum-like rules, from which the rows of every mesh axis follow.

``(i,k),(k,j)->(i,j)`` says that a matrix product has three factors. An axis may split one of
them: then every input that has it is sharded there and the others are replicated. An output
without the factor is Partial if the operator reduces over it. A factor that must be whole is never
split. A factor may stand for several dims that a view joins: ``Dim(f, unit)`` is a tensor dim of
which one index makes ``unit`` steps of the factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from ...geometry.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
from .dtypes import carries, keeps_order
from .table import IN_ANY_ORDER, Cuts, LocalMaker, OpCall, Row
from .windows import even_bounds


@dataclass(frozen=True, slots=True)
class Dim:
    """The factor that a tensor dim belongs to."""

    factor: int
    unit: int = 1
    window: range | None = None
    """The steps of the factor that the dim has, if not all (``windows.py``)."""

    def steps(self, extent: int) -> range:
        """Return the steps that the dim has of a factor of ``extent``."""
        return range(extent) if self.window is None else self.window


Dims = tuple[Dim | None, ...]
"""One factor per tensor dim; None for dims that belong to none (broadcast, or must be whole)."""

FIRST = (frozenset({0}),)
"""For an operator that is linear in its first tensor alone."""

LINEAR_OPS = ("sum", "avg")
"""Reductions that commute with linear operators."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A rule by the factors of one call."""

    call: OpCall
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    _: KW_ONLY
    local: LocalMaker | None = None
    reduce: Mapping[int, str] = field(default_factory=dict[int, str])
    """Factors that may be split although an output lacks them, with the reduction."""
    addends: frozenset[int] = frozenset()
    """Inputs that are added to a reduction: Partial where it is, so that they count once."""
    linear: tuple[frozenset[int], ...] = ()
    """Sets of inputs that the operator is linear in together: those Partial, the others
    replicated, make the outputs Partial."""
    linear_ops: tuple[str, ...] = LINEAR_OPS
    ordered: tuple[tuple[frozenset[int], str, str], ...] = ()
    """Sets of inputs of which extremes become extremes of the outputs, with both reductions."""
    ignores_values: bool = False
    """Whether the outputs depend on shape and dtype of the inputs only."""
    untouched: tuple[frozenset[int], ...] = ()
    """By output, factors that it does not depend on: replicated where they are split."""
    blocks: Mapping[int, int] = field(default_factory=dict[int, int])
    """Factors that are cut at multiples of some number of steps only."""
    even: frozenset[int] = frozenset()
    """Factors that are cut into even chunks, however their inputs are cut."""
    reduce_bytes: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    """Bytes, by factor and axis, that it costs later to reduce outputs where the factor is split.
    Said where splitting a factor competes with making its dim whole."""
    positions: frozenset[int] | None = None
    """Factors along which the local kernel looks at where its part begins; None for one that may
    look along all of them, unless it is one of ``IN_ANY_ORDER``."""
    is_joined: bool = field(init=False)
    """Whether some dim makes several steps of its factor, so that not every cut is between two."""

    def __post_init__(self) -> None:
        dims = (dim for tensor in (*self.inputs, *self.outputs) for dim in tensor)
        joined = bool(self.blocks) or any(dim is not None and dim.unit != 1 for dim in dims)
        object.__setattr__(self, "is_joined", joined)

    def rows(self, axis: int, cuts: Cuts) -> Sequence[Row]:
        """Return all-replicate, and else one row per factor and one per linear or ordered set."""
        count = len(self.inputs)
        rows = [Row((Replicate(),) * count, (Replicate(),) * len(self.outputs))]
        if all(spec.placements[axis].is_replicate() for spec in self.call.specs):
            return rows  # which nothing beats
        rows.extend(
            row
            for factor in self._factors()
            if (row := self._split(factor, axis, cuts)) is not None
        )
        linear = [(chosen, op, op) for op in self.linear_ops for chosen in self.linear]
        for chosen, given, made in (*linear, *self.ordered):
            if self._keeps_terms(chosen, given):
                ins = tuple(Partial(given) if i in chosen else Replicate() for i in range(count))
                rows.append(Row(ins, (Partial(made),) * len(self.outputs)))
        if self.ignores_values:
            outputs = (Replicate(),) * len(self.outputs)
            rows.extend(Row((Partial(op),) * count, outputs) for op in REDUCE_OPS)
            rows.extend(Row((Shard(dim),), outputs) for dim in range(self.call.specs[0].ndim))
        return rows

    def _keeps_terms(self, chosen: frozenset[int], op: str) -> bool:
        """Whether terms of inputs become terms of the outputs in the dtypes of those.

        Bools do not add up and complex numbers have no order; terms of integers wrap around, and
        fractions are cut off, where the value does not.
        """
        sources = {self.call.specs[i].dtype for i in chosen}
        results = {meta.dtype for meta in self.call.outputs if meta}
        if op in ("max", "min"):
            return all(keeps_order(a, b) for a in sources for b in results)
        if op in LINEAR_OPS and torch.bool in sources | results:
            return False
        return all(carries(op, source, result) for source in sources for result in results)

    def _factors(self) -> list[int]:
        found = {dim.factor for dims in self.inputs for dim in dims if dim is not None}
        return sorted(found)

    def _split(self, factor: int, axis: int, cuts: Cuts) -> Row | None:
        reduce_op = self.reduce.get(factor)
        outputs = tuple(self._placement(i, factor, reduce_op) for i in range(len(self.outputs)))
        if None in outputs or not self._cuts_at_units(factor, axis, cuts):
            return None
        if factor in cuts.axes and self.extent(factor) is not None:
            return None  # pieces of pieces of a window are not as large as those of a placement
        inputs: list[Placement] = []
        for index, dims in enumerate(self.inputs):
            position = dim_of(dims, factor)
            if position is not None:
                inputs.append(Shard(position))
            elif index in self.addends and reduce_op is not None:
                inputs.append(Partial(reduce_op))
            else:
                inputs.append(Replicate())
        later = self.reduce_bytes.get(factor)
        return Row(
            tuple(inputs),
            tuple(p for p in outputs if p is not None),
            factor,
            later[axis] if later else 0.0,
        )

    def extent(self, factor: int) -> int | None:
        """Return the number of steps of a factor of which some dim is a window, else None."""
        found = self._dims_of(factor)
        if all(dim.window is None for dim, _ in found):
            return None
        return max(size if dim.window is None else dim.window.stop for dim, size in found)

    def takes_any_order(self, factor: int) -> bool:
        """Whether a factor may be split into indices that are no neighbours: all are on their own.

        Not where dims make several steps of it or have a window, nor where the local kernel may
        look at where its part begins.
        """
        looks = self.positions is None or factor in self.positions
        if self.local is not None and looks and self.local not in IN_ANY_ORDER:
            return False
        if factor in self.blocks or factor in self.even:
            return False
        return all(dim.unit == 1 and dim.window is None for dim, _ in self._dims_of(factor))

    def _dims_of(self, factor: int) -> list[tuple[Dim, int]]:
        """Return the dims of all tensors that have a factor, with their sizes."""
        shapes = [spec.shape for spec in self.call.specs]
        shapes += [meta.shape if meta else () for meta in self.call.outputs]
        return [
            (dim, size)
            for dims, shape in zip([*self.inputs, *self.outputs], shapes, strict=True)
            for dim, size in zip(dims, shape, strict=False)
            if dim is not None and dim.factor == factor
        ]

    def _placement(self, index: int, factor: int, reduce_op: str | None) -> Placement | None:
        position, meta = dim_of(self.outputs[index], factor), self.call.outputs[index]
        if position is not None:
            return Shard(position)
        holds_nothing = meta is None or 0 in meta.shape
        if holds_nothing or (self.untouched and factor in self.untouched[index]):
            return Replicate()
        return None if reduce_op is None else Partial(reduce_op)

    def _cuts_at_units(self, factor: int, axis: int, cuts: Cuts) -> bool:
        """Whether every cut falls between two indices of each dim of a joined factor."""
        if not self.is_joined:
            return True
        found = [(dim.unit, size) for dim, size in self._dims_of(factor)]
        block = self.blocks.get(factor, 1)
        units = {unit for unit, _ in found} | {block}
        if len(units) <= 1:
            return True
        earlier = cuts.axes.get(factor, [])
        if earlier:
            if self._has_ragged(factor):  # whose pieces other axes cut at other places
                return False
            pieces = cuts.mesh_shape[axis]
            for other in earlier:
                pieces *= cuts.mesh_shape[other]
            return all(size % pieces == 0 and size // pieces * u % block == 0 for u, size in found)
        bounds = self._bounds(factor, axis, cuts)
        return all(bound % unit == 0 for bound in bounds for unit in units)

    def _has_ragged(self, factor: int) -> bool:
        """Whether some input is cut into pieces of given sizes there."""
        return any(
            split.starts is not None and split.order is None
            for spec, dims in zip(self.call.specs, self.inputs, strict=True)
            if (position := dim_of(dims, factor)) is not None
            for split in spec.layout.splits[position]
        )

    def _bounds(self, factor: int, axis: int, cuts: Cuts) -> list[int]:
        """Return where ``axis`` cuts the inputs, in steps of the factor.

        The cuts are those of the inputs that this axis alone cuts there, or else even ones of the
        first input.
        """
        present: list[tuple[bool, list[int]]] = []
        for index, dims in enumerate(self.inputs):
            position = dim_of(dims, factor)
            if position is not None:
                splits = self.call.specs[index].layout.splits[position]
                # Else it cannot lead.
                is_cut = [split.axis for split in splits] == [axis] and splits[0].order is None
                starts = splits[0].starts if is_cut else None
                bounds = self._bounds_of(index, position, starts, cuts.mesh_shape[axis])
                present.append((not is_cut, bounds))
        has_cuts = any(not is_whole for is_whole, _ in present)
        chosen = [bounds for is_whole, bounds in present if not (is_whole and has_cuts)]
        return [bound for bounds in chosen[: None if has_cuts else 1] for bound in bounds]

    def _bounds_of(
        self, index: int, position: int, starts: Sequence[int] | None, count: int
    ) -> list[int]:
        spec, dim = self.call.specs[index], self.inputs[index][position]
        unit = dim.unit if dim else 1
        return [start * unit for start in starts or even_bounds(spec.shape[position], count)]


def dim_of(dims: Dims, factor: int) -> int | None:
    """Return the tensor dim of a factor, if the tensor has it."""
    for position, dim in enumerate(dims):
        if dim is not None and dim.factor == factor:
            return position
    return None


def numbered(*names: str) -> tuple[Dims, ...]:
    """Return dims from letters: the same letter is the same factor, '.' is none.

    >>> numbered("ik", "kj", "ij")[2]
    (Dim(factor=0, unit=1, window=None), Dim(factor=2, unit=1, window=None))
    """
    order: dict[str, int] = {}
    return tuple(
        tuple(None if c == "." else Dim(order.setdefault(c, len(order))) for c in name)
        for name in names
    )
