"""Copying a run: its checkpoints in an order in which each loads, and what is beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dtckpt.errors import AlreadyCommitted, CheckpointError, Corrupt, NotCommitted, ObjectExists

from ...storage.base import Store
from ...storage.open import open_store
from ..copying import bytes_to_copy, copy
from ..files.committing import find_manifest
from ..files.manifest import Manifest, read_own_manifest
from ..files.places import MANIFEST, record_path
from ..reading.batches import counted
from ..steps import committed_steps
from .run import ABANDONED, PIN, bases_of


def copy_run(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    verify: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Copy the committed checkpoints directly under ``source``; return the names of those copied.

    Each as by ``copy``, those to which others refer first, with their pins, marks and records. What
    is at the target already is left alone, so that a second call goes on where the first one ended,
    or brings what was saved since. What is deleted meanwhile is left out. One process calls this.

    Raises what ``copy`` raises, AlreadyCommitted where another checkpoint of the same name is at
    the target, or one that was edited since it was copied, or the target is a checkpoint itself;
    Corrupt where some are damaged, after the others were copied; and NotCommitted where there are
    no checkpoints at the source.
    """
    old = open_store(source, **dict(source_options or {}))
    new = open_store(target, **dict(target_options or {}))
    damaged: dict[str, Corrupt] = {}
    manifests = dict(_manifests(old, damaged))
    if not manifests and not damaged:
        raise NotCommitted(f"{old.url}: no committed checkpoints are directly under this place")
    if new.exists(MANIFEST):
        raise AlreadyCommitted(
            f"{new.url}: a checkpoint is here, and a run is a directory of them. Give another "
            "target, such as the directory above it"
        )
    missing = [name for name in _in_order(manifests) if not _is_there(new, name, manifests[name])]
    add = counted(on_progress, sum(bytes_to_copy(manifests[n], verify=verify) for n in missing))
    beside = {info.name for info in old.level().objects}
    for name in manifests:  # marks first: none is to be live, or to go, for lack of its mark
        _copy_beside(old, new, (name + PIN, name + ABANDONED), beside)
        if name not in missing:  # a call that was killed may not have come to it
            _copy_beside(old, new, (record_path(name),), beside)
    copied: list[str] = []
    left_out = set(damaged)
    for name in missing:
        done = 0

        def on_bytes(num_bytes: int, _total: int) -> None:
            nonlocal done
            add(num_bytes - done)
            done = num_bytes

        if not left_out.isdisjoint(bases_of(manifests[name])):  # it would not load without
            left_out.add(name)
            continue
        try:
            copy(old.substore(name), new.substore(name), verify=verify, on_progress=on_bytes)
        except Corrupt as error:
            damaged[name] = error
            left_out.add(name)
        except CheckpointError:
            if find_manifest(old.substore(name)) is not None:
                raise
        else:
            _copy_beside(old, new, (record_path(name),), beside)
            copied.append(name)
    if damaged:
        raise Corrupt(
            f"{old.url}: all is copied but what is damaged, {', '.join(damaged)}, and refers to "
            f"that: {next(iter(damaged.values()))}"
        )
    return copied


def _manifests(old: Store, damaged: dict[str, Corrupt]) -> Iterator[tuple[str, Manifest]]:
    """Yield those of committed checkpoints by name; note the damaged ones."""
    for step in committed_steps(old):
        try:
            yield step.name, read_own_manifest(old.substore(step.name))
        except NotCommitted:
            continue  # deleted since it was listed
        except Corrupt as error:
            damaged[step.name] = error


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
    found = Manifest.from_bytes(text, place.url)
    if found.save_id != manifest.save_id:
        raise AlreadyCommitted(
            f"{place.url}: another checkpoint is here, of the save {found.save_id}. Give another "
            "target, or remove it"
        )
    if found.to_bytes() != manifest.to_bytes():
        raise AlreadyCommitted(
            f"{place.url}: a copy is here, and it or what it is of was edited since. Remove it to "
            "have it copied anew, or give another target"
        )
    return True


def _copy_beside(old: Store, new: Store, names: Sequence[str], beside: Collection[str]) -> None:
    """Copy the small objects that are there, as far as the target has none of that name."""
    for name in names:
        if name in beside:
            with suppress(ObjectExists):
                new.publish(name, old.read(name), overwrite=False)
