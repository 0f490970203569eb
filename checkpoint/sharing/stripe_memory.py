"""Where the elements of stripes lie once they are read: one stripe after the other in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ...dtensor.geometry.box import Box
from ..files.stored_data import StoredData
from ..reading import limits
from ..reading.read_plan import Read, Run, plan_runs
from ..reading.wants import Fill
from ..tensors.dtypes import items_of
from ..tensors.sink import Array
from .stripes import Stripe

_ITEMS = {size: np.dtype(items_of(size)) for size in (1, 2, 4, 8, 16)}


def room_of(stripe: Stripe) -> int:
    """Return how many bytes of memory a stripe takes."""
    return -(-stripe.num_bytes // limits.ALIGNMENT) * limits.ALIGNMENT


def arrays_in(memory: memoryview, stripes: Iterable[Stripe]) -> Iterator[tuple[Stripe, Box, Array]]:
    """Yield the boxes of stripes, and where in memory their elements are."""
    at = 0
    for stripe in stripes:
        start, dtype = at, _ITEMS[stripe.tensor.stored.dtype.itemsize]
        for box in stripe.boxes:
            array: Array = np.ndarray(box.sizes, dtype, memory, start)
            yield stripe, box, array
            start += array.nbytes
        at += room_of(stripe)


def reads_into(
    memory: memoryview, stripes: Iterable[Stripe], data: StoredData
) -> list[Read | Fill]:
    """Plan to read stripes; Corrupt where a file or a chunk is not what it must be."""
    return plan_runs(data, _runs(memory, stripes))


def open_files(data: StoredData, stripes: Iterable[Stripe]) -> None:
    """Open the files of stripes, many at a time where that takes long; Corrupt as of a read."""
    found = {(s.writer, s.chunk, s.tensor.stored.stored_name): s.tensor.stored for s in stripes}
    data.open_for((w, stored.key(chunk), stored.name) for (w, chunk, _), stored in found.items())


def _runs(memory: memoryview, stripes: Iterable[Stripe]) -> Iterator[Run]:
    at = 0
    for stripe in stripes:
        found = arrays_in(memory[at:], [stripe])
        yield Run(
            tensor=stripe.tensor.stored,
            writer=stripe.writer,
            chunk=stripe.chunk,
            start=stripe.start,
            boxes=[(box, array) for _, box, array in found],
            memory=memory[at : at + stripe.num_bytes],
        )
        at += room_of(stripe)
