"""The plan of a reshard, for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....dtensor import IrregularLayout, Layout
from ..common.console import (
    count,
    iec,
    layout_text,
    mesh_text,
    placements_text,
    printable,
    stdout_console,
    tensor_text,
)
from ..common.grid import Grid, Line, Lines, plain, show
from .reshard_plan import held_by_rank

if TYPE_CHECKING:
    from rich.console import Console

    from ....checkpoint import Placed
    from ....checkpoint.files.stored_tensor import StoredTensor
    from ....checkpoint.resharding.changes import Plan

_MAX_RANKS = 16


def show_plan(plan: Plan, *, source: str, target: str) -> None:
    """Print what every tensor would become and what every rank would hold."""
    console = stdout_console()
    blank = Lines([plain("")])
    head = Grid()
    head.add(plain("source", "bold"), plain(printable(source)))
    head.add(plain("target", "bold"), plain(printable(target)))
    meshes = [i.layout.mesh for i in plan.placed if isinstance(i.layout, Layout) and not i.stays]
    for mesh in dict.fromkeys(meshes):
        head.add(plain("mesh", "bold"), plain(f"{mesh_text(mesh)}: {count(mesh.size, 'rank')}"))
    show(console, head)
    if plan.placed:
        show(console, blank, _tensors(console, plan))
        show(console, blank, _ranks(held_by_rank(plan)))
    show(console, blank, Lines([plain("Dry run: nothing was written.")]))


def _tensors(console: Console, plan: Plan) -> Grid | Lines:
    """Return one line for each tensor, or two where lines are short."""
    facts = [_facts(item, new) for item, new in zip(plan.placed, plan.tensors, strict=True)]
    grid = Grid("tensor", "dtype and shape", "bytes", "from", "to", "by", right=(2,))
    for row in facts:
        grid.add(*((fact,) for fact in row))
    if grid.width <= console.width:
        return grid
    return Lines([line for row in facts for line in _narrow(*row)])


def _facts(item: Placed, new: StoredTensor) -> tuple[tuple[str, str], ...]:
    tensor = item.tensor
    by = (item.note, "dim") if item.note or not item.rule else (printable(item.rule.pattern), "")
    return (
        (printable(tensor.name), ""),
        (tensor_text(tensor), ""),
        (iec(tensor.num_bytes), "cyan"),
        (layout_text(tensor.layout), ""),
        (_becomes(item, new), ""),
        by,
    )


def _narrow(name: tuple[str, str], *facts: tuple[str, str]) -> tuple[Line, Line]:
    what, num_bytes, before, after, by = facts
    gap = ("  ", "")
    arrow, opening, closing = (" -> ", ""), ("  (", ""), (")", "")
    return [name], [gap, what, gap, num_bytes, gap, before, arrow, after, opening, by, closing]


def _becomes(item: Placed, new: StoredTensor) -> str:
    layout = item.layout
    if layout is item.tensor.layout or isinstance(layout, IrregularLayout):
        text = "as it is"
    else:
        text = placements_text(layout)
    return text if new.dtype == item.tensor.dtype else f"{new.dtype.torch_name}, {text}"


def _ranks(held: dict[int, int]) -> Grid:
    """Return the bytes of every rank, or of the extremes where there are many."""
    grid = Grid("rank", "bytes held", right=(0, 1))
    shown = [(str(rank), num_bytes) for rank, num_bytes in held.items()]
    if len(held) > _MAX_RANKS:
        least, most = min(held, key=held.__getitem__), max(held, key=held.__getitem__)
        shown = [(f"{least} (least)", held[least]), (f"{most} (most)", held[most])]
        if held[least] == held[most]:
            shown = [(f"each of {len(held):,}", held[most])]
    for label, num_bytes in shown:
        grid.add(plain(label), plain(iec(num_bytes), "cyan"))
    return grid
