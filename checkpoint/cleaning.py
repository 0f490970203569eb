"""Taking away what killed saves and deletions have left, and nothing that may still be needed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from dtckpt.errors import CheckpointError
from dtckpt.logs import logger_of

from ..storage.base import ObjectInfo, Store, is_before
from ..storage.open import open_store
from .borrowing import MARKS, RECORDS, dependents, is_claim, name_of
from .committing import find_manifest
from .deleting import finish_deletions
from .manifest import Manifest

logger = logger_of("checkpoint")

# As exact as names are written: files of other programs may be called much the same.
_DATA = re.compile(r"(?:(.+)/)?data/([0-9a-f]{16})/\d{5,}\.safetensors")
_OTHER = re.compile(rf"(?:(.+)/)?(?:{MARKS}/[^/]+|{RECORDS}/[0-9a-f]{{16}}/[^/]+)")


def clean(
    root: str | os.PathLike[str] | Store,
    *,
    older_than: timedelta = timedelta(days=1),
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Delete what saves and deletions that were killed have left; return the names of it.

    ``root`` is a checkpoint or a directory of any number of them; one process calls this. Taken
    away are data files that no manifest names, unfinished files and uploads in parts, claims on
    earlier checkpoints, and what an interrupted ``delete`` had still to do. Of all these only what
    has not been written to for ``older_than``: choose it longer than any save takes from the first
    file that a rank has finished to its end, and longer than clocks differ. A save of which
    nothing is younger is taken for dead, and fails if it is not. What a store gives no times for is
    left alone, and so is everything where a manifest cannot be read.

    Committed checkpoints are never touched.
    """
    store = open_store(root, **dict(storage_options or {}))
    before = time.time() - older_than.total_seconds()
    objects = list(store.list())
    gone: list[str] = []
    for place in sorted(_places(objects)):
        start = f"{place}/" if place else ""
        below = {i.name[len(start) :]: i for i in objects if i.name.startswith(start)}
        here = store.substore(place) if place else store
        try:
            for dead in _dead_names(here, below, before):
                names = [f"{start}{name}" for name in dead]
                store.delete(names)
                gone += names
        except CheckpointError as error:
            logger.warning("%s: not cleaned: %s", here.url, error)
    unfinished = list(store.leftovers(before=before))
    store.delete(unfinished)
    return gone + unfinished


def _places(objects: Iterable[ObjectInfo]) -> set[str]:
    """Return where checkpoints are, or have been begun."""
    matches = (_DATA.fullmatch(info.name) or _OTHER.fullmatch(info.name) for info in objects)
    return {match[1] or "" for match in matches if match}


def _dead_names(
    here: Store, objects: Mapping[str, ObjectInfo], before: float
) -> Iterator[list[str]]:
    """Yield what is to go from one place, of which ``objects`` is a listing, in this order."""
    if any(name.startswith(f"{RECORDS}/") for name in objects):
        finish_deletions(here, before=before)
    marks = [name for name in objects if name.startswith(f"{MARKS}/")]
    claims = [name for name in marks if is_claim(name)]
    old_claims = [name for name in claims if is_before(objects[name], before)]
    yield old_claims
    needed = _needed(here, before)
    if needed is None:
        return
    saves: dict[str, list[ObjectInfo]] = {}
    for name, info in objects.items():
        match = _DATA.fullmatch(name)
        if match and not match[1] and match[2] not in needed:
            saves.setdefault(match[2], []).append(info)
    dead = [save_id for save_id, f in saves.items() if all(is_before(i, before) for i in f)]
    yield [n for n in objects if (m := _DATA.fullmatch(n)) and not m[1] and m[2] in dead]


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
    own = name_of(here)
    for manifest in dependents(here, marks).values():
        found |= {file.save_id for file in manifest.borrowed if file.source == own}
    return found
