"""How a checkpoint differs from another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..common.console import count, printable
from ..common.telling import bar

if TYPE_CHECKING:
    from ....checkpoint import Comparison, TensorComparison
    from ....checkpoint.examining.drift import Drift
    from ....storage import Store

_MAX_ROWS = 500


def comparison(store: Store, other: Store) -> dict[str, Any]:
    """Return what differs between two checkpoints, the largest drift first."""
    from ....checkpoint import compare

    with bar("comparing") as on_progress:
        found = compare(store, other, on_progress=on_progress)
    rows = [*_only(found), *_differing(found)]
    same = [tensor for tensor in found.tensors.values() if tensor.is_same]
    otherwise = sum(tensor.layouts[0] != tensor.layouts[1] for tensor in same)
    alike = f"{count(len(same), 'tensor')} the same in every bit"
    if otherwise:
        alike += f" ({otherwise:,} of them laid out otherwise)"
    return {
        "url": printable(other.url),
        "summary": f"{alike}, {count(len(rows), 'difference')}.",
        "rows": rows[:_MAX_ROWS],
        "hidden": max(len(rows) - _MAX_ROWS, 0),
    }


def _only(found: Comparison) -> Iterable[list[Any]]:
    for names, where in zip(found.only, ("only here", "only there"), strict=True):
        yield from (_row(name, where) for name in names)
    for names, where in zip(found.only_values, ("only here", "only there"), strict=True):
        yield from (_row(name, f"a value {where}") for name in names)
    yield from (_row(name, "another value") for name in found.values)


def _differing(found: Comparison) -> Iterable[list[Any]]:
    others = [tensor for tensor in found.tensors.values() if not tensor.is_same]
    for tensor in sorted(others, key=_drift_of, reverse=True):
        yield _row(tensor.name, _kinds(tensor), tensor.drift)


def _row(name: str, what: str, drift: Drift | None = None) -> list[Any]:
    figures = [None] * 4
    if drift is not None:
        figures = [drift.num_odd, drift.relative_l2, drift.max_abs, drift.cosine]
    return [printable(name), what, *figures]


def _kinds(tensor: TensorComparison) -> str:
    told: list[str] = []
    if tensor.shapes[0] != tensor.shapes[1]:
        told.append(f"shape {list(tensor.shapes[0])}, there {list(tensor.shapes[1])}")
    if tensor.dtypes[0] != tensor.dtypes[1]:
        told.append(f"{tensor.dtypes[0]}, there {tensor.dtypes[1]}")
    if tensor.layouts[0] != tensor.layouts[1]:
        told.append("another layout")
    if tensor.drift is not None:
        told.append(f"{tensor.drift.num_changed:,} of {tensor.drift.num_values:,} values")
    return "; ".join(told)


def _drift_of(tensor: TensorComparison) -> tuple[bool, int, float]:
    """Return what puts first what cannot be compared, then NaN and infinities, then drift."""
    if tensor.drift is None:
        return True, 0, 0.0
    return False, tensor.drift.num_odd, tensor.drift.relative_l2
