"""Replacing what is damaged in a checkpoint by what a copy of it has.

What belongs in a place is told by the checksums of the checkpoint that is repaired, so a copy can
be damaged itself, elsewhere. A file is written anew beside the damaged one, block by block of those
that have their checksums, and takes its place in one step when all of it is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtckpt.errors import (
    CheckpointError,
    Corrupt,
    LayoutMismatch,
    NotCommitted,
    StorageError,
)

from ...storage.base import Store
from ...storage.open import open_store
from ..files.blocks import digest
from ..files.manifest import (
    FileRecord,
    Manifest,
    is_damaged_copy,
    is_intact,
    read_manifest_bytes,
    read_own_manifest,
)
from ..files.places import MANIFEST
from ..files.stored_data import DataFile, open_data_file
from ..formats.opening import read_manifest
from ..reading.whole_files import Batch, Span, batches, read_batch
from ..verifying import Verifier, VerifyReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair has come to."""

    url: str
    repaired: tuple[str, ...]
    """Names of the files in the checkpoint that were written anew; they are intact now."""
    failed: Mapping[str, str]
    """Why others could not be, by their names."""
    after: VerifyReport
    """What is found now, everything read again; the checkpoint is whole if it has no problems."""


def repair(
    checkpoint_id: str | os.PathLike[str] | Store,
    other: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    other_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Replace damaged and missing files of a checkpoint by those of ``other``, a copy of it.

    Of a damaged data file each block is taken from where it has the checksum that the checkpoint
    states, from the copy or from what is there, so that both may be damaged, if not in the same
    block. A damaged manifest is replaced by that of the copy if it is known to have been the same:
    one of the two may have been edited since. What cannot be made whole stays as it was.
    ``on_progress(done, total)`` is that of each of the two verifications.

    Raises Corrupt where the manifest is damaged and that of the copy does not stand for it;
    NotCommitted where either is no checkpoint of dtckpt; LayoutMismatch where both are one;
    StorageError.
    """
    ours = open_store(checkpoint_id, **dict(storage_options or {}))
    theirs = open_store(other, **dict(other_options or {}))
    if ours.url == theirs.url:
        raise LayoutMismatch(f"{ours.url}: a checkpoint does not repair itself")
    verifier = Verifier()
    repaired: list[str] = []
    if _repair_manifest(ours, theirs):
        repaired.append(MANIFEST)
    manifest = read_own_manifest(ours)
    before = verifier.verify(ours, on_progress)
    damaged = {problem.file for problem in before.problems}
    failed: dict[str, str] = {}
    for record in manifest.files:
        name = manifest.path_of(record)
        if name not in damaged and _is_there(ours, record, manifest.save_id):
            continue
        try:
            _repair_file(ours, theirs, record, manifest.save_id)
        except CheckpointError as error:
            failed[name] = str(error)
        else:
            repaired.append(name)
    after = Verifier().verify(ours, on_progress) if repaired else before
    return RepairReport(url=ours.url, repaired=tuple(repaired), failed=failed, after=after)


def _is_there(store: Store, record: FileRecord, save_id: str) -> bool:
    """Whether a file can be opened; verification may list fewer problems than there are."""
    try:
        open_data_file(store, record, save_id)
    except Corrupt:
        return False
    return True


def _repair_manifest(ours: Store, theirs: Store) -> bool:
    """Put the manifest of a copy in the place of a damaged one; return whether it was damaged."""
    text = read_manifest_bytes(ours)
    try:
        if not read_manifest(theirs).is_ours:
            raise NotCommitted(f"{theirs.url}: another program wrote this checkpoint")
        problem = None
    except Corrupt as error:
        problem = error  # of its files some may be intact
    if is_intact(text):
        return False  # what else may be wrong with it was written so
    good = read_manifest_bytes(theirs)
    if problem is None and not is_damaged_copy(text, good):
        problem = (
            f"that of {theirs.url} is not known to have been the same: it may be of another save, "
            "or one of them was edited since. If it is right, copy its manifest.json here"
        )
    if problem is not None:
        try:
            Manifest.from_bytes(text, f"{ours.url}/{MANIFEST}")
        except Corrupt as error:
            error.add_note(f"and nothing can stand for it: {problem}")
            raise
    ours.replace(MANIFEST, good, expected=text)
    if read_manifest_bytes(ours) != good:
        raise StorageError(f"{ours.url}/{MANIFEST}: the repaired manifest was altered on its way")
    return True


def _repair_file(ours: Store, theirs: Store, record: FileRecord, save_id: str) -> None:
    """Write a data file anew, in bounded memory, and verify it."""
    first = _opened((theirs, ours), record, save_id)
    header = first.store.read(first.name, 0, first.layout.data_start)
    if digest(header).hex() != record.header_digest:
        raise Corrupt(f"{first.where}: the header was altered while it was read")
    files = [replace(first, store=s, where=f"{s.url}/{first.name}") for s in (theirs, ours)]
    with ours.create_anew(first.name, record.size) as stream:
        stream.write(header)
        for batch in batches(first, first.layout.entries.values()):
            for data in _intact(files, batch):
                stream.write(data)
        stream.write(first.table)
    now = open_data_file(ours, record, save_id)
    for batch in batches(now, now.layout.entries.values()):
        for damage in read_batch(now, batch).damaged:
            raise StorageError(f"{damage}. The file was altered on its way; repair it again")


def _opened(stores: Sequence[Store], record: FileRecord, save_id: str) -> DataFile:
    """Return a file of the first that has its header and checksum table intact."""
    errors: list[CheckpointError] = []
    for store in stores:
        try:
            return open_data_file(store, record, save_id)
        except CheckpointError as error:
            errors.append(error)
    raise errors[0]


def _intact(files: Sequence[DataFile], batch: Batch) -> Iterator[memoryview]:
    """Yield the bytes of a batch, of the first file that has all of it, else block by block."""
    damage = None
    for file in files:
        try:
            stretch = read_batch(file, batch)
        except StorageError as error:
            damage = damage or str(error)
            continue
        if not stretch.damaged:
            yield stretch.data
            return
        damage = damage or str(stretch.damaged[0])
    blocks = [*_blocks(batch, files[0].layout.block_bytes)]
    if len(files) == 1 or len(blocks) == 1:
        raise Corrupt(f"{damage}. Nobody has these bytes intact")
    for block in blocks:
        yield from _intact(files, [block])


def _blocks(batch: Batch, block_bytes: int) -> Iterator[Span]:
    for entry, start, end in batch:
        for low in range(start, end, block_bytes):
            yield Span(entry, low, min(low + block_bytes, end))
