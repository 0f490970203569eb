"""Copying a run: its checkpoints in an order in which each loads, and what is beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dtckpt.errors import AlreadyCommitted, NotCommitted, ObjectExists

from ...storage.base import Store
from ...storage.open import open_store
from ..copying import copy
from ..files.committing import find_manifest
from ..files.manifest import Manifest, read_own_manifest
from ..files.places import record_path
from ..reading.batches import counted
from ..steps import committed_steps
from .run import ABANDONED, PIN, bases_of


def copy_run(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Copy the committed checkpoints directly under ``source``; return the names of those copied.

    Each as by ``copy``, those to which others refer first, with their pins, marks and records. What
    is at the target already is left alone, so that a second call goes on where the first one ended,
    or brings what was saved since. One process calls this.

    Raises what ``copy`` raises, AlreadyCommitted where another checkpoint of the same name is at
    the target, and NotCommitted where there are no checkpoints at the source.
    """
    old = open_store(source, **dict(source_options or {}))
    new = open_store(target, **dict(target_options or {}))
    manifests = {
        step.name: read_own_manifest(old.substore(step.name)) for step in committed_steps(old)
    }
    if not manifests:
        raise NotCommitted(f"{old.url}: no committed checkpoints are directly under this place")
    missing = [name for name in _in_order(manifests) if not _is_there(new, name, manifests[name])]
    total = sum(record.size for name in missing for record in manifests[name].files)
    add = counted(on_progress, total)
    beside = {info.name for info in old.level().objects}
    for name in manifests:  # marks first: none is to be live, or to go, for lack of its mark
        _copy_beside(old, new, (name + PIN, name + ABANDONED), beside)
    for name in missing:
        done = 0

        def on_bytes(num_bytes: int, _total: int) -> None:
            nonlocal done
            add(num_bytes - done)
            done = num_bytes

        copy(old.substore(name), new.substore(name), on_progress=on_bytes)
        _copy_beside(old, new, (record_path(name),), beside)
    return missing


def _in_order(manifests: Mapping[str, Manifest]) -> Sequence[str]:
    """Return names such that what a checkpoint refers to comes before it."""
    order: dict[str, None] = {}

    def add(name: str) -> None:
        if name in order or name not in manifests:
            return
        for base in bases_of(manifests[name]):
            add(base)
        order[name] = None

    for name in manifests:
        add(name)
    return list(order)


def _is_there(new: Store, name: str, manifest: Manifest) -> bool:
    place = new.substore(name)
    text = find_manifest(place)
    if text is None:
        return False
    if Manifest.from_bytes(text, place.url).save_id != manifest.save_id:
        raise AlreadyCommitted(
            f"{place.url}: another checkpoint is here, of the save "
            f"{Manifest.from_bytes(text, place.url).save_id}. Give another target, or remove it"
        )
    return True


def _copy_beside(old: Store, new: Store, names: Sequence[str], beside: Collection[str]) -> None:
    """Copy the small objects that are there, as far as the target has none of that name."""
    for name in names:
        if name in beside:
            with suppress(ObjectExists):
                new.publish(name, old.read(name), overwrite=False)
