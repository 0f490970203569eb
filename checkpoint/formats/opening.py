"""From a place to the manifest of what lies there, whoever wrote it, and to its files.

Ours has its manifest on disk. For checkpoints of other programs one is made of what their files
tell, and from there on everything is the same: layouts, plans, reads, errors. What such a manifest
does not have is checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dtckpt.errors import NotCommitted
from dtckpt.logs import logger_of

from ...storage.base import Store
from ...storage.one_file import OneFile
from ...storage.open import open_store, split_target
from ..files.foreign import ENDINGS, what_is_there
from ..files.manifest import (
    MANIFEST,
    OURS,
    FileRecord,
    Manifest,
    read_manifest_bytes,
    read_own_manifest,
)
from ..files.stored_data import DataFile, OpenForeign, StoredData
from ..state.collector import paused_collector
from . import hugging_face, safetensors
from .beside import notes_of
from .by_rank import names as by_rank
from .files import names_in
from .names import (
    COMMON,
    CONFIG,
    METADATA,
    OF_ACCELERATE,
    OF_MEGATRON,
    OF_TORCH,
    OF_TORCH_CHECKPOINTING,
    OF_TORCH_SAVE,
    OF_VERL,
)

logger = logger_of("checkpoint")


def _of_megatron(store: Store) -> Manifest | None:
    if not (store.exists(CONFIG) or store.exists(COMMON)):
        return None
    from . import megatron

    return megatron.find(store)


def _of_torch(store: Store) -> Manifest | None:
    if not store.exists(METADATA):
        return None
    from . import dcp  # which imports torch: most checkpoints are looked at without it

    return dcp.read(store)


def _of_ranks(store: Store) -> Manifest | None:
    found = by_rank.find(store, names_in(store))
    return None if found is None else _manifest_of_ranks(store, found)


def _of_torch_checkpointing(store: Store) -> Manifest | None:
    if not store.exists(by_rank.TORCH_CHECKPOINTING):
        return None
    from .by_rank import torch_checkpointing

    return _manifest_of_ranks(store, torch_checkpointing.find(store, names_in(store)))


def _manifest_of_ranks(store: Store, found: by_rank.FilesOfRanks) -> Manifest:
    from .by_rank import manifests

    return manifests.manifest_of(store, found)


def _open_archived(store: Store, manifest: Manifest, record: FileRecord) -> DataFile:
    from .archives import archived_files

    return archived_files.open_file(store, manifest, record)


_FINDERS: tuple[Callable[[Store], Manifest | None], ...] = (
    hugging_face.find_one,
    _of_megatron,
    _of_torch,
    _of_torch_checkpointing,
    hugging_face.find,
    _of_ranks,
)
"""Each returns the manifest of what lies in a store, or None where it is of another format."""
_OPENERS: dict[str, OpenForeign] = {
    safetensors.FORMAT: safetensors.open_file,
    OF_TORCH: _open_archived,
    OF_MEGATRON: _open_archived,
    OF_TORCH_SAVE: _open_archived,
    OF_VERL: _open_archived,
    OF_ACCELERATE: _open_archived,
    OF_TORCH_CHECKPOINTING: _open_archived,
}
"""What opens a file, by format."""
_ON_DISK, _MADE = b"0", b"1"
"""Before the text of a manifest: one on disk may not pass itself off as made of other files."""


def open_place(target: str | os.PathLike[str] | Store, **options: Any) -> Store:
    """Return the store of a checkpoint to be read: that of a directory, or a file by itself.

    Errors are those of ``open_store``.
    """
    if isinstance(target, Store):
        return open_store(target, **options)
    path, options = split_target(target, options)
    if path.lower().endswith(ENDINGS):
        folder, _, name = path.rpartition("/")
        around = open_store(folder or ("/" if path.startswith("/") else "."), **options)
        if around.exists(name):
            return OneFile(around, name)
        around.close()
    return open_store(path, **options)


@dataclass(frozen=True, slots=True)
class ManifestText:
    """The manifest of what lies in a store, as ranks give it to each other."""

    text: bytes = b""
    seen: tuple[FileRecord, ...] = ()
    """Files of other programs as this process, which made the manifest, has seen them."""


def manifest_text(store: Store) -> ManifestText:
    """Return the text of the manifest of what lies in a store, for ``parse_manifest``.

    NotCommitted, saying what is there instead, where it is no checkpoint that dtckpt reads.
    """
    try:
        return ManifestText(_ON_DISK + read_manifest_bytes(store))
    except NotCommitted as error:
        made = _made(store, error)
        return ManifestText(_MADE + made.to_bytes(), made.files)


def parse_manifest(text: bytes, url: str, seen: tuple[FileRecord, ...] = ()) -> Manifest:
    """Return the manifest of a text that ``manifest_text`` returned, on this rank or another.

    ``seen`` is what it returned beside, on the rank that called it.
    """
    formats = tuple(_OPENERS) if text[:1] == _MADE else (OURS,)
    manifest = Manifest.from_bytes(text[1:], f"{url}/{MANIFEST}", formats=formats)
    return replace(manifest, files=seen) if seen else manifest


def read_manifest(store: Store) -> Manifest:
    """Return the manifest of the checkpoint in ``store``; NotCommitted where there is none."""
    try:
        return read_own_manifest(store)
    except NotCommitted as error:
        return _made(store, error)


def _made(store: Store, error: NotCommitted) -> Manifest:
    """Return the manifest of what another program saved; NotCommitted where that is nothing."""
    with paused_collector():
        found = next((m for find in _FINDERS if (m := find(store)) is not None), None)
    if found is None:
        raise NotCommitted(what_is_there(store)) from error
    for note in notes_of(found):
        _warn(f"{store.url}: {note}")
    return found


@lru_cache(1024)  # once each: a command looks at a checkpoint several times
def _warn(text: str) -> None:
    logger.warning("%s", text)


def stored_data(store: Store, manifest: Manifest) -> StoredData:
    """Return the files of a checkpoint, which are opened when they are first needed."""
    return StoredData(store, manifest, open_foreign=_OPENERS.get(manifest.format))
