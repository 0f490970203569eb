"""What lies in the directory of a run: checkpoints with their state, size, age and references."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, ObjectNotFound, StorageError

from ...storage.base import Level, Store
from ...storage.open import open_store
from ..files.committing import missing_files
from ..files.foreign import is_begun
from ..files.manifest import Manifest
from ..files.places import MANIFEST
from ..formats.opening import read_manifest
from ..steps import STEP_NAME
from .run import ABANDONED, PIN, bases_of

State = Literal["committed", "incomplete", "damaged"]

_NUM_REQUESTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverview:
    """One directory of a run whose name ends in a number."""

    number: int
    name: str
    url: str
    state: State
    """"incomplete" is a save under way or one that died; "damaged" one that was committed, but of
    which the manifest cannot be read, or a data file is missing or has another size."""
    problem: str = ""
    """Of what is damaged."""
    format: str = ""
    """Who wrote it: "dtckpt", or the name of another format; empty of what is not committed."""
    saved_at: float | None = None
    """Seconds since 1970 by the clock of the store; of what is incomplete, when it was last written
    to. None where the store tells no times."""
    num_tensors: int = 0
    tensor_bytes: int = 0
    """Of tensors as they are in memory, wherever they are stored; of what is committed."""
    own_bytes: int = 0
    """Of its files; of what is incomplete, so far."""
    borrowed_bytes: int = 0
    """Of files of earlier checkpoints to which it refers."""
    bases: tuple[str, ...] = ()
    """Names of those."""
    needed_by: tuple[str, ...] = ()
    """Names of checkpoints that refer to its files."""
    is_pinned: bool = False
    is_abandoned: bool = False
    """Whether the run has gone back to an earlier one and on from there."""


def look_over(
    root: str | os.PathLike[str] | Store, *, storage_options: Mapping[str, Any] | None = None
) -> tuple[StepOverview, ...]:
    """Return what is directly under ``root``, by number; nothing if no name there ends in one.

    Checkpoints of other programs are told, too. Costs one listing of one level, and for each
    checkpoint its manifest and a listing, several at a time. Data files are not read: ``verify``
    does that. StorageError where ``root`` cannot be looked at.
    """
    store = open_store(root, **dict(storage_options or {}))
    level = store.level()
    names = names_of_steps(level)
    if not names:
        return ()
    with ThreadPoolExecutor(min(_NUM_REQUESTS, len(names)), "dtckpt-overview") as pool:
        found = list(pool.map(partial(look_at, store, level), names))
    return with_dependents(step for step in found if step is not None)


def no_run(store: Store) -> NotCommitted:
    """Return the error for a place without any step, which says what is there instead.

    Raises it where that is a checkpoint itself, which no run will ever be.
    """
    try:
        format = read_manifest(store).format
    except NotCommitted as error:
        return error
    raise NotCommitted(
        f"{store.url} is a checkpoint itself ({format}), not a directory of them: dtckpt inspect "
        "shows it"
    )


def names_of_steps(level: Level) -> list[str]:
    """Return the directories of a listing that may be checkpoints of a run."""
    return [name for name in level.folders if STEP_NAME.fullmatch(name)]


def with_dependents(steps: Iterable[StepOverview]) -> tuple[StepOverview, ...]:
    """Return checkpoints by number, each with the names of those that refer to it."""
    found = sorted(steps, key=lambda step: (step.number, step.name))
    needed_by: dict[str, list[str]] = {}
    for step in found:
        for base in step.bases:
            needed_by.setdefault(base, []).append(step.name)
    return tuple(replace(step, needed_by=tuple(needed_by.get(step.name, ()))) for step in found)


def marked(step: StepOverview, level: Level) -> StepOverview:
    """Return a checkpoint with the marks that lie beside it."""
    beside = {info.name for info in level.objects}
    return replace(
        step, is_pinned=step.name + PIN in beside, is_abandoned=step.name + ABANDONED in beside
    )


def look_at(store: Store, level: Level, name: str) -> StepOverview | None:
    """Return what one directory of a listing holds; None where nobody has begun a checkpoint."""
    match = STEP_NAME.fullmatch(name)
    if match is None:
        return None
    place = store.substore(name)
    step = marked(
        StepOverview(number=int(match[1]), name=name, url=place.url, state="incomplete"), level
    )
    try:
        manifest = read_manifest(place)
        missing = missing_files(place, manifest) if manifest.is_ours else []
        saved_at = _saved_at(place, manifest)
    except (NotCommitted, ObjectNotFound):  # the latter where it is deleted meanwhile
        return _with_files(step, place) if is_begun(place.level()) else None
    except StorageError:
        raise
    except CheckpointError as error:
        what = str(error) if isinstance(error, Corrupt) else f"it cannot be read: {error}"
        return _with_files(replace(step, state="damaged", problem=what), place)
    return replace(
        step,
        state="damaged" if missing else "committed",
        problem=f"missing, or of another size: {', '.join(missing)}" if missing else "",
        format="dtckpt" if manifest.is_ours else manifest.format,
        saved_at=saved_at,
        num_tensors=len(manifest.tensors),
        tensor_bytes=sum(tensor.stored_bytes for tensor in manifest.tensors.values()),
        own_bytes=sum(record.size for record in manifest.files),
        borrowed_bytes=sum(file.record.size for file in manifest.borrowed),
        bases=bases_of(manifest),
    )


def _saved_at(place: Store, manifest: Manifest) -> float | None:
    """Return when a checkpoint was committed; of another program's when it was last written to."""
    if manifest.is_ours:
        return place.stat(MANIFEST).modified
    times = (info.modified for info in place.list() if info.modified is not None)
    return max(times, default=None)


def _with_files(step: StepOverview, place: Store) -> StepOverview:
    """Return a step with the size and the age of what lies there."""
    objects = [*place.list(), *place.underway()]
    times = [info.modified for info in objects if info.modified is not None]
    return replace(
        step,
        own_bytes=sum(info.size for info in objects),
        saved_at=max(times, default=None),
    )
