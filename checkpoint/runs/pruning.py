"""What people do to the checkpoints of a run by hand: keep some for good, remove others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt, InUse, NotCommitted

from ...storage.base import Store
from ...storage.open import open_store
from ..files.borrowing import refuse_if_needed
from ..files.manifest import OURS
from ..formats.opening import read_manifest
from .keep import Keep
from .overview import look_over, names_of_steps, no_run
from .run import PIN, Run
from .upkeep import Upkeep

_STEP = re.compile(r"(.*?)(?:0|[1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What pruning a run has done, or would do. Names are those of directories."""

    gone: tuple[str, ...]
    kept: tuple[str, ...]
    needed: Mapping[str, tuple[str, ...]]
    """Of ``kept``, what need not stay, and those that refer to its files."""
    refused: Mapping[str, str]
    """Of ``kept``, what could not be deleted, and why."""


def prune(
    root: str | os.PathLike[str] | Store,
    keep: Keep,
    *,
    prefix: str | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruned:
    """Delete the checkpoints of a run that need not stay by ``keep``; one process calls this.

    As ``CheckpointManager`` does it: the newest one that is whole, those that are pinned and those
    to whose files others refer stay, and so does what is newer and damaged. Checkpoints are called
    ``{prefix}{step}``; without a prefix that of the directories that are there. With ``dry_run``
    nothing is deleted.

    Raises NotCommitted where no checkpoint is whole, ValueError where directories have several
    prefixes and none is given, and StorageError where ``root`` cannot be looked at.
    """
    store = open_store(root, **dict(storage_options or {}))
    run = Run(store, _prefix_of(store) if prefix is None else prefix)
    choice = Upkeep(run=run, keep=keep, leftovers_after=timedelta.max).choose(may_write=not dry_run)
    if choice is None:
        if not names_of_steps(store.level()):
            raise no_run(store)
        if any(step.format not in ("", OURS) for step in look_over(store)):
            raise NotCommitted(
                f"{store.url}: the checkpoints here are of other programs, of which dtckpt deletes "
                "nothing. Remove them as other files"
            )
        raise NotCommitted(
            f"{store.url}: no checkpoint here is whole, so nothing is pruned. dtckpt ls lists them"
        )
    gone: list[str] = []
    refused: dict[str, str] = {}
    for name in choice.free:
        try:
            if not dry_run:
                run.delete(name)
        except (InUse, Corrupt) as error:
            refused[name] = str(error)
        else:
            gone.append(name)
    kept = [step.name for step in run.look().steps if step.name not in gone]
    return Pruned(gone=tuple(gone), kept=tuple(kept), needed=choice.lent, refused=refused)


def pin(
    root: str | os.PathLike[str] | Store,
    name: str,
    *,
    is_pinned: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Keep a checkpoint of a run whatever its rules say, or no longer do.

    ``name`` is that of its directory under ``root``. A mark is left beside it, which
    ``CheckpointManager``, ``prune`` and ``remove`` heed. Raises NotCommitted where there is no
    checkpoint, nor a pin that is to go.
    """
    run = Run(open_store(root, **dict(storage_options or {})))
    if is_pinned or not run.store.exists(name + PIN):
        read_manifest(run.store.substore(name))
    run.mark(name, PIN, is_set=is_pinned)


def remove(
    root: str | os.PathLike[str] | Store,
    name: str,
    *,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a checkpoint, and what a run keeps beside it; one process calls this.

    ``name`` is that of its directory under ``root``. Raises NotCommitted where there is none, InUse
    where it is pinned or others refer to its files, and CheckpointError where another program saved
    it; the same, and nothing else, with ``dry_run``.
    """
    run = Run(open_store(root, **dict(storage_options or {})))
    place = run.store.substore(name)
    try:
        manifest = read_manifest(place)
    except Corrupt as error:
        error.add_note("What it refers to cannot be told, so it stays. Remove it as other files")
        raise
    if not manifest.is_ours:
        raise CheckpointError(
            f"{place.url} is of {manifest.format}, of which dtckpt deletes nothing. Remove it as "
            "other files"
        )
    if any(info.name == name + PIN for info in run.store.level().objects):
        raise InUse(f"{place.url} is pinned, so it stays. dtckpt pin --remove takes the pin away")
    refuse_if_needed(place, "deleted", manifest.save_id)
    if not dry_run:
        run.delete(name)


def _prefix_of(store: Store) -> str:
    """Return what precedes the number in the names of the directories that are there."""
    matches = map(_STEP.fullmatch, store.level().folders)
    found = sorted({match[1] for match in matches if match is not None})
    if len(found) > 1:
        raise ValueError(
            f"{store.url}: the names of directories begin in several ways "
            f"({', '.join(map(repr, found))}); say which is meant by a prefix"
        )
    return found[0] if found else "step-"
