"""Listed rows tried out: on parts that stand for ranks, in one process, against whole tensors.

Nothing is sent, and all ranks find the same: values come from a fixed seed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ...geometry.layout import Layout
from ...geometry.mesh import Mesh
from ...geometry.placement import Partial, Placement, format_placements
from ...mesh.spec import DTensorSpec
from ..engine.table import OpCall, Row

_COUNTS = (2, 3)
_SEED = 20


def check_rows(call: OpCall, rows: Sequence[Row]) -> None:
    """Raise PlacementError unless every row gives what the operator gives for whole tensors.

    On random values of the call's shapes, cut for 2 and 3 ranks, and for more where no sharded dim
    is cut unevenly so. Results may differ by the root of the dtype's precision.
    """
    generator = torch.Generator().manual_seed(_SEED)
    wholes = [_values(spec, generator) for spec in call.specs]
    try:
        expected = _tensors(_run(call, wholes))
    except Exception as error:
        raise PlacementError(
            f"the rule registered for {call.op} cannot be checked: on random values the operator "
            f"itself raises {error!r}; leave check=True out"
        ) from error
    for row in rows:
        for count in _counts(call, row):
            _check(call, row, count, wholes, expected, generator)


def _counts(call: OpCall, row: Row) -> Iterator[int]:
    """Yield numbers of ranks, of which one cuts unevenly what can be."""
    yield from _COUNTS
    sizes = [
        spec.shape[d]
        for spec, placement in zip(call.specs, row.inputs, strict=True)
        for d in range(spec.ndim)
        if placement.is_shard(d) and spec.shape[d]
    ]
    if sizes and not any(size % count for size in sizes for count in _COUNTS):
        yield next(n for n in range(4, 64) if any(size % n for size in sizes))


def _values(spec: DTensorSpec, generator: torch.Generator) -> Tensor:
    """Return small values of a dtype, which differ."""
    shape, dtype = tuple(spec.shape), spec.dtype
    if dtype == torch.bool:
        made = torch.randint(0, 2, shape, generator=generator)
    elif dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        made = torch.randint(0, 4, shape, generator=generator)
    return made.to(dtype).to(spec.mesh.device)


def _check(
    call: OpCall,
    row: Row,
    count: int,
    wholes: Sequence[Tensor],
    expected: Sequence[Tensor | None],
    generator: torch.Generator,
) -> None:
    given = [
        _parts(whole, placement, count, generator)
        for whole, placement in zip(wholes, row.inputs, strict=True)
    ]
    results: list[list[Tensor | None]] = []
    for rank in range(count):
        parts = [part[rank] for part in given]
        try:
            results.append(_tensors(_run(call, parts)))
        except Exception as error:
            shapes = [tuple(part.shape) for part in parts]
            told = f"rank {rank} raises {error!r} for parts of shapes {shapes}"
            raise _wrong(call, row, count, told) from error
    for number, (placement, whole) in enumerate(zip(row.outputs, expected, strict=True)):
        if whole is None:
            continue
        of_ranks = [parts[number] for parts in results]
        for name, found in _joined(of_ranks, placement, whole):
            told = _difference(found, whole)
            if told:
                output = f"output {number}" if len(expected) > 1 else "the output"
                raise _wrong(call, row, count, f"{output}, {name}, {told}")


def _parts(
    whole: Tensor, placement: Placement, count: int, generator: torch.Generator
) -> list[Tensor]:
    """Return what each rank holds; terms of a Partial differ."""
    if isinstance(placement, Partial):
        return _terms(whole, placement.reduce_op, count, generator)
    layout = Layout(Mesh((count,)), (placement,), tuple(whole.shape))
    return [whole[layout.box((rank,)).slices].contiguous() for rank in range(count)]


def _terms(whole: Tensor, op: str, count: int, generator: torch.Generator) -> list[Tensor]:
    others = [
        torch.randint(1, 3, whole.shape, generator=generator).to(whole.dtype).to(whole.device)
        for _ in range(count - 1)
    ]
    if whole.dtype == torch.bool:
        join = operator.or_ if op in ("min", "product") else operator.and_
        return [whole, *(join(whole, other) for other in others)]
    if op == "product":
        return [whole, *(torch.ones_like(whole) for _ in others)]
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        return [*(whole + sign * other for other in others), whole]
    total = whole * count if op == "avg" else whole
    return [functools.reduce(operator.sub, others, total), *others]


def _joined(
    parts: Sequence[Tensor | None], placement: Placement, whole: Tensor
) -> Iterator[tuple[str, Tensor | str]]:
    """Yield what the results of all ranks are together, or what is wrong with them, by a name."""
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        yield "together", "there is no tensor on some rank"
        return
    if isinstance(placement, Partial):
        yield "reduced", _reduced(tensors, placement.reduce_op)
        return
    layout = Layout(Mesh((len(parts),)), (placement,), tuple(whole.shape))
    boxes = [layout.box((rank,)) for rank in range(len(parts))]
    for rank, (part, box) in enumerate(zip(tensors, boxes, strict=True)):
        if tuple(part.shape) != box.sizes:
            yield f"on rank {rank}", f"has shape {tuple(part.shape)}, expected {box.sizes}"
            return
    if placement.is_shard():
        made = torch.empty_like(whole, dtype=tensors[0].dtype)
        for part, box in zip(tensors, boxes, strict=True):
            made[box.slices] = part
        yield "joined", made
        return
    yield from ((f"on rank {rank}", part) for rank, part in enumerate(tensors))


def _reduced(terms: Sequence[Tensor], op: str) -> Tensor:
    two: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": operator.add,
        "avg": operator.add,
        "product": operator.mul,
        "max": torch.maximum,
        "min": torch.minimum,
    }
    total = functools.reduce(two[op], terms)
    return total / len(terms) if op == "avg" else total


def _difference(found: Tensor | str, whole: Tensor) -> str:
    """Return how far a result is from what it must be; nothing for rounding."""
    if isinstance(found, str):
        return found
    if found.shape != whole.shape:
        return f"has shape {tuple(found.shape)}, expected {tuple(whole.shape)}"
    wide = torch.complex128 if whole.dtype.is_complex else torch.float64
    a, b = found.to(wide), whole.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    largest = gap.max().item() if gap.numel() else 0.0
    inexact = whole.dtype.is_floating_point or whole.dtype.is_complex
    finite = b.abs().nan_to_num(0.0, 0.0, 0.0)
    size = max(finite.max().item() if finite.numel() else 0.0, 1.0)
    allowed = torch.finfo(whole.dtype).eps ** 0.5 * size if inexact else 0.0
    return f"differs by up to {largest:.3g} from the whole" if largest > allowed else ""


def _wrong(call: OpCall, row: Row, count: int, told: str) -> PlacementError:
    return PlacementError(
        f"the rule registered for {call.op} says that inputs of placements "
        f"{format_placements(row.inputs)} give outputs of placements "
        f"{format_placements(row.outputs)}, but over {count} ranks {told}; leave this "
        "sharding out of what the rule returns"
    )


def _run(call: OpCall, tensors: Sequence[Tensor]) -> Any:
    remaining = iter(tensors)

    def given(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            return next(remaining).clone()
        if isinstance(value, list | tuple):
            return type(value)([given(item) for item in value])
        return value

    args = [given(value) for value in call.args]
    return call.op(*args, **{name: given(value) for name, value in call.kwargs.items()})


def _tensors(result: Any) -> list[Tensor | None]:
    listed = result if isinstance(result, list | tuple) else [result]
    return [one if isinstance(one, Tensor) else None for one in listed]
