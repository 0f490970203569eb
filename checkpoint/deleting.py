"""Deleting a checkpoint: its manifest first, so that at no time half of it looks whole.

Before that a record of what there is to delete is left, by which an interrupted deletion can be
finished, and which keeps incremental saves from referring to the checkpoint (see ``borrowing``).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dtckpt.errors import (
    CheckpointError,
    Corrupt,
    NotCommitted,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)

from ..storage.base import Store, is_before
from ..storage.open import open_store
from .files.borrowing import refuse_if_needed
from .files.committing import find_manifest
from .files.manifest import Manifest, is_intact, read_manifest_bytes
from .files.places import MANIFEST, RECORDS

_RECORD = re.compile(rf"{RECORDS}/[0-9a-f]{{16}}/[0-9a-f]{{16}}\.json")


def is_record(name: str) -> bool:
    """Whether a name is one under which a deletion leaves what it has to do."""
    return _RECORD.fullmatch(name) is not None


def delete(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a committed checkpoint; one process calls this, not every rank.

    Raises NotCommitted where there is none, and InUse, with the checkpoint still there, if
    incremental checkpoints in the same directory refer to its files, or are about to; one that was
    renamed since is not found. Files of a save that is still under way there are left alone. After
    any other error the checkpoint may be there or not; a second call finishes what is left to do.
    """
    store = open_store(checkpoint_id, **dict(storage_options or {}))
    try:
        text = read_manifest_bytes(store)
    except NotCommitted:
        if not finish_deletions(store):
            raise
        return
    manifest = Manifest.from_bytes(text, f"{store.url}/{MANIFEST}")
    record = f"{RECORDS}/{manifest.save_id}/{secrets.token_hex(8)}.json"
    store.publish(record, text, overwrite=False)
    try:
        marks = refuse_if_needed(store, "deleted", manifest.save_id)
    except BaseException:
        with suppress(StorageError):
            store.delete([record])
        raise
    # From here on nobody can come to need it. Marks go first: the next checkpoint of this name
    # gets its own.
    store.delete(marks)
    try:
        try:
            store.remove(MANIFEST, expected=text)
        except ObjectNotFound:  # somebody else deletes it, too; or the server says only so
            if find_manifest(store) == text:
                raise
    except ObjectExists as error:
        store.delete([record])
        found = find_manifest(store)
        if found is not None and (found == text or not is_intact(found)):
            raise Corrupt(
                f"{store.url}/{MANIFEST}: other bytes came than before, which nobody has written: "
                "they were altered on their way. The checkpoint stands. Delete it again"
            ) from error
        raise CheckpointError(
            f"{store.url}: another save replaced this checkpoint while it was to be deleted; the "
            "new one stands"
        ) from error
    except StorageError:
        with suppress(StorageError):
            if find_manifest(store) == text:  # not deleted: it may serve as a base again
                store.delete([record])
        raise
    _delete_files(store, manifest)


def finish_deletions(store: Store, *, before: float | None = None) -> bool:
    """Finish what interrupted deletions have left in ``store``; return whether there was any.

    With ``before`` only those that began before that time, in seconds since 1970; a checkpoint that
    still stands then does so for good.
    """
    found = False
    for info in [info for info in store.list(RECORDS) if is_before(info, before)]:
        if not is_record(info.name):
            continue
        try:
            text = store.read(info.name)
        except ObjectNotFound:  # whoever left it has finished meanwhile
            continue
        found = True
        if find_manifest(store) == text:
            store.delete([info.name])
            continue
        manifest = Manifest.from_bytes(text, f"{store.url}/{info.name}")
        if not info.name.startswith(f"{RECORDS}/{manifest.save_id}/"):
            raise Corrupt(f"{store.url}/{info.name}: this record is of {manifest.save_id}")
        refuse_if_needed(store, "deleted", manifest.save_id)
        _delete_files(store, manifest)
    return found


def _delete_files(store: Store, manifest: Manifest) -> None:
    """Delete data files whose manifest is gone, and then all records that say so."""
    records = [info.name for info in store.list(f"{RECORDS}/{manifest.save_id}")]
    store.delete(manifest.path_of(file) for file in manifest.files)
    store.delete(records)
