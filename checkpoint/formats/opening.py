"""From a place to the manifest of what lies there, whoever wrote it, and to its files.

Ours has its manifest on disk. For checkpoints of other programs one is made of what their files
tell, and from there on everything is the same: layouts, plans, reads, errors. What such a manifest
does not have is checksums.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt, NotCommitted
from dtckpt.logs import logger_of

from ...dtensor.comm.caches import remembered
from ...storage.base import Store
from ...storage.one_file import OneFile
from ...storage.open import open_store, split_target
from ..files.foreign import ASKED_ENDINGS, what_is_there
from ..files.manifest import (
    MANIFEST,
    OURS,
    FileRecord,
    Manifest,
    is_intact,
    read_manifest_bytes,
    read_own_manifest,
)
from ..files.places import DATA
from ..files.stored_data import DataFile, OpenForeign, StoredData
from ..state.collector import paused_collector
from . import hugging_face, safetensors
from .beside import PASSED_OVER, notes_of, with_notes
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


_DISTCP = re.compile(r".*\.distcp")
_FINDERS: tuple[tuple[Callable[[Store], Manifest | None], str, re.Pattern[str] | None], ...] = (
    (hugging_face.find_one, "", None),
    (_of_megatron, CONFIG, _DISTCP),
    (_of_torch, METADATA, _DISTCP),
    (_of_torch_checkpointing, by_rank.TORCH_CHECKPOINTING, by_rank.ITEM_OF_RANK),
    (hugging_face.find, "", None),
    (_of_ranks, "", None),
)
"""Each returns the manifest of what lies in a store, or None where it is of another format. Beside
it the file by which it knows, and the names of those that belong to it."""
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
_START_BYTES = 4096
_ON_DISK, _MADE = b"0", b"1"
"""Before the text of a manifest: one on disk may not pass itself off as made of other files."""


def open_place(target: str | os.PathLike[str] | Store, **options: Any) -> Store:
    """Return the store of a checkpoint to be read: that of a directory, or a file by itself.

    Errors are those of ``open_store``.
    """
    if isinstance(target, Store):
        return open_store(target, **options)
    path, options = split_target(target, options)
    folder, _, name = path.rpartition("/")
    if name.lower().endswith(ASKED_ENDINGS) and name != MANIFEST:
        around = open_store(folder or ("/" if path.startswith("/") else "."), **options)
        if around.exists(name):
            return OneFile(around, name)
        around.close()
    store = open_store(path, **options)
    if os.path.isabs(store.url) and os.path.isfile(store.url):  # whatever its name ends in
        folder, name = os.path.split(store.url)
        if name != MANIFEST:
            return OneFile(open_store(folder, **options), name)
    return store


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
        text = read_manifest_bytes(store)
        if is_intact(text):
            return ManifestText(_ON_DISK + text)
        malformed = Corrupt(f"{store.url}/{MANIFEST} is no manifest of a checkpoint")
        if not _is_strangers(store):
            return ManifestText(_ON_DISK + text)  # for whoever parses it to say what is wrong
        made = _made(store, malformed)
    except NotCommitted as error:
        made = _made(store, error)
    return ManifestText(_MADE + made.to_bytes(), made.files)


def is_replaced(store: Store, seen: ManifestText) -> bool:
    """Whether a save has replaced a checkpoint of ours since its manifest was read."""
    return seen.text[:1] == _ON_DISK and _ON_DISK + read_manifest_bytes(store) != seen.text


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
    except Corrupt as error:
        if not _is_strangers(store):
            raise
        return _made(store, error)


def _is_strangers(store: Store) -> bool:
    """Whether a malformed manifest is no damaged one of dtckpt, but another program's file.

    That says nothing of a digest, and there are no files of a checkpoint beside it.
    """
    if isinstance(store, OneFile) or DATA in store.level().folders:
        return False
    size = store.stat(MANIFEST).size
    return b"digest" not in store.read(MANIFEST, 0, min(size, _START_BYTES))


def _made(store: Store, error: CheckpointError) -> Manifest:
    """Return the manifest of what another program saved; NotCommitted where that is nothing.

    ``error`` is why there is none of dtckpt: it is raised where it says that one is damaged, and
    there is nothing else.
    """
    with paused_collector():
        found = _found(store)
    if found is None:
        if not isinstance(error, NotCommitted):
            raise error
        raise NotCommitted(what_is_there(store)) from error
    for note in notes_of(found):
        _warn(f"{store.url}: {note}")
    return found


def _found(store: Store) -> Manifest | None:
    """Return the manifest of what the first of the finders finds.

    What only has the name of a format's file is passed over where there are weights: its content is
    none of the format, and the files that belong to it are not there.
    """
    for find, marker, files in _FINDERS:
        try:
            found = find(store)
        except CheckpointError:
            if files is None or any(map(files.fullmatch, names_in(store))):
                raise
            found = hugging_face.find(store)
            if found is None:
                raise
            read = {record.name for record in found.files}
            told = (found.metadata or {}).get(PASSED_OVER, [])
            others = [marker, *(name for name in told if name != marker and name not in read)]
            return with_notes(found, passed_over=others)
        if found is not None:
            return found
    return None


@remembered(1024)  # once each: a command looks at a checkpoint several times
def _warn(text: str) -> None:
    logger.warning("%s", text)


def stored_data(store: Store, manifest: Manifest) -> StoredData:
    """Return the files of a checkpoint, which are opened when they are first needed."""
    return StoredData(store, manifest, open_foreign=_OPENERS.get(manifest.format))
