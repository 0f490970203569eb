"""What the values of tensors are like: extremes, mean, deviation, histogram, NaN and infinities."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..formats.opening import open_place, read_manifest, stored_data
from ..mapping.table import TensorMapping, mapped_manifest
from ..reading.batches import counted
from ..reading.execution import execute
from ..reading.read_plan import plan_reads
from ..reading.wants import Want
from ..state.selecting import selection_of
from ..tensors.dtypes import DType
from ..tensors.sink import Array
from .histogram import Histogram
from .moments import Moments
from .numbers import numbers

_STEP_ELEMENTS = 1 << 16
"""Elements that are looked at at once; as numbers of 64 bits they are in a processor's cache."""
_GROUP_TENSORS = 64
"""Tensors of which reads are planned together, so that many small ones are read in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """What the values of a tensor are like.

    ``min``, ``max``, ``mean``, ``std`` and ``histogram`` are of the values that are neither NaN
    nor infinite, and None where there are none. Booleans count as 0 and 1; of complex numbers the
    absolute values are meant.
    """

    name: str
    dtype: str
    """Name of the torch dtype."""
    shape: tuple[int, ...]
    num_values: int
    """Elements; twice as many where one holds two values, as those of ``float4_e2m1fn_x2`` do."""
    num_nan: int
    num_posinf: int
    num_neginf: int
    num_zero: int
    min: float | None
    """An int, exactly, for integers; so is ``max``."""
    max: float | None
    mean: float | None
    std: float | None
    """Square root of the mean of the squares of what values differ from the mean."""
    histogram: Histogram | None


def statistics(
    checkpoint_id: str | os.PathLike[str] | Store,
    select: str | Sequence[str] | None = None,
    *,
    mapping: TensorMapping | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, TensorStatistics]:
    """Return what the values of tensors of a checkpoint are like, by their names.

    ``select`` is as in ``load``, ``mapping`` as in ``open``; of all tensors if there is none. Every
    value is read once, by several threads and in bounded memory, and verified; torch is not
    needed. ``on_progress(done, total)`` is called with bytes.

    Raises LayoutMismatch where ``select`` selects no tensor, Corrupt where a block is damaged, and
    what ``open`` raises.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    manifest = mapped_manifest(read_manifest(store), mapping, store.url)
    return statistics_of(store, manifest, select, on_progress)


def statistics_of(
    store: Store,
    manifest: Manifest,
    select: str | Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, TensorStatistics]:
    """Return what ``statistics`` does of a checkpoint whose manifest has been read."""
    chosen, selection = manifest.tensors_of_state, selection_of(select)
    if selection is not None:
        selection.check(list(chosen), store.url)
        chosen = {name: tensor for name, tensor in chosen.items() if name in selection}
    return tensor_statistics(stored_data(store, manifest), chosen, on_progress)


def tensor_statistics(
    data: StoredData,
    tensors: Mapping[str, StoredTensor],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, TensorStatistics]:
    """Return what the values of some tensors of a checkpoint that is open are like."""
    stored = {tensor.stored_name: tensor for tensor in tensors.values()}  # ties are read once
    progress = counted(on_progress, sum(tensor.num_bytes for tensor in stored.values()))
    found: dict[str, Moments] = {}
    for group in _groups(stored):
        sinks = {name: _MomentsSink(tensor.dtype) for name, tensor in group.items()}
        wants = [
            Want(tensor=tensor, box=Box.whole(tensor.shape), sink=sinks[name])
            for name, tensor in group.items()
        ]
        execute(plan_reads(data, wants), on_progress=progress, check_files=False)
        found |= {name: sink.result() for name, sink in sinks.items()}
    data.check_unchanged()
    return {name: _told(name, t, found[t.stored_name]) for name, t in tensors.items()}


def _groups(tensors: Mapping[str, StoredTensor]) -> Iterator[dict[str, StoredTensor]]:
    items = list(tensors.items())
    for start in range(0, len(items), _GROUP_TENSORS):
        yield dict(items[start : start + _GROUP_TENSORS])


class _MomentsSink:
    """Looks at elements as they come, and keeps none.

    Of elements of one or two bytes it counts how often each code comes, which is little to keep
    and says everything.
    """

    is_memory = False

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._found = Moments()
        self._codes: Array | None = None
        self._lock = threading.Lock()

    def memory(self) -> None:
        """Return None."""

    def put(self, part: Box, items: Array) -> None:
        """Look at some elements; ``part`` does not matter."""
        items = items.reshape(-1)
        steps = range(0, items.size, _STEP_ELEMENTS)
        for some in (items[start : start + _STEP_ELEMENTS] for start in steps):
            if self._dtype.itemsize <= 2:
                counts = np.bincount(some, minlength=1 << 8 * self._dtype.itemsize)
                with self._lock:
                    self._codes = counts if self._codes is None else self._codes + counts
            else:
                found = Moments.of(numbers(self._dtype, some))
                with self._lock:
                    self._found = self._found.merged(found)

    def result(self) -> Moments:
        """Return what was found of all elements."""
        if self._codes is None:
            return self._found
        codes = np.flatnonzero(self._codes)
        weights = np.repeat(self._codes[codes], self._dtype.packed)
        return Moments.of(numbers(self._dtype, codes.astype(self._dtype.items)), weights)


def _told(name: str, tensor: StoredTensor, found: Moments) -> TensorStatistics:
    is_any = found.bins is not None
    mean = found.mean
    if is_any and isinstance(found.low, int):
        mean = found.total / found.num_finite  # of integers rounded once
    return TensorStatistics(
        name=name,
        dtype=tensor.dtype.torch_name,
        shape=tensor.shape,
        num_values=math.prod(tensor.shape) * tensor.dtype.packed,
        num_nan=found.num_nan,
        num_posinf=found.num_posinf,
        num_neginf=found.num_neginf,
        num_zero=found.num_zero,
        min=found.low if is_any else None,
        max=found.high if is_any else None,
        mean=float(mean) if is_any else None,
        std=float(np.sqrt(found.squares / found.num_finite)) if is_any else None,
        histogram=found.bins.histogram(found.low, found.high) if found.bins is not None else None,
    )
