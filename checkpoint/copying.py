"""Copying a checkpoint as it is from one place to another, verified on the way.

A copy has the same bytes and the same save id, so whatever lies there of an earlier copy that was
interrupted is compared with the checksums and kept. Nothing that is there is written over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, ObjectExists

from ..storage.base import Store
from ..storage.open import open_store
from .files.blocks import digest
from .files.committing import check_complete, check_free, commit, find_manifest
from .files.manifest import FileRecord, Manifest
from .files.stored_data import Damage, DataFile, open_data_file
from .files.writing import Progress
from .formats.opening import read_manifest
from .ranks.text import some_names
from .reading.batches import counted
from .reading.whole_files import stretches

_NUM_FILES = 4
"""Files that are copied at the same time; each takes a buffer of READ_BYTES."""


def copy(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    verify: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Copy a committed checkpoint to another place, in any store; one process calls this.

    Every block is compared with its checksum as it is read, and the manifest is published last, so
    that the copy is there as a whole or not at all. Its files are the same, byte by byte. After an
    error a second call goes on from the files that are complete. With ``verify`` every file is read
    once more from the target before the commit. ``on_progress(done, total)`` is called with bytes,
    those that are read once more counted, from any thread but never from two at once.

    Raises Corrupt, naming file, bytes and tensor, where the source is damaged, or what was read
    once more, which is taken away; AlreadyCommitted
    where a checkpoint is at the target; CheckpointError for an incremental checkpoint where copies
    of those that it refers to are not beside the target, without which it would not load
    (``detach`` makes it stand on its own); NotCommitted for what dtckpt has not saved;
    StorageError.
    """
    old = open_store(source, **dict(source_options or {}))
    new = open_store(target, **dict(target_options or {}))
    manifest = read_manifest(old)
    if not manifest.is_ours:
        raise NotCommitted(
            f"{old.url} is of {manifest.format}, which dtckpt does not copy: copy its files, or "
            "have dtckpt convert write it anew"
        )
    _check_lenders(old, new, manifest)
    check_free(new, overwrite=False)
    lock, stop = threading.Lock(), threading.Event()
    add = counted(on_progress, bytes_to_copy(manifest, verify=verify))

    def on_bytes(num_bytes: int) -> None:
        with lock:
            if stop.is_set():
                raise _Stopped
            try:
                add(num_bytes)
            except BaseException:
                stop.set()
                raise

    def copy_one(record: FileRecord) -> None:
        copy_file(old, new, record, manifest.save_id, on_bytes, verify=verify)

    with ThreadPoolExecutor(_NUM_FILES, thread_name_prefix="dtckpt-copy") as pool:
        futures = [pool.submit(copy_one, record) for record in manifest.files]
        try:
            for future in as_completed(futures):
                with suppress(_Stopped):  # the one that has failed tells why, whichever ends first
                    future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    own = sum(record.data_bytes for record in manifest.files)
    stored = sum(tensor.stored_bytes for tensor in manifest.tensors.values())
    check_complete(new, manifest, borrowed_bytes=stored - own if manifest.borrowed else 0)
    commit(new, manifest, overwrite=False)
    return manifest


def bytes_to_copy(manifest: Manifest, *, verify: bool) -> int:
    """Return how many bytes ``copy`` tells of."""
    return sum(record.size for record in manifest.files) * (2 if verify else 1)


class _Stopped(Exception):
    """The copying of another file has failed, or an interrupt came."""


def _check_lenders(old: Store, new: Store, manifest: Manifest) -> None:
    """Raise CheckpointError unless what a checkpoint refers to lies beside its copy, too."""
    for source, save_id in sorted({(file.source, file.save_id) for file in manifest.borrowed}):
        text = find_manifest(new.sibling(source))
        if text is None or Manifest.from_bytes(text, source).save_id != save_id:
            check_standing_alone(old, manifest)


def check_standing_alone(store: Store, manifest: Manifest) -> None:
    """Raise CheckpointError for a checkpoint that refers to files of others."""
    names = sorted({file.source for file in manifest.borrowed})
    if names:
        raise CheckpointError(
            f"{store.url}: this checkpoint is incremental: what has not changed lies in files of "
            f"{some_names(names)} beside it, and a copy of it alone would not load. Copy those "
            "first, or the whole run, or call detach, which writes that into it"
        )


def copy_file(
    source: Store,
    target: Store,
    record: FileRecord,
    save_id: str,
    on_progress: Progress,
    *,
    verify: bool = False,
) -> bool:
    """Copy a data file as it is, in bounded memory; return whether it had not been there.

    ``on_progress`` is called with the number of bytes after each piece, and stops the copying by
    raising; nothing is visible under the file's name then. Corrupt where a block, header or table
    is not as it was written, in the source or in what is there already. With ``verify`` also where
    it is not in what was written, as that is read; it is taken away then.
    """
    file = open_data_file(source, record, save_id)
    try:
        _write(file, target, on_progress)
    except ObjectExists:
        _read_back(target, record, save_id, lambda _: on_progress(0))
        on_progress(record.size * (2 if verify else 1))
        return False
    if verify:
        try:
            _read_back(target, record, save_id, on_progress)
        except Corrupt:
            target.delete([record.path(save_id)])
            raise
    return True


def _read_back(target: Store, record: FileRecord, save_id: str, on_progress: Progress) -> None:
    """Raise Corrupt unless the copy of a file is whole."""
    there = open_data_file(target, record, save_id)
    done = 0
    for stretch in stretches(there, there.layout.entries.values()):
        _refuse_damage(stretch.damaged)
        done += len(stretch.data)
        on_progress(len(stretch.data))
    on_progress(record.size - done)


def _write(file: DataFile, target: Store, on_progress: Progress) -> None:
    header = file.store.read(file.name, 0, file.layout.data_start)
    if digest(header).hex() != file.record.header_digest:  # it was intact when it was opened
        raise Corrupt(f"{file.where}: bytes 0 to {len(header)} (header) are damaged")
    with target.create(file.name, file.record.size) as stream:
        stream.write(header)
        for stretch in stretches(file, file.layout.entries.values()):
            _refuse_damage(stretch.damaged)
            stream.write(stretch.data)
            on_progress(len(stretch.data))
        stream.write(file.table)
        on_progress(len(header) + len(file.table))  # which may raise as long as nothing is there


def _refuse_damage(damaged: tuple[Damage, ...]) -> None:
    if damaged:
        raise Corrupt(
            f"{damaged[0]}. The checkpoint is not copied; verify lists all that is damaged"
        )
