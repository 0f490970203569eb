"""What people do to the checkpoints of a run by hand: keep some for good, remove others."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from graphlib import TopologicalSorter
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt, InUse, NotCommitted

from ...storage.base import Store
from ...storage.open import open_store
from ..files.borrowing import refuse_if_needed
from ..files.manifest import OURS, Manifest
from ..formats.opening import read_manifest
from .keep import Keep
from .overview import look_over, names_of_steps, no_run
from .run import PIN, Run, bases_of
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
            if dry_run:
                with suppress(NotCommitted):  # somebody else has deleted it
                    _check_removal(run, name, choice.free)
            else:
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
    *names: str,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete checkpoints, and what a run keeps beside them; one process calls this.

    ``names`` are those of their directories under ``root``; those that refer to the files of others
    go before these. Raises NotCommitted where there is none, InUse where one is pinned or others,
    which are to stay, refer to its files, and CheckpointError where another program saved it, and
    nothing is deleted then; the same, and nothing else, with ``dry_run``.
    """
    run = Run(open_store(root, **dict(storage_options or {})))
    pinned = {info.name for info in run.store.level().objects}.intersection(n + PIN for n in names)
    if pinned:
        place = run.store.substore(min(pinned).removesuffix(PIN))
        raise InUse(f"{place.url} is pinned, so it stays. dtckpt pin --remove takes the pin away")
    going = TopologicalSorter[str](dict.fromkeys(names, ()))
    for name in dict.fromkeys(names):
        for base in bases_of(_check_removal(run, name, names)):
            going.add(base, name)
    order = [name for name in going.static_order() if name in names]
    if not dry_run:
        for name in order:
            run.delete(name)


def _check_removal(run: Run, name: str, going: Collection[str]) -> Manifest:
    """Raise what forbids to delete a checkpoint, with others; else return its manifest."""
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
    refuse_if_needed(place, "deleted", manifest.save_id, besides=going)
    return manifest


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
