"""Files of ``torch.save``, of any release: what each holds, and where its tensors lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....storage.base import ObjectInfo, Store
from ...files.blocks import digest
from ..files import info_of_file
from ..kinds import LEGACY_MAGIC, check_readable
from ..pickles.unpickling import Known, load_pickle
from .archive import Span, archive_of, read_ends
from .legacy import fingerprint, open_legacy
from .memories import ArchiveMemory, Memory


class Saved(NamedTuple):
    """A file, of which the pickle has been read."""

    seen: ObjectInfo
    """What was told of it before it was read."""
    value: Any
    memory: Memory
    digest: str
    """Of the pickle."""
    fingerprint: str
    """What is compared when it is opened to be read."""
    where: str


def open_saved(
    store: Store, file: str, where: str, known: Known | None = None, *, with_unheld: bool = False
) -> Saved:
    """Return what a file of ``torch.save`` holds.

    Raises Corrupt where it is damaged, and CheckpointError, saying what it is, where it is
    something else.
    """
    seen = info_of_file(store, file)
    ((head, tail),) = read_ends(store, file, [Span(0, seen.size)])
    if head.startswith(LEGACY_MAGIC):
        old = open_legacy(store, file, seen.size, known, with_unheld=with_unheld)
        return Saved(seen, old.value, old.memory, old.digest, fingerprint(old), where)
    check_readable(head, seen.size, where)
    archive = archive_of(store, file, Span(0, seen.size), head, tail)
    archive.check_is_saved()
    archive.check_byte_order()
    pickled = archive.read("data.pkl")
    value = load_pickle(pickled, where, known, with_unheld=with_unheld)
    told = archive.fingerprint("data.pkl")
    return Saved(seen, value, ArchiveMemory(archive), digest(pickled).hex(), told, archive.where)
