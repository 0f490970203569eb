"""Files of other programs: which there are, how messages call them, and opening them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from dtckpt.errors import Corrupt, ObjectNotFound

from ...storage.base import ObjectInfo, Store
from ...storage.one_file import OneFile
from ..files.datafile import Entry, FileLayout
from ..files.manifest import FileRecord, Place
from ..files.stored_data import DataFile, SummedRecord, check_same

_MOST_ENTRIES = 10_000


def where_of(store: Store, file: str) -> str:
    """Return how messages call a file of a store, which may be that file alone."""
    return store.url if isinstance(store, OneFile) else f"{store.url}/{file}"


def names_in(store: Store) -> list[str]:
    """Return names directly in a store, not all of them where it may be the root of anything."""
    if os.path.isabs(store.url):
        try:
            with os.scandir(store.url) as entries:
                return [entry.name for entry in islice(entries, _MOST_ENTRIES)]
        except OSError:
            return []
    return [info.name for info in islice(store.list(), _MOST_ENTRIES)]


def info_of_file(store: Store, file: str) -> ObjectInfo:
    """Return what a store tells of a file of a checkpoint; Corrupt where it is missing."""
    try:
        return store.stat(file)
    except ObjectNotFound as error:
        where = where_of(store, file)
        is_link = os.path.isabs(store.url) and os.path.islink(os.path.join(store.url, file))
        why = "is a symbolic link to a file that does not exist" if is_link else "is missing"
        raise Corrupt(f"{where}: this file of the checkpoint {why}. Fetch it again") from error


def reach_bytes(sizes: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> int:
    """Return how many bytes there are from the first to past the last element of a chunk.

    ``strides`` are in bytes; None where elements are in row-major order.

    >>> reach_bytes((3, 2), None, 4), reach_bytes((3, 2), (4, 40), 4)
    (24, 52)
    """
    if strides is None or 0 in sizes:
        return math.prod(sizes) * itemsize
    return sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + itemsize


def record_of(
    number: int,
    seen: ObjectInfo,
    places: Iterable[Place],
    *,
    digest: str = "",
    fingerprint: str = "",
) -> FileRecord:
    """Return what a manifest has of a file without a header, of which places tell the chunks.

    ``seen`` is what was told of it before anything of it was read, and ``fingerprint`` what is
    compared when the file is opened, in the place of checksums.
    """
    return FileRecord(
        rank=number,
        size=seen.size,
        header_bytes=0,
        data_bytes=seen.size,
        header_digest=digest,
        table_digest=fingerprint,
        name=seen.name,
        places=tuple(places),
        seen=seen,
    )


def data_file(
    store: Store,
    seen: ObjectInfo,
    record: FileRecord,
    entries: Mapping[str, Entry],
    summed: Sequence[SummedRecord] = (),
) -> DataFile:
    """Return a file of a known record and entries: blocks of one byte, without a checksum table.

    ``seen`` is what was told of it before it was opened. Raises Corrupt where that is not what was
    told when the record was made.
    """
    name = seen.name
    if record.seen is not None:
        check_same(where_of(store, name), record.seen, seen)
    layout = FileLayout(
        save_id="",
        block_bytes=1,
        data_start=record.header_bytes,
        data_bytes=record.data_bytes,
        num_blocks=0,
        entries=dict(entries),
    )
    where = where_of(store, name)
    return DataFile(store, name, where, layout, b"", record, seen=seen, summed=summed)
