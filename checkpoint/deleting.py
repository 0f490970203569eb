"""Deleting a checkpoint: its manifest first, so that at no time half of it looks whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dtckpt.errors import InUse

from ..storage.base import Store
from ..storage.open import open_store
from .borrowing import MARKS, refuse_if_needed
from .manifest import MANIFEST, read_manifest


def delete(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a committed checkpoint; one process calls this, not every rank.

    Raises NotCommitted where there is none, and InUse, with the checkpoint still there, if
    incremental checkpoints in the same directory refer to its files; one that was renamed since is
    not found. Files of a save that is still under way there are left alone.
    """
    store = open_store(checkpoint_id, **dict(storage_options or {}))
    manifest = read_manifest(store)
    refuse_if_needed(store, "deleted")
    marks = [info.name for info in store.list(MARKS)]
    store.delete([MANIFEST])
    try:
        refuse_if_needed(store, "deleted")  # one may have been committed just before
    except InUse:
        store.publish(MANIFEST, manifest.to_bytes(), overwrite=False)
        raise
    store.delete([*(manifest.path_of(record) for record in manifest.files), *marks])
