"""How two checkpoints differ, whoever wrote them and however their tensors lay on ranks."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..formats.flat_names import FlatLeaf, flat_leaves
from ..formats.opening import open_place, read_manifest, stored_data
from ..mapping.rules import Move
from ..mapping.table import MappingTable
from ..reading import limits
from ..reading.batches import counted
from ..reading.execution import execute
from ..reading.packed_values import with_plain_values
from ..reading.read_plan import plan_reads
from ..reading.wants import ArraySink, Want
from ..state.limits import shown
from ..state.selecting import Selection, selection_of
from ..state.subclass_node import SUBCLASS, note_of
from ..state.tree import TENSORS, below, children, index_tree, same_values, tag_of, tags_in
from ..tensors.sink import Array
from .drift import Drift, drift_of

_GROUP_BYTES = 8 << 20
"""Bytes of one checkpoint that a thread reads before it compares them."""
_GROUP_TENSORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """How a tensor differs between two checkpoints."""

    name: str
    """In the first checkpoint."""
    other_name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    layouts: tuple[str, str]
    by: Literal["checksums", "values", "nothing"]
    """What was compared: checksums where all were the same, nothing where shapes differ."""
    drift: Drift | None
    """None unless values were compared."""

    @property
    def is_same(self) -> bool:
        """Whether every bit is the same; layouts do not count."""
        return self.by == "checksums" or (
            self.drift is not None
            and self.dtypes[0] == self.dtypes[1]
            and self.drift.num_changed == self.drift.changed_bytes == 0
        )

    def is_within(self, tolerance: float | None) -> bool:
        """Whether values differ by no more than was tolerated, whatever their dtypes.

        With a ``tolerance`` it is enough that their relative drift is no larger; NaN and infinities
        have to be in the same places.
        """
        if self.drift is None:
            return self.by == "checksums"
        if tolerance is None:
            return self.drift.num_beyond == 0
        return self.drift.num_beyond == 0 or (
            self.drift.num_odd == 0 and self.drift.relative_l2 <= tolerance
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two checkpoints differ."""

    urls: tuple[str, str]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of tensors that are in one alone."""
    only_values: tuple[tuple[str, ...], tuple[str, ...]]
    """And of what is no tensor."""
    tensors: Mapping[str, TensorComparison]
    """All that are in both, by their names in the first."""
    values: Mapping[str, tuple[Any, Any]]
    """What is no tensor, is in both and differs: both, as the manifests have them."""


def compare(
    checkpoint_id: str | os.PathLike[str] | Store,
    other: str | os.PathLike[str] | Store,
    select: str | Sequence[str] | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    storage_options: Mapping[str, Any] | None = None,
    other_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Return how two checkpoints differ; of any format that is read, and of any layouts.

    Names are those that have the keys joined by dots, so that a nested state matches one that was
    saved flat. ``rename`` gives tensors of the first other names before, as in ``edit``; ``select``
    is of names in the first. Tensors of one shape, and NumPy arrays, are compared as numbers of 64
    bits, or exactly if they are integers, in bounded memory and by several threads; those whose
    checksums and cuts are the same are not read. Values are equal unless they differ by more than
    ``atol`` plus ``rtol`` times the size of the first. ``on_progress(done, total)`` is called with
    bytes of the first.

    Raises LayoutMismatch where names are ambiguous or ``select`` selects nothing, ValueError for a
    tolerance that is negative, NaN or infinite, Corrupt, and what ``open`` raises.
    """
    for what, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{what}={value}: expected a number that is not negative")
    stores = (
        open_place(checkpoint_id, **dict(storage_options or {})),
        open_place(other, **dict(other_options or {})),
    )
    first, second = (read_manifest(store) for store in stores)
    if rename:
        first = MappingTable([Move(old, new) for old, new in rename.items()]).applied_to(
            first, stores[0].url
        )
    # What others have saved has a node for each value. Of two of ours digests tell.
    expands = not (first.is_ours and second.is_ours)
    sides = _Side(stores[0], first, expands=expands), _Side(stores[1], second, expands=expands)
    return _compare(sides, selection_of(select), rtol, atol, on_progress)


