"""The commit: prove that the written files hold everything, then publish the manifest.

Every failure is certain or not. It is *certain*, and the data files may go, if nothing was asked of
the store or the store has refused. Else a request may have been carried out, or still be, and the
data files stay: whatever appears is whole. docs/format.md has this as a table of states, and
tests/checkpoint/files/test_commit_states.py goes through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    Corrupt,
    NotCommitted,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from dtckpt.interrupts import raised_by_signal_handler
from dtckpt.logs import logger_of

from ...storage.base import Store
from ...storage.failures import failing
from .borrowing import claim_lenders, refuse_if_needed, withdraw_claims
from .manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    data_path,
    read_manifest_bytes,
)

logger = logger_of("checkpoint")


def check_free(store: Store, *, overwrite: bool) -> str | None:
    """Raise AlreadyCommitted if a checkpoint is there that may not be replaced.

    Return the save id of the one that may, if any.
    """
    if overwrite:
        there = find_manifest(store)
        # A newer format is refused here, before anything is written.
        save_id = None if there is None else _save_id(store, there)
        refuse_if_needed(store, "replaced", save_id)
        return save_id
    if store.exists(MANIFEST):
        raise AlreadyCommitted(
            f"Checkpoint already exists: {store.url} has a committed one, and nothing was changed. "
            "Choose another path, or pass overwrite=True to replace it"
        )
    return None


def refuse_if_other(store: Store, save_id: str | None) -> None:
    """Raise AlreadyCommitted if a checkpoint is there that ``check_free`` has not found."""
    with failing(certain=True):
        found = find_manifest(store)
        if found is not None and _save_id(store, found) != save_id:
            raise _taken(store)


def wrong_files(
    store: Store, save_id: str, files: Sequence[FileRecord], *, only_longer: bool = False
) -> Iterator[tuple[FileRecord, int | None]]:
    """Yield the data files that are not there with their size, and the size found, if any.

    ``only_longer`` asks for those that have more.
    """

    def is_wrong(record: FileRecord, found: int | None) -> bool:
        return (found or 0) > record.size if only_longer else found != record.size

    sizes = {info.name: info.size for info in store.list(f"data/{save_id}")} if files else {}
    for record in files:
        name = record.path(save_id)
        found = sizes.get(name)
        if is_wrong(record, found):  # a listing may lag behind; ask for it
            try:
                found = store.stat(name).size
            except ObjectNotFound:
                found = None
        if is_wrong(record, found):
            yield record, found


def data_places(
    store: Store, manifest: Manifest
) -> Iterator[tuple[Store, str, Sequence[FileRecord]]]:
    """Yield the checkpoints in which the data files of one lie, first itself: save id and files."""
    yield store, manifest.save_id, manifest.files
    lenders: dict[tuple[str, str], list[FileRecord]] = {}
    for file in manifest.borrowed:
        lenders.setdefault((file.source, file.save_id), []).append(file.record)
    for (source, save_id), records in lenders.items():
        yield store.sibling(source), save_id, records


def missing_files(store: Store, manifest: Manifest) -> list[str]:
    """Return what is missing of a committed checkpoint, going by the sizes of its data files."""
    return [
        f"{place.url}/{record.path(save_id)}"
        for place, save_id, files in data_places(store, manifest)
        for record, _ in wrong_files(place, save_id, files)
    ]


def check_complete(store: Store, manifest: Manifest, borrowed_bytes: int = 0) -> None:
    """Raise CheckpointError unless the files of a finished save are all there, and hold it all.

    They have to have exactly the bytes of all tensors, but for ``borrowed_bytes``, which lie in
    files of earlier checkpoints. Which chunk lies where follows from the plan that every writer
    derived alike, and is checked again from the file headers at each load.
    """
    files = manifest.files
    expected = sum(tensor.stored_bytes for tensor in manifest.tensors.values())
    written = sum(record.data_bytes for record in files) + borrowed_bytes
    if len({record.rank for record in files}) != len(files) or written != expected:
        raise CheckpointError(
            f"the ranks report {written} bytes of data in {len(files)} files, expected {expected} "
            "bytes; the checkpoint was not committed. The ranks seem to hold tensors of other "
            "sizes than they announced"
        )
    # Ranks that save to their own local disks write a checkpoint that nobody can load.
    for record, found in wrong_files(store, manifest.save_id, files):
        raise CheckpointError(
            f"{store.url}/{manifest.path_of(record)}: rank {record.rank} wrote this file of "
            f"{record.size} bytes, but the coordinator finds "
            f"{'none' if found is None else f'{found} bytes'} there; the checkpoint was not "
            "committed. All ranks must save to storage that they share"
        )
    manifest.validate()


def commit(store: Store, manifest: Manifest, *, overwrite: bool) -> None:
    """Publish the manifest of a finished save.

    From then on, and not before, the checkpoint exists. With ``overwrite`` the files of the
    checkpoint that it replaces are deleted afterwards, unless others have come to refer to them.
    """
    try:
        with failing(certain=True):
            claim_lenders(store, manifest)
        replaced = _publish(store, manifest, overwrite=overwrite)
    except CheckpointError as error:
        if error.is_certain:  # else the checkpoint may yet appear, and need them
            withdraw_claims(store, manifest)
        raise
    withdraw_claims(store, manifest)
    if replaced is not None:
        _sweep(store, replaced, manifest.save_id)


def _publish(store: Store, manifest: Manifest, *, overwrite: bool) -> bytes | None:
    """Put the manifest in its place and read it back; return the text of the one that may go."""
    text = manifest.to_bytes()
    there = None  # publishing refuses by itself if there is one
    if overwrite:
        with failing(certain=True):
            there = find_manifest(store)
            if there is not None:
                refuse_if_needed(store, "replaced", _save_id(store, there))
    try:
        if there is None:
            store.publish(MANIFEST, text, overwrite=False)
        else:
            store.replace(MANIFEST, text, expected=there)
    except (ObjectExists, ObjectNotFound) as error:
        with failing(certain=False):
            found = find_manifest(store)
        if found == text:  # only the reply was lost
            return there
        # Not tried again: ours may have stood already, and its files have gone with it.
        with failing(certain=error.is_certain):
            raise _taken(store) from error
    except CheckpointError as error:
        if not error.is_certain:
            _put_back(store, there)
        raise
    try:
        found = find_manifest(store)
    except StorageError as error:  # the store has confirmed it, so nothing is known to be wrong
        logger.warning("%s: committed, but could not be read back: %s", store.url, error)
        return None  # what it replaced is left over
    with failing(certain=False):
        try:
            _compare(store, text, found, there, overwrite=overwrite)
        except CheckpointError:
            _put_back(store, there)
            raise
    return there


def _compare(
    store: Store, text: bytes, found: bytes | None, there: bytes | None, *, overwrite: bool
) -> None:
    """Raise unless what was published is what is found, before what was ``there`` goes."""
    if found == text:
        return
    if found is None:
        what = "nothing is there"
    elif found == there:
        what = "what was there before still is"
    elif (other := _parsed(store, found)) is None:
        what = "other bytes are there"
    elif overwrite:
        logger.warning("%s: replaced at once by another save, %s", store.url, other.save_id)
        return
    else:  # could not have been replaced: the store let two win
        raise _taken(store)
    raise StorageError(
        f"{store.url}/{MANIFEST}: {what} although the store has confirmed this file of {len(text)} "
        "bytes: it was lost or altered on its way, or is being deleted. The data files stay; find "
        "out what stands between this process and the store, and save again"
    )


def _put_back(store: Store, there: bytes | None) -> None:
    """Undo a replacement that has left a damaged manifest."""
    if there is None or _parsed(store, there) is None:
        return
    try:
        found = find_manifest(store)
        if found is not None and found != there and _parsed(store, found) is None:
            store.replace(MANIFEST, there, expected=found)
            logger.warning("%s: the checkpoint that was there before was put back", store.url)
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        logger.warning("%s: a damaged manifest may have been left here: %s", store.url, error)


def _sweep(store: Store, replaced: bytes, save_id: str) -> None:
    """Delete the files of a checkpoint that was replaced, unless somebody needs them.

    Those of ``save_id`` are: whoever makes the same of the same writes the same files. Only what
    its manifest names: other files may belong to a save that is still under way.
    """
    try:
        manifest = _parsed(store, replaced)
        if manifest is not None and manifest.save_id != save_id:
            refuse_if_needed(store, "replaced", manifest.save_id)
            store.delete([manifest.path_of(record) for record in manifest.files])
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        logger.warning("%s: files of the replaced checkpoint are left over: %s", store.url, error)


def find_manifest(store: Store) -> bytes | None:
    """Return the text of the manifest that is there, if any."""
    try:
        return read_manifest_bytes(store)
    except NotCommitted:
        return None


def _parsed(store: Store, text: bytes) -> Manifest | None:
    """Return the manifest of a text, None if it is damaged; raises if its format is newer."""
    try:
        return Manifest.from_bytes(text, f"{store.url}/{MANIFEST}")
    except Corrupt:
        return None


def _save_id(store: Store, text: bytes) -> str | None:
    manifest = _parsed(store, text)
    return None if manifest is None else manifest.save_id


def _taken(store: Store) -> AlreadyCommitted:
    return AlreadyCommitted(
        f"{store.url}: another save committed a checkpoint here, or deleted the one that was here, "
        "while this one was writing; that stands. Choose another path, or save again with "
        "overwrite=True"
    )


def discard(store: Store, save_id: str, rank: int) -> None:
    """Delete what a rank wrote for a save that failed."""
    try:
        store.delete([data_path(save_id, rank, is_compressed=is_it) for is_it in (False, True)])
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        logger.warning("%s: a file of a failed save is left over: %s", store.url, error)
