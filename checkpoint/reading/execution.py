"""Executing reads: in parallel, in bounded memory, every block verified before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from threading import Event
from typing import Any

import numpy as np

from dtckpt.errors import Corrupt, LayoutMismatch

from ...storage.base import ReadRequest
from ..files.stored_data import Damage, DataFile
from . import limits
from .read_plan import Extent, Range, Read
from .wants import Fill

Check = Callable[[], list[Damage]]
"""Compares bytes that have been read with their digests, and returns what is damaged."""


class ReadCache:
    """The last range of a caller that reads many small boxes, one after the other."""

    def __init__(self) -> None:
        self._last: tuple[DataFile, int, memoryview] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadCache, ()  # of another process, which remembers nothing yet

    def find(self, file: DataFile, wanted: Range) -> memoryview | None:
        """Return the bytes of a range, if the last one held them."""
        last = self._last  # another thread may replace it
        if last is None or last[0] is not file or wanted.start < last[1]:
            return None
        start = wanted.start - last[1]
        data = last[2][start : start + wanted.end - wanted.start]
        return data if len(data) == wanted.end - wanted.start else None

    def keep(self, file: DataFile, start: int, data: memoryview) -> None:
        """Remember a range in place of the one before; the buffer is not used again."""
        self._last = (file, start, data)


def execute(
    reads: Sequence[Read | Fill],
    *,
    touched: dict[str, None] | None = None,
    cache: ReadCache | None = None,
    on_progress: Callable[[int], None] | None = None,
    check_files: bool = True,
    num_local: int | None = None,
) -> int:
    """Run reads in parallel and return the bytes read.

    Raises Corrupt at the first read with damaged blocks, and at the end if a file without checksums
    was written to meanwhile: the store is asked once for each that was read. Without
    ``check_files`` the caller does that, once it has read all (``StoredData.check_unchanged``).
    ``touched`` collects the names of tensors of which elements were stored, also where the call
    fails; those that were being read straight into their destination when it failed may hold
    damaged elements. ``on_progress`` is called, from several threads, after every read, with
    its bytes. ``num_local`` ranks of a host read at the same time, if that is known.
    """
    run = _Run({} if touched is None else touched, cache, on_progress)
    stores = {read.file.store: None for read in reads if isinstance(read, Read)}
    most = min(limits.num_readers(stores, num_local), len(reads))
    num_bytes = _run_all(run, reads, most, check_files=check_files)
    if cache is not None and run.unsure is not None:
        cache.keep(*run.unsure)  # only now: another thread may find it at once
    return num_bytes


def _run_all(
    run: _Run, reads: Sequence[Read | Fill], num_readers: int, *, check_files: bool
) -> int:
    if num_readers <= 1:
        num_bytes = _Reader(run).run_all(reads)
        for file in run.unverified if check_files else ():
            file.check_unchanged()
        return num_bytes
    stop = Event()
    shared = iter(reads)  # a list's iterator may be advanced by several threads

    def work() -> int:
        try:
            return _Reader(run).run_all(_until(stop, shared))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(num_readers, thread_name_prefix="dtckpt-read") as pool:
        futures = [pool.submit(work) for _ in range(num_readers)]
        try:
            num_bytes = sum(future.result() for future in futures)
        except BaseException:
            stop.set()
            raise
        if check_files:
            list(pool.map(DataFile.check_unchanged, run.unverified))
    return num_bytes


def _until(stop: Event, reads: Iterable[Read | Fill]) -> Iterable[Read | Fill]:
    for read in reads:
        if stop.is_set():
            return
        yield read


@dataclass(slots=True)
class _Run:
    """What the readers of one execution share."""

    touched: dict[str, None]
    cache: ReadCache | None
    on_progress: Callable[[int], None] | None
    unverified: dict[DataFile, None] = field(default_factory=dict[DataFile, None])
    """Files that were read and have no checksums."""
    unsure: tuple[DataFile, int, memoryview] | None = None
    """What the cache is to hold once that file is known to be unchanged."""


class _Reader:
    """Runs reads one after the other, with one buffer."""

    def __init__(self, run: _Run) -> None:
        self._touched = run.touched
        self._cache = run.cache
        self._shared = run
        self._buffer = memoryview(b"")

    def run_all(self, reads: Iterable[Read | Fill]) -> int:
        """Run reads and return the bytes read."""
        return sum(
            [self._fill(read) if isinstance(read, Fill) else self._run(read) for read in reads]
        )

    def _fill(self, fill: Fill) -> int:
        self._touched[fill.name] = None
        fill.run()
        return 0

    def _run(self, read: Read) -> int:
        file, base = read.file, read.file.layout.data_start
        in_place = [(extent, _memory_of(extent)) for extent in read.in_place]
        known = [None if self._cache is None else self._cache.find(file, r) for r in read.ranges]
        views = self._buffers(read.ranges, known)
        fresh = [(r, views[i]) for i, r in enumerate(read.ranges) if known[i] is None]
        damaged: list[Damage] = []
        checks: dict[ReadRequest, Check] = {}
        for extent, memory in in_place:
            checks.update(_requests_in_place(file, extent, memory))
        for r, view in fresh:
            checks[ReadRequest(base + r.start, view)] = partial(_damaged, file, r, view)
        for extent, _ in in_place:
            self._touched[extent.want.name] = None
        num_bytes = sum([request.view.nbytes for request in checks])
        if checks:
            if file.seen is not None:
                self._shared.unverified[file] = None
            for request in file.read_each(list(checks)):
                check = checks.pop(request, None)
                damaged += check() if check is not None else ()
        for check in checks.values():  # whatever a store tells, all that was asked for is verified
            damaged += check()
        if damaged:
            raise Corrupt("; ".join(map(str, damaged)))
        for r, view in zip(read.ranges, views, strict=True):
            for extent in r.extents:
                self._touched[extent.want.name] = None
                _store(extent, view, r.start)
        if self._cache is not None and fresh and not fresh[-1][0].has_gaps:
            found = (file, fresh[-1][0].start, fresh[-1][1])
            if file.seen is None:
                self._cache.keep(*found)
            else:
                self._shared.unsure = found
            self._buffer = memoryview(b"")  # it belongs to the cache now, where others find it
        if self._shared.on_progress is not None:
            self._shared.on_progress(read.num_bytes)
        return num_bytes

    def _buffers(
        self, ranges: Sequence[Range], known: Sequence[memoryview | None]
    ) -> list[memoryview]:
        """Return memory for every range: what is known of it, or a part of the buffer."""
        rooms = [_room(r) if view is None else 0 for r, view in zip(ranges, known, strict=True)]
        starts = list(accumulate(rooms, initial=0))
        if starts[-1] > len(self._buffer):
            # What is cached should be small.
            least = limits.READ_BYTES if self._cache is None else 0
            self._buffer = np.empty(max(starts[-1], least), dtype=np.uint8).data
        return [
            self._buffer[start : start + r.end - r.start] if view is None else view
            for r, view, start in zip(ranges, known, starts, strict=False)
        ]


def _requests_in_place(
    file: DataFile, extent: Extent, memory: memoryview
) -> Iterator[tuple[ReadRequest, Check]]:
    """Yield requests for a few blocks of a run each, to be verified as soon as they are there.

    Hashing what is in the processor's cache costs a fraction of fetching it again from memory.
    """
    start = file.layout.data_start + extent.start
    step = max(limits.VERIFY_BYTES // file.layout.block_bytes, 1) * file.layout.block_bytes
    for low in range(0, len(memory), step):
        blocks = memory[low : low + step]
        check = partial(file.damaged, extent.entry, extent.cut.low + low, blocks)
        yield ReadRequest(start + low, blocks), check


def _room(r: Range) -> int:
    """Return the bytes of a buffer for a range: items are aligned in it as in the file."""
    return -(-(r.end - r.start) // limits.ALIGNMENT) * limits.ALIGNMENT


def _memory_of(extent: Extent) -> memoryview:
    """Return where the bytes of a run go."""
    memory, target = extent.want.sink.memory(), extent.cut.target
    if memory is None or target is None:
        raise LayoutMismatch(
            f"tensor {extent.want.name!r}: its destination offered memory when the reads "
            "were planned, and none when they were made; it must not change meanwhile"
        )
    return memory[target : target + extent.cut.end - extent.cut.start]


def _damaged(file: DataFile, r: Range, data: memoryview) -> list[Damage]:
    """Verify the blocks of all extents of a range, each once; gaps between them are of no use."""
    damaged: list[Damage] = []
    done = r.start
    for start, end, _, entry, *_ in r.extents:
        if end > done:
            start = max(start, done)
            found = file.damaged(entry, start - entry.start, data[start - r.start : end - r.start])
            damaged += found
            done = end
    return damaged


def _store(extent: Extent, data: memoryview, data_start: int) -> None:
    """Store an extent out of a buffer that holds the data region from ``data_start`` on."""
    _, _, cut, entry, want = extent
    offset = entry.start + cut.start - data_start
    if cut.target is not None:
        _memory_of(extent)[:] = data[offset : offset + cut.end - cut.start]
        return
    items = np.ndarray(
        cut.part.sizes,
        want.tensor.dtype.items,
        buffer=data.toreadonly(),
        offset=offset,
        strides=cut.strides,
    )
    want.sink.put(cut.part, items)