class _Side:
    def __init__(self, store: Store, manifest: Manifest, *, expands: bool) -> None:
        self.url = store.url
        self.data: StoredData = stored_data(store, manifest)
        if expands:
            manifest = with_plain_values(manifest, self.data)
        self.manifest = manifest
        self.leaves = _with_tensors_of_values(
            flat_leaves(manifest.tree, store.url, "rename one of them"), store.url
        )

    def tensor(self, leaf: FlatLeaf) -> StoredTensor | None:
        """Return the tensor of a leaf, None if it is a value."""
        return None if leaf.tensor is None else self.manifest.tensors[leaf.tensor]


def _with_tensors_of_values(leaves: dict[str, FlatLeaf], where: str) -> dict[str, FlatLeaf]:
    """Add to leaves the tensors and arrays in tuples and in lists that are one value.

    Those values stay, to be compared whatever tensors they name.
    """
    found = dict(leaves)
    for name, leaf in leaves.items():
        if leaf.tensor is None:
            for inner in _tensors(leaf):
                flat = ".".join(map(str, inner.path))
                if flat != name and flat in found:
                    raise LayoutMismatch(
                        f"{where}: two tensors or values would both be called {shown(flat)}; "
                        "rename one of them"
                    )
                found[flat] = inner
    return found


def _tensors(leaf: FlatLeaf) -> Iterator[FlatLeaf]:
    tag = tag_of(leaf.node)
    if tag in TENSORS:
        yield FlatLeaf(leaf.path, {"tensor": leaf.node[tag]}, leaf.node[tag])
        return
    for key, component, child in children(leaf.node):
        yield from _tensors(FlatLeaf((*leaf.path, key), child, below(leaf.name, component)))


_Sides = tuple[_Side, _Side]
_Pair = tuple[StoredTensor, StoredTensor]


def _compare(
    sides: _Sides,
    selection: Selection | None,
    rtol: float,
    atol: float,
    on_progress: Callable[[int, int], None] | None,
) -> Comparison:
    names = [_chosen(side, selection) for side in sides]
    if selection is not None:
        selection.check([side.leaves[n].name for side in sides for n in side.leaves], sides[0].url)
    only: tuple[list[str], list[str]] = [], []
    only_values: tuple[list[str], list[str]] = [], []
    pairs: list[_Pair] = []
    values: dict[str, tuple[Any, Any]] = {}
    for name in names[0] | names[1]:
        leaves = [side.leaves.get(name) for side in sides]
        one, other = (
            None if leaf is None else side.tensor(leaf)
            for side, leaf in zip(sides, leaves, strict=True)
        )
        if one is not None and other is not None:
            pairs.append((one, other))
            continue
        for tensor, mine in ((one, only[0]), (other, only[1])):
            if tensor is not None:
                mine.append(tensor.name)
        nodes = [leaf.node for leaf in leaves if leaf is not None and leaf.tensor is None]
        if len(nodes) == 1:
            mine = leaves[0] is None or leaves[0].tensor is not None
            only_values[mine].append(sides[mine].leaves[name].name)
        elif nodes and not same_values(nodes[0], nodes[1]):
            values[sides[0].leaves[name].name] = nodes[0], nodes[1]
    values |= _other_subclasses(sides, selection)
    drifts = _drifts(sides, pairs, rtol, atol, on_progress)
    return Comparison(
        urls=(sides[0].url, sides[1].url),
        only=(tuple(only[0]), tuple(only[1])),
        only_values=(tuple(only_values[0]), tuple(only_values[1])),
        tensors={
            pair[0].name: _told(pair, drift) for pair, drift in zip(pairs, drifts, strict=True)
        },
        values=values,
    )


def _other_subclasses(sides: _Sides, selection: Selection | None) -> dict[str, tuple[str, str]]:
    """Return the tensor subclasses whose classes or contexts differ between two checkpoints."""
    if not all(SUBCLASS in tags_in(side.manifest.tree) for side in sides):
        return {}
    found: list[dict[str, tuple[str, str]]] = []
    for side in sides:
        index = index_tree(side.manifest.tree)
        subclasses = [name for name, node in index.nodes.items() if _is_subclass(node)]
        found.append(
            {
                name.replace("/", "."): (name, note_of(index.nodes[name]).to_text())
                for name in subclasses
                if selection is None or any(leaf in selection for leaf in index.leaves_of(name))
            }
        )
    one, other = found
    return {
        name: (text, other[flat][1])
        for flat, (name, text) in one.items()
        if flat in other and other[flat][1] != text
    }


def _is_subclass(node: Any) -> bool:
    return isinstance(node, dict) and tag_of(node) == SUBCLASS


