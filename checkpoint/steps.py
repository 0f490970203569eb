"""Finding the newest committed checkpoint of a run, laid out as ``root/step-N``."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dtckpt.errors import (
    AlreadyCommitted,
    Corrupt,
    LayoutMismatch,
    NotCommitted,
)
from dtckpt.logs import logger_of

from ..storage.base import Level, Store
from ..storage.open import open_store
from .files.committing import missing_files
from .files.foreign import check_first_start, listed_only
from .files.manifest import Manifest, read_manifest_bytes
from .files.places import MANIFEST, record_path
from .formats.opening import read_manifest
from .ranks.text import ranks_text, some_names

logger = logger_of("checkpoint")

STEP_NAME = re.compile(r"(?:.*\D)?(\d+)")
"""What checkpoints of a run are called: anything that ends in a number."""
_NUM_REQUESTS = 16


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A committed checkpoint under a root."""

    number: int
    """The number that ends the directory's name."""
    name: str
    """The directory's name under the root."""
    url: str
    """Where it is, for ``load``."""


def committed_steps(
    root: str | os.PathLike[str] | Store, *, storage_options: Mapping[str, Any] | None = None
) -> list[Step]:
    """Return every checkpoint directly under ``root`` whose manifest is there, oldest first.

    Directories are numbered by the digits that end their names (``step-1000``); others are passed
    over. Half-written checkpoints have no manifest and are not listed. Costs one listing of one
    level, whatever the checkpoints hold, and a request for each that has no record beside it
    (``step-1000.json``, which ``CheckpointManager`` leaves once a checkpoint is committed).

    Where there is none, but something that looks like a checkpoint (of another name, further down,
    ``root`` itself, of other programs), NotCommitted names it; other things are warned of.
    StorageError where ``root`` cannot be looked at.
    """
    store = open_store(root, **dict(storage_options or {}))
    level = store.level()
    committed = _committed_in(store, level) or check_first_start(store)
    return _steps(store, committed)


def steps_of_level(store: Store) -> list[Step]:
    """Return what ``committed_steps`` does, of one level alone: what else is there is not told.

    For those who only look. To who goes on with a run, nothing found may be a mistake.
    """
    return _steps(store, _committed_in(store, store.level()))


def refuse_others(store: Store) -> None:
    """Raise AlreadyCommitted where a run is, or a checkpoint of another program.

    A checkpoint that is written there would lie between what there is already. One of ours is
    ``check_free``'s business.
    """
    steps = steps_of_level(store)
    if steps:
        raise AlreadyCommitted(
            f"{store.url}: this is a directory of checkpoints, with "
            f"{some_names([step.name for step in steps])}. Give the path of a new one in it"
        )
    try:
        found = read_manifest(store)
    except (NotCommitted, Corrupt):
        return
    if not found.is_ours:
        raise AlreadyCommitted(
            f"{store.url}: a checkpoint of {found.format} is here. Choose another path"
        )


def _committed_in(store: Store, level: Level) -> set[str]:
    names = [name for name in level.folders if STEP_NAME.fullmatch(name)]
    return committed_among(store, names, {info.name for info in level.objects})


def _steps(store: Store, names: Iterable[str]) -> list[Step]:
    found = ((STEP_NAME.fullmatch(name), name) for name in names)
    return sorted(Step(int(m[1]), name, store.substore(name).url) for m, name in found if m)


def committed_among(store: Store, names: Sequence[str], beside: Container[str]) -> set[str]:
    """Return which of the directories in ``store`` are committed checkpoints.

    ``beside`` are the objects of the same level; what has no record there is asked for its
    manifest, several at a time.
    """
    unknown = [name for name in names if record_path(name) not in beside]
    if not unknown:
        return set(names)
    manifests = [f"{name}/{MANIFEST}" for name in unknown]
    with ThreadPoolExecutor(min(_NUM_REQUESTS, len(unknown)), "dtckpt-steps") as pool:
        are_there = list(pool.map(store.exists, manifests))
    gone = {name for name, is_there in zip(unknown, are_there, strict=True) if not is_there}
    return set(names) - gone


def latest(
    root: str | os.PathLike[str] | Store,
    *,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: timedelta | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Step | None:
    """Return the newest committed checkpoint under ``root``, or None if nothing is there.

    Every rank of ``process_group`` calls this, with the same root, and gets the answer of the first
    one; LayoutMismatch where ranks have given different ones. A rank that
    shows no sign of life for ``timeout``, by default that of ``load``, is given up. A checkpoint
    with a damaged manifest, or of which a data file is missing, is passed over with a warning; one
    of a newer format raises, so that a run is not continued from an older step by mistake.

    None is only for a root that could be looked at: else StorageError. Corrupt where there are
    checkpoints and none is whole. Other things that are there are told as by ``committed_steps``.
    """
    from .ranks.together import DEFAULT_TIMEOUT, closing, ranks_of, together  # loads torch

    ranks = ranks_of(
        process_group,
        no_dist=no_dist,
        timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
        purpose="latest",
        target=root,
    )
    opened: list[Store] = []

    def open_root() -> bytes:
        opened.append(open_store(root, **dict(storage_options or {})))
        return opened[0].url.encode()

    def find(urls: Mapping[int, bytes]) -> bytes:
        check_same_root(urls)
        found = newest_whole(opened[0])
        return found.name.encode() if found else b""

    with closing(ranks):
        name = together(ranks, "latest", open_root, find).decode()
    if not name:
        return None
    match = STEP_NAME.fullmatch(name)
    return Step(int(match[1]) if match else 0, name, opened[0].substore(name).url)


def check_same_root(urls: Mapping[int, bytes]) -> None:
    """Raise LayoutMismatch where ranks were asked for the checkpoints of different roots."""
    first_rank, first = next(iter(urls.items()))
    others = [rank for rank, url in urls.items() if url != first]
    if others:
        raise LayoutMismatch(
            f"the ranks were not given the same root: {ranks_text(others)} another one "
            f"({urls[others[0]].decode()!r}) than rank {first_rank}, which has {first.decode()!r}. "
            "Give it to all alike"
        )


def newest_whole(store: Store) -> Step | None:
    """Return the newest checkpoint whose manifest is intact and whose data files are all there.

    Corrupt where there are checkpoints, but none that is whole; StorageError where all that are
    listed are gone.
    """
    gone: set[str] = set()
    while True:
        damaged: list[str] = []
        steps = committed_steps(store)
        for step in reversed(steps):
            try:
                check_whole(store.substore(step.name))
            except NotCommitted as error:
                logger.warning("passing over %s: %s", step.url, error)
                if step.name not in gone:  # deleted since it was listed: others may have come
                    gone.add(step.name)
                    break
            except Corrupt as error:
                logger.warning("passing over %s: %s", step.url, error)
                damaged.append(str(error))
            else:
                return step
        else:
            break
    if damaged:
        raise Corrupt(
            f"{store.url}: none of the checkpoints here is whole; the newest: {damaged[0]}"
        )
    if steps:
        raise listed_only(store.url, steps[-1].name)
    return None


def check_whole(place: Store) -> None:
    """Raise Corrupt if the manifest is damaged or a data file is not there with its size."""
    before = b""
    missing: list[str] = []
    while (text := read_manifest_bytes(place)) != before:  # replaced meanwhile: look at the new one
        missing = missing_files(place, Manifest.from_bytes(text, f"{place.url}/{MANIFEST}"))
        if not missing:
            return
        before = text
    raise Corrupt(f"{missing[0]} is missing or has another size. Load another checkpoint")
