"""A checkpoint, or the checkpoints of a run, for people to read."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.tree import Tree

from ....checkpoint.examining.balance import file_balance, rank_balance
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
from ..common.treeview import Branch, Guides, matcher, rows, view

if TYPE_CHECKING:
    from rich.console import Console

    from ....checkpoint import Manifest
    from ....checkpoint.runs.overview import StepOverview

_MAX_FILES = 16

Told = Callable[[Layout | IrregularLayout], str]
"""Says in a few words where a tensor lies."""


def show_run(url: str, steps: Sequence[StepOverview]) -> None:
    """List the checkpoints of a run."""
    console = stdout_console()
    grid = Grid("step", "checkpoint", right=(0,))
    for step in steps:
        is_damaged = ("  damaged", "red") if step.state == "damaged" else ("", "")
        grid.add(plain(str(step.number)), ((printable(step.url), ""), is_damaged))
    head = f"{count(len(steps), 'checkpoint')} in {printable(url)}"
    show(console, Lines([plain(head), plain("")]), grid)
    hint = f"Look into one: dtckpt inspect {printable(steps[-1].url)}"
    show(console, Lines([plain(""), plain(hint)]))


def show_checkpoint(url: str, manifest: Manifest, names: tuple[str, ...], *, values: bool) -> None:
    """Print header, structure and files."""
    console = stdout_console()
    blank = Lines([plain("")])
    show(console, _header(url, manifest))
    root = view(manifest.tree, manifest.tensors, wanted=matcher(names), values=values)
    if root.children:
        told = layout_text if manifest.is_ours else _files_text
        show(console, blank, _structure(console, root, told))
    if names:
        show(console, blank, Lines([plain(_selection(manifest, names))]))
    if manifest.files:
        show(console, blank, _files(manifest))


def _header(url: str, manifest: Manifest) -> Grid:
    tensor_bytes = sum(tensor.stored_bytes for tensor in manifest.tensors_of_state.values())
    file_bytes = sum(record.size for record in manifest.files)
    ours = [
        ("save id", manifest.save_id),
        ("created", manifest.created),
        ("format", f"dtckpt {manifest.version}{', compressed' if manifest.is_compressed else ''}"),
    ]
    facts = [
        ("checkpoint", url),
        *(ours if manifest.is_ours else [("format", manifest.format)]),
        ("tensors", f"{len(manifest.tensors_of_state):,}, {iec(tensor_bytes)}"),
        ("files", f"{len(manifest.files):,}, {iec(file_bytes)}{_decoded(manifest)}"),
        *(("" if i else "refers to", text) for i, text in enumerate(_lenders(manifest))),
        *(("" if i else "mesh", text) for i, text in enumerate(_meshes(manifest))),
        *(("" if i else "balance", text) for i, text in enumerate(_balances(manifest))),
    ]
    if manifest.metadata is not None:
        facts.append(("metadata", json.dumps(manifest.metadata, ensure_ascii=False)))
    grid = Grid()
    for label, text in facts:
        grid.add(plain(label, "bold"), plain(printable(text)))
    return grid


def _decoded(manifest: Manifest) -> str:
    """Return what the data in compressed files amounts to, and how much they have saved."""
    files = [record for record in manifest.files if record.is_compressed]
    num_bytes = sum(record.data_bytes for record in files)
    stored = sum(record.region_bytes for record in files)
    return f" for {iec(num_bytes)} of data ({num_bytes / stored:.2f} x)" if stored else ""


def _files_text(layout: Layout | IrregularLayout) -> str:
    """Return in how many parts a tensor of another format is, or how it lies on ranks."""
    if isinstance(layout, IrregularLayout):
        return f"{len(layout.boxes()):,} boxes"
    if layout.mesh.size == 1:
        return "whole"
    return f"{placements_text(layout)} on {layout.mesh}"  # whose ranks are numbers of files


def _lenders(manifest: Manifest) -> list[str]:
    """Return the earlier checkpoints that an incremental one needs."""
    files = Counter(file.source for file in manifest.borrowed)
    return [f"{name} beside it, {count(number, 'file')}" for name, number in files.items()]


def _meshes(manifest: Manifest) -> list[str]:
    """Return every mesh once, in the order of the tensors; files of others have none."""
    if not manifest.is_ours:
        return []
    layouts = (tensor.layout for tensor in manifest.tensors_of_state.values())
    meshes = {layout.mesh: None for layout in layouts if not isinstance(layout, IrregularLayout)}
    return [f"{mesh_text(mesh)}: {count(mesh.size, 'rank')}" for mesh in meshes]


def _balances(manifest: Manifest) -> Iterator[str]:
    """Yield how evenly bytes are spread, in one line however many ranks and files there are."""
    for balance, noun, verb in (
        (rank_balance(manifest), "rank", "hold"),
        (file_balance(manifest), "file", "have"),
    ):
        if balance is None or balance.num == 1:
            continue
        least, most = iec(balance.least_bytes), iec(balance.most_bytes)
        who = f"{balance.num:,} {noun}s {verb}"
        if balance.least_bytes == balance.most_bytes:
            yield f"{who} {most} each"
        else:
            most_by = f"{most} ({noun} {balance.most})"
            ratio = f"max/mean {balance.most_over_mean:.2f}"
            yield f"{who} {least} ({noun} {balance.least}) to {most_by}, {ratio}"


def _structure(console: Console, root: Branch, told: Told) -> Grid | Lines:
    """Return the tree with one line for each leaf, or with two where lines are short."""
    guides: Guides = Tree.ASCII_GUIDES if console.options.ascii_only else Tree.TREE_GUIDES[0]
    grid = Grid("name", "dtype and shape, or value", "bytes", "layout", right=(2,))
    for lead, branch in rows(root, guides):
        grid.add([(lead, "dim"), _label(branch)], *((fact,) for fact in _facts(branch, told)))
    return grid if grid.width <= console.width else Lines(list(_narrow(root, guides, told)))


def _narrow(root: Branch, guides: Guides, told: Told) -> Iterator[Line]:
    """Yield the tree with the facts of a tensor on the line below its name."""
    space, going_on, fork, _ = guides
    for lead, branch in rows(root, guides):
        facts = [part for fact in _facts(branch, told) for part in (("  ", ""), fact)]
        if branch.tensor is None:
            yield [(lead, "dim"), _label(branch), *facts]
            continue
        below = lead[: -len(fork)] + (going_on if lead.endswith(fork) else space)
        yield [(lead, "dim"), _label(branch)]
        yield [(below, "dim"), *facts]


def _label(branch: Branch) -> tuple[str, str]:
    return branch.label, "bold" if branch.children else ""


def _facts(branch: Branch, told: Told) -> Iterator[tuple[str, str]]:
    tensor = branch.tensor
    if tensor is not None:
        yield tensor_text(tensor), ""
        yield iec(tensor.num_bytes), "cyan"
        tie = f", tied to {printable(tensor.same_as)}" if tensor.same_as else ""
        yield f"{told(tensor.layout)}{tie}", ""
    elif branch.text:
        yield branch.text, "dim" if branch.children else "green"


def _selection(manifest: Manifest, names: tuple[str, ...]) -> str:
    wanted = matcher(names)
    shown = [tensor for name, tensor in manifest.tensors_of_state.items() if wanted(name)]
    num_bytes = sum(tensor.num_bytes for tensor in shown)
    num_all = len(manifest.tensors_of_state)
    return f"{len(shown):,} of {count(num_all, 'tensor')} match, {iec(num_bytes)}"


def _files(manifest: Manifest) -> Grid:
    """Return one line for each file, where there are many for each run of files alike."""
    grid = Grid("file", "bytes", right=(1,))
    is_many = len(manifest.files) > _MAX_FILES
    alike = groupby(manifest.files, lambda r: iec(r.size) if is_many else r.rank)
    runs = [list(run) for _, run in alike]
    for run in runs[:_MAX_FILES]:
        name, size = manifest.path_of(run[0]), iec(run[0].size)
        if len(run) > 1:
            name += f" to {os.path.basename(manifest.path_of(run[-1]))}"
            size = f"{len(run):,} x {size}"
        grid.add(plain(printable(name)), plain(size, "cyan"))
    rest = [record for run in runs[_MAX_FILES:] for record in run]
    if rest:
        size = sum(record.size for record in rest)
        grid.add(plain(f"... and {len(rest):,} more"), plain(iec(size), "cyan"))
    return grid
