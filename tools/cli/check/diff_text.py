"""What ``dtckpt diff`` prints for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..common.console import count, iec, printable, stdout_console
from ..common.grid import Grid, Lines, plain, show
from ..common.telling import say

if TYPE_CHECKING:
    from ....checkpoint import Comparison, Drift, TensorComparison

_MAX_VALUE = 60


def show_difference(found: Comparison, differing: Sequence[TensorComparison]) -> None:
    """Print what differs, and a summary."""
    only = [(*found.only[side], *found.only_values[side]) for side in (0, 1)]
    for sign, names in zip("-+", only, strict=True):
        for name in names:
            click.echo(f"{sign} {printable(name)}")
    for name, (one, other) in found.values.items():
        click.echo(f"~ {printable(name)}: {_value(one)} -> {_value(other)}")
    others = [each for each in differing if each.drift is None or _is_as_told(each)]
    for each in others:
        click.echo(f"~ {printable(each.name)}: {_change(each)}")
    drifted = [each for each in differing if each.drift is not None and each.drift.num_changed]
    if drifted:
        _show_drifts(drifted)
    by = [each.by for each in found.tensors.values()]
    say(
        f"{count(len(by), 'tensor')} compared, {by.count('checksums'):,} by equal checksums; "
        f"{len(differing):,} differ\n{count(len(found.values), 'value')} "
        f"{'differs' if len(found.values) == 1 else 'differ'}; "
        f"{len(only[0]):,} names only in the first, {len(only[1]):,} in the other"
    )


def _is_as_told(each: TensorComparison) -> bool:
    """Whether what is told of a tensor differs, or its bytes, though its values do not."""
    told = each.dtypes[0] != each.dtypes[1] or each.shapes[0] != each.shapes[1]
    return told or each.layouts[0] != each.layouts[1] or not (each.drift and each.drift.num_changed)


def _change(each: TensorComparison) -> str:
    parts: list[str] = []
    for one, other in (each.dtypes, each.shapes, each.layouts):
        if one != other:
            one, other = (list(x) if isinstance(x, tuple) else x for x in (one, other))
            parts.append(printable(f"{one} -> {other}"))
    if not parts and each.drift is not None:
        parts.append(f"{count(each.drift.changed_bytes, 'byte')} differ, of equal values")
    return "; ".join(parts)


def _show_drifts(drifted: Sequence[TensorComparison]) -> None:
    grid = Grid("tensor", "drift", "max abs", "cosine", "changed", "", right=(1, 2, 3, 4))
    rows = [(printable(each.name), each.drift) for each in drifted]
    cells = [(name, _cells(drift)) for name, drift in rows if drift is not None]
    for name, row in cells:
        grid.add(plain(name), *map(plain, row))
    console = stdout_console()
    if grid.width <= console.width:
        show(console, grid)
        return
    labels = ("drift", "max", "cosine", "changed", "")
    lines = [
        line
        for name, row in cells
        for line in (
            plain(name),
            plain("  " + " ".join(f"{a} {b}".strip() for a, b in zip(labels, row, strict=True))),
        )
    ]
    show(console, Lines(lines))


def _cells(drift: Drift) -> tuple[str, ...]:
    cosine = "" if drift.cosine is None else f"{drift.cosine:.6f}"
    share = f"{drift.num_changed / drift.num_values:.1%}"
    changed = f"{share} {iec(drift.changed_bytes)}" if drift.changed_bytes else share
    odd = [
        f"{what} {one:,} -> {other:,}"
        for what, (one, other) in (("NaN", drift.num_nan), ("inf", drift.num_inf))
        if one or other
    ]
    return f"{drift.relative_l2:.3g}", f"{drift.max_abs:.3g}", cosine, changed, " ".join(odd)


def _value(node: object) -> str:
    text = json.dumps(node)
    return printable(text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}...")
