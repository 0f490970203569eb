"""Other metadata, and other names of tensors, for a checkpoint whose data stay as they are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    LayoutMismatch,
    ObjectExists,
    ObjectNotFound,
)

from ..storage.base import Store
from ..storage.failures import failing
from .files.borrowing import refuse_if_going
from .files.committing import find_manifest
from .files.manifest import MANIFEST, Manifest
from .formats.opening import open_place, read_manifest
from .state.limits import json_copy


def edit(
    checkpoint_id: str | os.PathLike[str] | Store,
    *,
    set_metadata: Mapping[str, Any] | None = None,
    remove_metadata: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Change metadata of a checkpoint, and names of tensors; return its manifest.

    ``set_metadata`` and ``remove_metadata`` change entries of the dictionary that was given at
    save; its values have to be those of JSON. ``rename`` has new names by old ones; both may be
    patterns of a ``MappingTable``, as ``{"model/{rest*}": "net/{rest*}"}``. Values, which are no
    tensors, keep their names.

    Data files are not touched: a new manifest takes the place of the one that is there in one step,
    on condition that it is still there. Incremental checkpoints that refer to files of this one are
    not affected; later ones write anew what was renamed. What was renamed cannot be read by
    versions of dtckpt that do not know of it, which say so.

    Raises NotCommitted where there is no checkpoint, LayoutMismatch where names or keys do not fit
    or another program wrote the checkpoint, CheckpointError for metadata that are not JSON, and
    AlreadyCommitted, with nothing changed, if it was replaced, deleted or edited by somebody else
    meanwhile.
    """
    store = open_place(checkpoint_id, **dict(storage_options or {}))
    there = find_manifest(store)
    if there is None:
        found = read_manifest(store)  # raises unless another program wrote it
        raise LayoutMismatch(
            f"{store.url}: this is a checkpoint of {found.format}, which is not edited; convert it "
            "first, or rename as it is loaded"
        )
    old = Manifest.from_bytes(there, f"{store.url}/{MANIFEST}")
    metadata = _metadata(store, old.metadata, set_metadata or {}, remove_metadata)
    made = replace(_renamed(old, rename or {}, store.url), metadata=metadata, stored=None)
    text = made.to_bytes()
    made = Manifest.from_bytes(text, f"{store.url}: the edited manifest")  # as readers will
    if text != there:
        refuse_if_going(store, old.save_id)
        _replace(store, text, there)
    return made


def _metadata(store: Store, old: Any, changes: Mapping[str, Any], removed: Iterable[str]) -> Any:
    removed = list(removed)
    if not changes and not removed:
        return old
    if old is not None and not isinstance(old, dict):
        raise LayoutMismatch(f"{store.url}: the metadata are no dictionary, so have no keys")
    found = dict(cast(dict[str, Any], old or {}))
    for key in removed:
        if key not in found:
            raise LayoutMismatch(f"{store.url}: the metadata have no {key!r}")
        del found[key]
    return found | json_copy(dict(changes))


def _renamed(manifest: Manifest, rename: Mapping[str, str], where: str) -> Manifest:
    """Return a manifest with tensors of other names, each of which knows how it is stored."""
    if not rename:
        return manifest
    from .mapping.rules import Move  # which need NumPy
    from .mapping.table import MappingTable, with_stored_names

    table = MappingTable([Move(old, new) for old, new in rename.items()])
    return with_stored_names(table.applied_to(manifest, where))


def _replace(store: Store, text: bytes, there: bytes) -> None:
    try:
        store.replace(MANIFEST, text, expected=there)
    except (ObjectExists, ObjectNotFound) as error:
        with failing(certain=False):
            found = find_manifest(store)
        if found != text:  # else only the reply was lost
            raise AlreadyCommitted(
                f"{store.url}: somebody else replaced, deleted or edited this checkpoint "
                "meanwhile, and that stands; look at it, and edit again"
            ) from error
    if (found := find_manifest(store)) != text:
        raise CheckpointError(
            f"{store.url}/{MANIFEST}: the store has confirmed the edited manifest and has another "
            "one: somebody else has replaced it since, or it was altered on its way"
        )
