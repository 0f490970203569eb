"""Incremental saves: what has not changed since an earlier checkpoint is referred to, not written.

A chunk has not changed if every block of it has the digest that the earlier file has for it. Then
the new data file only says which file holds it. The earlier checkpoint, the *lender*, gets a mark
that says who needs it, and a *claim* until the new manifest is there, so that it is not deleted by
mistake.

Who saves writes the claim, then looks whether the lender stands and nobody is deleting it. Who
deletes writes a record, then looks for claims and marks. So one of the two sees the other and gives
up before anything is done that would have to be undone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dtckpt.errors import CheckpointError, Corrupt, InUse, NotCommitted
from dtckpt.logs import logger_of

from ...storage.base import Store
from ...storage.failures import failing
from ...storage.open import open_store
from ..tensors.source import PIECE_BYTES
from .blocks import DIGEST_BYTES, BlockHasher
from .datafile import Entry
from .manifest import BorrowedFile, Manifest, read_own_manifest
from .places import RECORDS
from .stored_data import DataFile, StoredData
from .writing import Chunk

logger = logger_of("checkpoint")

MARKS = "needed-by"
"""Directory of a checkpoint in which those that refer to its files leave their names."""

_CLAIM = re.compile(r"(.+)\.[0-9a-f]{16}\.claim", re.DOTALL)


@dataclass(slots=True)
class Borrowed:
    """What one rank refers to instead of writing it."""

    files: dict[str, BorrowedFile] = field(default_factory=dict[str, BorrowedFile])
    references: dict[str, str] = field(default_factory=dict[str, str])
    """Id of the file by the key of the chunk."""
    num_bytes: int = 0


class Lender:
    """An earlier checkpoint beside the one that is written."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._name = name_of(store)
        self._data = StoredData(store, manifest)

    def borrow(self, chunk: Chunk, borrowed: Borrowed) -> bool:
        """Refer to a chunk if it is stored here with the same bytes; return whether it is."""
        try:
            found = self._find(chunk)
        except Corrupt as error:
            logger.warning("%s: not used as a base for %s: %s", self._name, chunk.key, error)
            return False
        if found is None or not _is_unchanged(chunk, *found):
            return False
        file, entry = found
        source = BorrowedFile(
            source=file.source or self._name, save_id=file.layout.save_id, record=file.record
        )
        borrowed.files[source.id] = source
        borrowed.references[chunk.key] = source.id
        borrowed.num_bytes += entry.num_bytes
        return True

    def _find(self, chunk: Chunk) -> tuple[DataFile, Entry] | None:
        tensor = self._data.manifest.tensors.get(chunk.tensor.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (chunk.dtype, chunk.tensor.shape):
            return None
        if chunk.box.is_empty or tensor.key(chunk.box) != chunk.key:
            return None
        for rank, box, _ in tensor.chunks_meeting(chunk.box):
            if box == chunk.box:
                return self._data.entry(rank, tensor, box)
            return None  # cut otherwise
        return None


def _is_unchanged(chunk: Chunk, file: DataFile, entry: Entry) -> bool:
    """Compare digests block by block: what has changed mostly shows in the first one."""
    block_bytes = file.layout.block_bytes
    expected = file.digests(entry)
    hasher = BlockHasher(block_bytes)
    for piece in chunk.source.pieces(PIECE_BYTES):
        for start in range(0, len(piece), block_bytes):
            seen = len(hasher.digests)
            hasher.update(piece[start : start + block_bytes])
            known = expected[seen * DIGEST_BYTES :]
            if not known.startswith(b"".join(hasher.digests[seen:])):
                return False
    hasher.end_chunk()
    return hasher.table() == expected


def open_base(
    base: str | os.PathLike[str] | Store, target: Store, options: Mapping[str, object]
) -> Store:
    """Return the store of a checkpoint to refer to; CheckpointError unless it is beside ``target``.

    Only then a run's directory can be moved or copied as a whole. Links are followed, since the
    name that is kept must lead to the same checkpoint for ever.
    """
    store = open_store(base, **({} if isinstance(base, Store) else options))
    real = _followed(store.url)
    sibling = target.sibling(real.rpartition("/")[2])
    if real == _followed(target.url) or _followed(sibling.url) != real:
        raise CheckpointError(
            f"the base {store.url} does not lie beside {target.url}. An incremental checkpoint "
            "refers to others in the same directory only, so that a run can be moved as a whole"
        )
    return sibling


def _followed(url: str) -> str:
    """Return a local path without links; other URLs as they are."""
    return os.path.realpath(url) if url.startswith("/") else url


def name_of(store: Store) -> str:
    """Return the name of a checkpoint among those beside it; that of a link counts for less."""
    folder, _, name = store.url.rpartition("/")
    real = _followed(store.url)
    real_name = real.rpartition("/")[2]
    return real_name if real == _followed(f"{folder}/{real_name}") else name


def names_of(store: Store) -> frozenset[str]:
    """Return the names by which others may refer to a checkpoint."""
    return frozenset(url.rpartition("/")[2] for url in (store.url, _followed(store.url)))


def claim_lenders(store: Store, manifest: Manifest) -> None:
    """Tell the lenders that a checkpoint is about to need them; CheckpointError if one is going.

    From then on nobody deletes their files, until ``withdraw_claims``.
    """
    for lender in _lenders(store, manifest):
        lender.publish(f"{MARKS}/{name_of(store)}", b"", overwrite=True)
        lender.publish(_claim(store, manifest), b"", overwrite=True)
    for source, save_id in sorted({(file.source, file.save_id) for file in manifest.borrowed}):
        lender = store.sibling(source)
        # In this order: between the two a whole deletion could pass.
        going = _going(lender, save_id)
        try:
            found = read_own_manifest(lender).save_id
        except NotCommitted:
            found = None
        if found != save_id:
            raise CheckpointError(
                f"{lender.url}: this checkpoint was deleted or replaced during the save that "
                "refers to it; save again without it as the base"
            )
        if going is not None:
            raise going


def refuse_if_going(store: Store, save_id: str) -> None:
    """Raise CheckpointError if somebody has begun to delete a checkpoint."""
    with failing(certain=True):
        going = _going(store, save_id)
        if going is not None:
            raise going


def _going(store: Store, save_id: str) -> CheckpointError | None:
    if not any(store.list(f"{RECORDS}/{save_id}")):
        return None
    return CheckpointError(
        f"{store.url}: this checkpoint is being deleted, or that was begun and has failed, so it "
        "cannot be the base of another one. Save without it as the base, or first finish the "
        "deletion with checkpoint.delete; checkpoint.clean lets a checkpoint stand whose deletion "
        "was given up long ago"
    )


def withdraw_claims(store: Store, manifest: Manifest) -> None:
    """Take the claims of a save that has ended away; what remains keeps lenders from deletion."""
    for lender in _lenders(store, manifest):
        try:
            lender.delete([_claim(store, manifest)])
        except Exception as error:
            logger.warning("%s: a claim of a save that has ended is left: %s", lender.url, error)


def _lenders(store: Store, manifest: Manifest) -> list[Store]:
    return [store.sibling(name) for name in sorted({file.source for file in manifest.borrowed})]


def _claim(store: Store, manifest: Manifest) -> str:
    return f"{MARKS}/{name_of(store)}.{manifest.save_id}.claim"


def is_claim(mark: str) -> bool:
    """Whether a name below ``MARKS`` is that of a claim."""
    return _CLAIM.fullmatch(mark.rpartition("/")[2]) is not None


def marks_of(store: Store) -> list[str]:
    """Return the marks and claims that others have left in ``store``."""
    return [mark.name for mark in store.list(MARKS)]


def dependents(store: Store, marks: Iterable[str]) -> dict[str, Manifest]:
    """Return the committed checkpoints that refer to files of the one in ``store``, by name."""
    own = names_of(store)
    found: dict[str, Manifest] = {}
    names = [mark.rpartition("/")[2] for mark in marks if not is_claim(mark)]
    for place in (store, *_elsewhere(store)) if names else ():
        for name in names:
            try:
                manifest = read_own_manifest(place.sibling(name))
            except NotCommitted:
                continue
            if any(file.source in own for file in manifest.borrowed):
                found.setdefault(name, manifest)
    return found


def _elsewhere(store: Store) -> list[Store]:
    """Return where a checkpoint lies if that is in another directory, to which a link leads."""
    real, folder = _followed(store.url), store.url.rpartition("/")[0]
    return [] if _followed(folder) == real.rpartition("/")[0] else [open_store(real)]


def refuse_if_needed(
    store: Store, what: str, save_id: str | None, *, besides: Collection[str] = ()
) -> list[str]:
    """Raise InUse if others refer to files of a checkpoint in ``store``, or may be about to.

    ``save_id`` is that of the checkpoint; without it files of all saves count. ``besides`` names
    those that may refer to them. Returns the marks that are there, which nobody stands behind any
    more.
    """
    marks = marks_of(store)
    if claims := [mark for mark in marks if is_claim(mark)]:
        names = sorted({str(_CLAIM.sub(r"\1", claim.rpartition("/")[2])) for claim in claims})
        raise InUse(
            f"{store.url} cannot be {what}: a save of {', '.join(names)} beside it that refers to "
            "its files is being committed, was killed at that, or does not know how it ended. If "
            f"none is under way, checkpoint.clean takes away {claims[0]}"
        )
    others = dependents(store, marks)
    own = names_of(store)
    if needing := [
        name
        for name, manifest in others.items()
        if name not in besides
        and any(f.source in own and save_id in (None, f.save_id) for f in manifest.borrowed)
    ]:
        raise InUse(
            f"{store.url} cannot be {what}: the incremental checkpoints {', '.join(needing)} "
            "beside it refer to its files. Delete those first, or save them anew without a base"
        )
    return [mark for mark in marks if mark.rpartition("/")[2] not in others]
