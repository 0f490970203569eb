"""Files that ``torch.save`` wrote before 1.6: five pickles, and the memory of all storages.

The pickles are a magic number, a version, what the machine was like, the value, and the keys of its
storages. Those follow in that order, each as a count of elements in 8 bytes, and the elements. The
value says of each storage its type and count, so where one lies follows from those before it
(``_legacy_save`` in torch/serialization.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dtckpt.errors import CheckpointError, Corrupt

from ....storage.base import ReadRequest, Store
from ...files.blocks import digest
from ...files.manifest import Place
from ...state.limits import check_metadata_bytes, shown, size_of
from ..files import reach_bytes, where_of
from ..pickles.memo import end_of_pickle
from ..pickles.unpickling import Known, StorageNote, TensorNote, load_pickle
from .archive import Span
from .forms import AS_IT_IS

_VERSION = 1001
_LIKELY_BYTES = 64 << 10
_COUNT_BYTES = 8
_QUANTIZED = {"QUInt8Storage": 1, "QInt8Storage": 1, "QInt32Storage": 4}
"""Bytes of elements whose tensors are not held, in types of storages that no dtype names."""


class Legacy(NamedTuple):
    """What is known of such a file."""

    value: Any
    memory: LegacyMemory
    head_bytes: int
    """Length of the pickles."""
    digest: str
    """Of the pickles."""


@dataclass(frozen=True, slots=True)
class LegacyMemory:
    """Where the storages of a file lie, by key."""

    spans: dict[str, Span]
    size: int
    """Bytes of the file."""

    def place(self, key: str, note: TensorNote, where: str) -> Place:
        """Return where a chunk lies; Corrupt where its memory does not have all of it."""
        itemsize = note.dtype(where).itemsize
        span, skip = self.span(note), note.start * itemsize
        strides = note.byte_strides(itemsize)
        if skip + reach_bytes(note.shape, strides, itemsize) > span.size:
            raise Corrupt(
                f"{where}: a tensor of shape {note.shape} and strides {note.strides} from element "
                f"{note.start} on does not lie in its memory of {span.size} bytes"
            )
        return Place(key, span.start + skip, span.size - skip, "", 0, strides, AS_IT_IS)

    def checksum(self, note: TensorNote) -> int:
        """Return 0: there are none."""
        return 0

    def span(self, note: TensorNote) -> Span:
        """Return the bytes of a storage; Corrupt where the file has none of its key."""
        found = self.spans.get(note.storage.key)
        if found is None:
            raise Corrupt(f"there is no memory of the key {note.storage.key!r}")
        return found


def open_legacy(
    store: Store,
    name: str,
    size: int,
    known: Known | None = None,
    *,
    with_unheld: bool = False,
) -> Legacy:
    """Return what a file holds; Corrupt where it is damaged."""
    where = where_of(store, name)
    head, ends = _pickles(store, name, size, where)
    starts = [0, *ends]
    parts = [head[start:end] for start, end in zip(starts, ends, strict=False)]
    _check_machine(load_pickle(parts[1], where), load_pickle(parts[2], where), where)
    storages: dict[str, StorageNote] = {}
    value = load_pickle(parts[3], where, known, with_unheld=with_unheld, storages=storages)
    keys = load_pickle(parts[4], where)
    spans = _spans(keys, storages, ends[-1], where)
    last = max((span.start + span.size for span in spans.values()), default=ends[-1])
    if last > size:
        raise Corrupt(
            f"{where}: the file has {size} bytes, its pickles tell of {last}: it was cut short. "
            "Fetch it again"
        )
    _check_counts(store, name, spans, storages, where)
    told = digest(head[: ends[-1]]).hex()
    return Legacy(value, LegacyMemory(spans, size), ends[-1], told)


def fingerprint(legacy: Legacy) -> str:
    """Return what tells a file from others, for ``check_fingerprint``."""
    return f"legacy:{legacy.head_bytes}:{legacy.digest}"


def check_fingerprint(store: Store, name: str, told: str) -> None:
    """Raise Corrupt where a file does not have a fingerprint that was made of it."""
    _, size, expected = told.split(":")
    if digest(store.read(name, 0, int(size))).hex() != expected:
        where = where_of(store, name)
        raise Corrupt(f"{where}: the file was replaced while it was read. Load it anew")


def _pickles(store: Store, name: str, size: int, where: str) -> tuple[bytes, list[int]]:
    """Return the bytes that have the five pickles, and where each ends."""
    length, head = _LIKELY_BYTES, b""
    while True:
        check_metadata_bytes(2 * min(length, size), f"the pickles of {where}")
        head += store.read(name, len(head), min(length, size))
        ends: list[int] = []
        while len(ends) < 5:
            end = end_of_pickle(head, ends[-1] if ends else 0)
            if end is None:
                break
            ends.append(end)
        if len(ends) == 5:
            return head, ends
        if len(head) >= size:
            raise Corrupt(
                f"{where}: a file of torch.save as it was before 1.6, cut short after {size} "
                "bytes, or damaged. Fetch it again"
            )
        length *= 4


def _check_machine(version: Any, told: Any, where: str) -> None:
    if version != _VERSION:
        raise CheckpointError(
            f"{where}: torch.save before 1.6 wrote it in version {shown(version)}; dtckpt reads "
            f"{_VERSION}. Load it with torch and save it anew"
        )
    if not isinstance(told, dict) or told.get("little_endian") is not True:
        raise Corrupt(f"{where}: written in another byte order than this machine's")


def _spans(keys: Any, storages: dict[str, StorageNote], start: int, where: str) -> dict[str, Span]:
    """Return where storages lie of which the first begins at ``start``."""
    spans: dict[str, Span] = {}
    is_list = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not is_list or len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise Corrupt(f"{where}: malformed list of storages {shown(keys)}. Fetch the file again")
    for key in keys:
        note = storages[key]
        try:
            size = size_of(note.count, "a count of elements") * _itemsize(note.dtype_name, where)
        except (TypeError, ValueError) as error:
            raise Corrupt(f"{where}: storage {shown(key)}: {shown(error)}") from error
        spans[key] = Span(start + _COUNT_BYTES, size)
        start += _COUNT_BYTES + size
    return spans


def _itemsize(name: str, where: str) -> int:
    kind = name.rpartition(".")[2]
    dtype = getattr(torch, kind, None)
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    if kind in _QUANTIZED:
        return _QUANTIZED[kind]
    raise CheckpointError(
        f"{where}: has a storage of {shown(name)}, of which dtckpt does not know how long it is; "
        "load it with torch and save it anew"
    )


def _check_counts(
    store: Store,
    name: str,
    spans: dict[str, Span],
    storages: dict[str, StorageNote],
    where: str,
) -> None:
    """Raise Corrupt where storages do not have the counts before them that the value says."""
    counts = {key: bytearray(_COUNT_BYTES) for key in spans}
    requests = [ReadRequest(span.start - _COUNT_BYTES, counts[k]) for k, span in spans.items()]
    if requests:
        store.read_into(name, requests)
    for key, data in counts.items():
        if int.from_bytes(data, "little") != storages[key].count:
            raise Corrupt(
                f"{where}: storage {key!r} has {int.from_bytes(data, 'little')} elements in the "
                f"file, {storages[key].count} by the pickle. Fetch the file again"
            )
