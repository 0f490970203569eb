"""The commit: prove that the written files hold everything, then publish the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    Corrupt,
    NotCommitted,
    ObjectExists,
)
from dtckpt.logs import logger_of

from ..storage.base import Store
from .borrowing import check_lenders, dependents, leave_marks, refuse_if_needed
from .manifest import (
    MANIFEST,
    BorrowedFile,
    FileRecord,
    Manifest,
    data_path,
    read_manifest,
)
from .plan import StoredTensor
from .tree import Node

logger = logger_of("checkpoint")


def check_free(store: Store, *, overwrite: bool) -> None:
    """Raise AlreadyCommitted if a checkpoint is there that may not be replaced."""
    if not overwrite and store.exists(MANIFEST):
        raise AlreadyCommitted(
            f"{store.url}: a committed checkpoint is already here and nothing was changed. "
            "Choose another path, or pass overwrite=True to replace it"
        )
    if overwrite:
        _replaced_files(store)  # one of a newer format is refused here, before anything is written
        refuse_if_needed(store, "replaced")


def check_files(
    tensors: Sequence[StoredTensor], files: Sequence[FileRecord], borrowed_bytes: int
) -> None:
    """Raise CheckpointError unless the data files have room for exactly the bytes of all tensors.

    The cost grows with tensors and files; which chunk lies where follows from the plan that every
    writer derived alike, and is checked again from the file headers at each load.
    """
    expected = sum(tensor.stored_bytes for tensor in tensors)
    written = sum(record.data_bytes for record in files) + borrowed_bytes
    if len({record.rank for record in files}) != len(files) or written != expected:
        raise CheckpointError(
            f"the ranks report {written} bytes of data in {len(files)} files, expected {expected} "
            "bytes; the checkpoint was not committed. The ranks seem to hold tensors of other "
            "sizes than they announced"
        )


def _check_present(store: Store, save_id: str, files: Sequence[FileRecord]) -> None:
    """Raise CheckpointError unless the coordinator sees every file that a rank says it wrote.

    Ranks that save to their own local disks write a checkpoint that nobody can load.
    """
    sizes = {info.name: info.size for info in store.list(f"data/{save_id}")}
    for record in files:
        name = data_path(save_id, record.rank)
        found = sizes.get(name)
        if found != record.size and store.exists(name):  # a listing may lag behind; ask for it
            found = store.stat(name).size
        if found != record.size:
            raise CheckpointError(
                f"{store.url}/{name}: rank {record.rank} wrote this file of {record.size} bytes, "
                f"but the coordinator finds {'none' if found is None else f'{found} bytes'} there; "
                "the checkpoint was not committed. All ranks must save to storage that they share"
            )


def prepare(
    store: Store,
    *,
    save_id: str,
    tensors: Sequence[StoredTensor],
    tree: Node,
    files: Sequence[FileRecord],
    metadata: Any,
    borrowed: Sequence[BorrowedFile] = (),
    borrowed_bytes: int = 0,
) -> Manifest:
    """Return the manifest of a finished save; CheckpointError unless its files are all there."""
    check_files(tensors, files, borrowed_bytes)
    _check_present(store, save_id, files)
    manifest = Manifest(
        save_id=save_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tensors={tensor.name: tensor for tensor in tensors},
        tree=tree,
        files=tuple(files),
        borrowed=tuple(borrowed),
        metadata=metadata,
    )
    manifest.validate()
    return manifest


def commit(store: Store, manifest: Manifest, *, overwrite: bool) -> None:
    """Publish the manifest of a finished save.

    From then on, and not before, the checkpoint exists. With ``overwrite`` the files of the
    checkpoint that it replaces are deleted afterwards, unless others have come to refer to them.
    """
    try:
        replaced = _replaced_files(store) if overwrite else []
        if overwrite:
            refuse_if_needed(store, "replaced")
        leave_marks(store, manifest.borrowed)
        check_lenders(store, manifest.borrowed)
    except CheckpointError as error:
        error.is_certain = True
        raise
    try:
        store.publish(MANIFEST, manifest.to_bytes(), overwrite=overwrite)
    except ObjectExists as error:
        if not _is_published(store, manifest):  # else only the reply was lost
            lost = AlreadyCommitted(
                f"{store.url}: another save committed a checkpoint here while this one was "
                "writing; that one stands. Choose another path, or pass overwrite=True"
            )
            lost.is_certain = True
            raise lost from error
    except CheckpointError as error:
        error.is_certain = not _is_published(store, manifest)
        raise
    try:
        # Whoever deletes or replaces a lender looks for us after it has taken its manifest away,
        # and we look for the lender after we have published ours: one of us sees the other.
        check_lenders(store, manifest.borrowed)
    except CheckpointError as error:
        store.delete([MANIFEST])
        error.is_certain = True
        raise
    try:
        if replaced and not dependents(store):
            store.delete(replaced)
    except Exception as error:
        logger.warning("%s: files of the replaced checkpoint are left over: %s", store.url, error)


def _is_published(store: Store, manifest: Manifest) -> bool:
    """Whether the manifest is, or for all that can be known may be, the one that is there."""
    try:
        return read_manifest(store).save_id == manifest.save_id
    except (NotCommitted, Corrupt):
        return False
    except Exception:
        return True


def _replaced_files(store: Store) -> list[str]:
    """Return the data files of the checkpoint that is there.

    Only what its manifest names: other files may belong to a save that is still under way.
    """
    try:
        manifest = read_manifest(store)
    except (NotCommitted, Corrupt):
        return []
    return [manifest.path_of(record) for record in manifest.files]


def discard(store: Store, save_id: str, rank: int) -> None:
    """Delete what a rank wrote for a save that failed."""
    try:
        store.delete([data_path(save_id, rank)])
    except Exception as error:
        logger.warning("%s: a file of a failed save is left over: %s", store.url, error)