def _chosen(side: _Side, selection: Selection | None) -> dict[str, None]:
    return {n: None for n in side.leaves if selection is None or side.leaves[n].name in selection}


_Found = Drift | Literal["checksums", "nothing"]


def _told(pair: _Pair, found: _Found) -> TensorComparison:
    one, other = pair
    return TensorComparison(
        name=one.name,
        other_name=other.name,
        dtypes=(one.dtype.torch_name, other.dtype.torch_name),
        shapes=(one.shape, other.shape),
        layouts=(str(one.layout), str(other.layout)),
        by="values" if isinstance(found, Drift) else found,
        drift=found if isinstance(found, Drift) else None,
    )


def _drifts(
    sides: _Sides,
    pairs: Sequence[_Pair],
    rtol: float,
    atol: float,
    on_progress: Callable[[int, int], None] | None,
) -> list[_Found]:
    """Return what is found of all pairs; several threads read and compare some of each at once."""
    found: list[_Found] = []
    read: list[int] = []
    for number, (one, other) in enumerate(pairs):
        if one.shape != other.shape or one.dtype.packed != other.dtype.packed:
            found.append("nothing")
        elif _has_same_checksums(sides, one, other):
            found.append("checksums")
        else:
            found.append(Drift())
            read.append(number)
    lock, stop = threading.Lock(), threading.Event()
    add = counted(on_progress, sum(pairs[number][0].num_bytes for number in read))
    groups = _groups(pairs, read)

    def work() -> None:
        while not stop.is_set():
            with lock:
                group = next(groups, None)
            if group is None:
                return
            arrays = [
                _read(side.data, [(pairs[n][i], box) for n, box in group])
                for i, side in enumerate(sides)
            ]
            for (number, _), *items in zip(group, *arrays, strict=True):
                one, other = pairs[number]
                drift = drift_of(
                    (one.dtype, other.dtype), (items[0], items[1]), rtol=rtol, atol=atol
                )
                with lock:
                    before = found[number]
                    found[number] = before.merged(drift) if isinstance(before, Drift) else drift
                    add(items[0].nbytes)

    num = limits.num_readers([side.data.store for side in sides], None)
    with ThreadPoolExecutor(num, thread_name_prefix="dtckpt-compare") as pool:
        try:
            for future in as_completed([pool.submit(work) for _ in range(num)]):
                future.result()  # of the first that failed, which stops the others
        finally:
            stop.set()
    for side in sides:
        side.data.check_unchanged()
    return found


def _groups(pairs: Sequence[_Pair], read: Sequence[int]) -> Iterator[list[tuple[int, Box]]]:
    """Yield boxes of pairs, given by number, that are read in one go."""
    group: list[tuple[int, Box]] = []
    num_bytes = 0
    for number in read:
        one, other = pairs[number]
        itemsize = max(one.dtype.itemsize, other.dtype.itemsize)
        for box in Box.whole(one.shape).parts(_GROUP_BYTES // itemsize):
            size = box.numel * itemsize
            if group and (num_bytes + size > _GROUP_BYTES or len(group) == _GROUP_TENSORS):
                yield group
                group, num_bytes = [], 0
            group.append((number, box))
            num_bytes += size
    if group:
        yield group


def _read(data: StoredData, parts: Sequence[tuple[StoredTensor, Box]]) -> list[Array]:
    arrays = [np.empty(box.sizes, dtype=tensor.dtype.items) for tensor, box in parts]
    wants = [
        Want(tensor=tensor, box=box, sink=ArraySink(array))
        for (tensor, box), array in zip(parts, arrays, strict=True)
    ]
    execute(plan_reads(data, wants), check_files=False, num_local=os.cpu_count())
    return arrays


def _has_same_checksums(sides: _Sides, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether checksums tell that two tensors are the same, because they are cut alike."""
    if not all(side.manifest.is_ours for side in sides) or one.dtype is not other.dtype:
        return False
    if one.recipe is not None or other.recipe is not None:
        return False
    others = {box: rank for rank, box in other.chunks()}
    chunks = list(one.chunks())
    if others.keys() != {box for _, box in chunks}:
        return False
    for rank, box in chunks:
        if box.is_empty:
            continue
        file, entry = sides[0].data.entry(rank, one, box)
        its_file, its_entry = sides[1].data.entry(others[box], other, box)
        if file.layout.block_bytes != its_file.layout.block_bytes:
            return False
        if file.digests(entry) != its_file.digests(its_entry):
            return False
    return True
