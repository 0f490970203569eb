"""Taking away what killed saves and deletions have left, and nothing that may still be needed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt, ObjectNotFound, StorageError
from dtckpt.logs import logger_of

from ..storage.base import ObjectInfo, Store, is_before
from ..storage.names import is_valid, target_of
from ..storage.open import open_store
from .deleting import finish_deletions, is_record
from .files.borrowing import MARKS, dependents, is_claim, names_of
from .files.committing import find_manifest
from .files.datafile import parse_header
from .files.manifest import Manifest
from .files.places import MANIFEST, RECORDS
from .state.limits import check_metadata_bytes

logger = logger_of("checkpoint")

# As exact as names are written: files of other programs may be called much the same.
_DATA = re.compile(
    r"(?:(.+)/)?data/([0-9a-f]{16})/(?:[0-9]{5}|[1-9][0-9]{5,})\.(?:safetensors|compressed)",
    re.DOTALL,
)
_OTHER = re.compile(
    rf"(?:(.+)/)?(?:{MARKS}/[^/]+|{RECORDS}/[0-9a-f]{{16}}/[0-9a-f]{{16}}\.json)", re.DOTALL
)


def clean(
    root: str | os.PathLike[str] | Store,
    *,
    older_than: timedelta = timedelta(days=1),
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Delete what saves and deletions that were killed have left; return the names of it.

    With ``dry_run`` nothing is deleted, and what an interrupted deletion had still to do is not
    among the names.

    ``root`` is a checkpoint or a directory of any number of them; one process calls this. Taken
    away are data files that no manifest names, unfinished files and uploads in parts, claims on
    earlier checkpoints, and what an interrupted ``delete`` had still to do. Of all these only what
    has not been written to for ``older_than``: choose it longer than any save takes from the first
    file that a rank has finished to its end. Age is by the clock of the store, of which a small
    object is written and deleted, and by that of this machine. A save of which
    nothing is younger is taken for dead, and fails if it is not. What a store gives no times for is
    left alone, and so is everything where a manifest cannot be read.

    Committed checkpoints are never touched, nor what does not say, by its name and in its header,
    that a save of this library has written it.
    """
    store = open_store(root, **dict(storage_options or {}))
    before = time.time() - older_than.total_seconds()
    objects = [info for info in store.list() if is_valid(info.name)]
    gone: list[str] = []
    if any(is_before(info, before) for info in objects) or _unfinished(store, before):
        try:
            before = min(before, time_of(store) - older_than.total_seconds())
        except StorageError as error:
            logger.warning("%s: not cleaned: %s", store.url, error)
            return gone
    places = sorted(_places(objects))
    for place in places:
        start = f"{place}/" if place else ""
        below = {i.name[len(start) :]: i for i in objects if i.name.startswith(start)}
        here = store.substore(place) if place else store
        try:
            for dead in _dead_names(here, below, before, dry_run=dry_run):
                names = [f"{start}{name}" for name in dead]
                if not dry_run:
                    store.delete(names)
                gone += names
        except CheckpointError as error:
            logger.warning("%s: not cleaned: %s", here.url, error)
    try:
        unfinished = [n for n in _unfinished(store, before) if _is_ours(n, places)]
        if not dry_run:
            store.delete(unfinished)
    except CheckpointError as error:
        logger.warning("%s: unfinished files and uploads were not cleaned: %s", store.url, error)
        return gone
    return gone + unfinished


def _unfinished(store: Store, before: float) -> list[str]:
    try:
        return list(store.leftovers(before=before))
    except CheckpointError as error:
        logger.warning("%s: unfinished files and uploads were not cleaned: %s", store.url, error)
        return []


def time_of(store: Store) -> float:
    """Return what the store's clock says, or this machine's where the store tells no times."""
    name = f".dtckpt-time-{os.urandom(8).hex()}"
    store.publish(name, b"", overwrite=False)
    try:
        modified = store.stat(name).modified
    finally:
        store.delete([name])
    return time.time() if modified is None else modified


def _is_ours(unfinished: str, places: Iterable[str]) -> bool:
    """Whether an unfinished write is one of a save or deletion, going by what it was to become."""
    target = target_of(unfinished)
    if target is None or not is_valid(target):
        return False
    if _DATA.fullmatch(target):
        return True
    place, _, last = target.rpartition("/")
    if last != MANIFEST:
        match = _OTHER.fullmatch(target)
        if match is None:
            return False
        place = match[1] or ""
    return place in places


def _places(objects: Iterable[ObjectInfo]) -> set[str]:
    """Return where checkpoints are, or have been begun."""
    matches = (_DATA.fullmatch(info.name) or _OTHER.fullmatch(info.name) for info in objects)
    return {match[1] or "" for match in matches if match}


def _dead_names(
    here: Store, objects: Mapping[str, ObjectInfo], before: float, *, dry_run: bool
) -> Iterator[list[str]]:
    """Yield what is to go from one place, of which ``objects`` is a listing, in this order."""
    if not dry_run and any(is_record(name) for name in objects):
        finish_deletions(here, before=before)
    marks = [name for name in objects if name.startswith(f"{MARKS}/")]
    claims = [name for name in marks if is_claim(name) and objects[name].size == 0]
    yield [name for name in claims if is_before(objects[name], before)]
    needed = _needed(here, before)
    if needed is None:
        return
    saves: dict[str, list[str]] = {}
    for name in objects:
        match = _DATA.fullmatch(name)
        if match and not match[1] and match[2] not in needed:
            saves.setdefault(match[2], []).append(name)
    for save_id, files in saves.items():
        if all(is_before(objects[name], before) for name in files):
            yield [name for name in files if _is_of(here, name, objects[name].size, save_id)]


def _is_of(here: Store, name: str, size: int, save_id: str) -> bool:
    """Whether a file called like a data file of a save says in its header that it is one."""
    where = f"{here.url}/{name}"
    try:
        end = 8 + int.from_bytes(here.read(name, 0, min(size, 8)), "little")
        if end > size:
            raise Corrupt(f"{where}: the file has {size} bytes, its header says {end}")
        check_metadata_bytes(2 * end, f"the header of {where}")
        found = parse_header(here.read(name, 0, end), where).save_id
        if found != save_id:
            raise Corrupt(f"{where}: the file belongs to the save {found!r}")
    except ObjectNotFound:
        return False
    except StorageError:
        raise
    except CheckpointError as error:
        logger.warning("left alone, since it is no data file of a save of this name: %s", error)
        return False
    return True


def _needed(here: Store, before: float) -> set[str] | None:
    """Return the ids of the saves of which a committed checkpoint needs data files here.

    None where a save is under way that may need others. Who borrows leaves a claim before looking
    at the manifest; so the manifest is looked at here before the marks are listed, or one that was
    replaced meanwhile, and its borrowers, would be missed.
    """
    text = find_manifest(here)
    found = set() if text is None else {Manifest.from_bytes(text, here.url).save_id}
    listed = list(here.list(MARKS))
    if any(is_claim(info.name) and not is_before(info, before) for info in listed):
        return None
    marks = [info.name for info in listed]
    own = names_of(here)
    for manifest in dependents(here, marks).values():
        found |= {file.save_id for file in manifest.borrowed if file.source in own}
    return found
