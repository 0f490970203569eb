"""Writing anew what an incremental checkpoint refers to, so that it stands on its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..storage.base import Store
from ..storage.open import open_store
from .files.committing import check_complete, check_free, commit
from .files.manifest import MANIFEST, Manifest, read_manifest_bytes
from .formats.opening import stored_data
from .reading.batches import BatchedReader, counted
from .resharding.rewriting import Rewriting


def detach(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Make an incremental checkpoint one that refers to no other; return its manifest.

    One process calls this. All of it is written anew, as its ranks have written it, verified as it
    is read, and takes the place of what is there in one step: at any time the checkpoint is whole.
    Memory is bounded whatever the size; ``on_progress(done, total)`` is called with bytes. One that
    refers to no other is left as it is.

    Raises NotCommitted where there is no checkpoint, InUse, with nothing changed, if other
    checkpoints refer to its own files, and what ``load`` and ``save`` do.
    """
    store = open_store(checkpoint_id, **dict(storage_options or {}))
    manifest = Manifest.from_bytes(read_manifest_bytes(store), f"{store.url}/{MANIFEST}")
    if not manifest.borrowed:
        return manifest
    check_free(store, overwrite=True)
    tensors = {name: tensor._replace(stored_as=None) for name, tensor in manifest.tensors.items()}
    own = [tensor for tensor in tensors.values() if tensor.same_as is None]
    total = sum(tensor.num_bytes for tensor in own)
    data = stored_data(store, manifest)
    reader = BatchedReader(data, counted(on_progress, total))
    job = Rewriting(data, reader, store, any(file.is_compressed for file in manifest.files))
    files = tuple(job.write_all(own))
    made = replace(manifest, save_id=job.save_id, tensors=tensors, files=files, borrowed=())
    check_complete(store, made)
    commit(store, made, overwrite=True)
    return made
