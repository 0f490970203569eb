"""The newest checkpoint of a directory that is intact, whatever its name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dtckpt.errors import Corrupt, NotCommitted
from dtckpt.logs import logger_of

from ..checkpoint import verify
from ..checkpoint.files.foreign import check_first_start, listed_only, newer_of_other_names
from ..checkpoint.files.manifest import Manifest, read_manifest_bytes
from ..checkpoint.files.places import MANIFEST
from ..checkpoint.manager.deciding import Tick, decided
from ..checkpoint.steps import check_whole
from ..storage.base import Store
from ..storage.open import open_store, split_target

logger = logger_of("checkpoint")


def newest(
    root: str | os.PathLike[str],
    *,
    by: str = "global_step",
    read: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the path or URL of the newest intact checkpoint directly under a root.

    Newest is the highest ``by`` of its metadata, then what was made last. Damaged ones are passed
    over with a warning; ``read=False`` looks at manifests and sizes only and reads no data. None
    where nothing is there, Corrupt where something is, and nothing of it intact, and NotCommitted
    where there is none, but something that looks like a checkpoint (further down, ``root`` itself,
    of other programs): a training is never begun anew for that.

    Within a process group all ranks call this, the first one looks, and all get its answer.
    """
    base, options = split_target(root, dict(storage_options or {}))

    def look(tick: Tick) -> bytes:
        return _newest(open_store(base, **options), by, read, tick).encode()

    name = decided({}, "newest", base, look).decode()
    return f"{base.rstrip('/')}/{name}" if name else None


def _newest(store: Store, by: str, read: bool, tick: Tick) -> str:
    found: list[tuple[float, str, str]] = []
    faults: list[str] = []
    folders = set(store.level().folders)
    for name in folders:
        place = store.substore(name)
        try:
            manifest = Manifest.from_bytes(read_manifest_bytes(place), f"{place.url}/{MANIFEST}")
        except NotCommitted:
            continue
        except Corrupt as error:
            logger.warning("passing over %s: %s", place.url, error)
            faults.append(str(error))
            continue
        told = manifest.metadata
        number = told.get(by) if isinstance(told, dict) else None  # pyright: ignore
        order = float(number) if isinstance(number, int | float) else -1.0
        found.append((order, manifest.created, name))
        tick()
    for _, _, name in sorted(found, reverse=True):
        place = store.substore(name)
        try:
            check_whole(place)
            if read:
                _verify(place, tick)
        except (Corrupt, NotCommitted) as error:
            logger.warning("passing over %s: %s", place.url, error)
            faults.append(str(error))
        else:
            _warn_of_newer(store, folders - {name for *_, name in found}, name)
            return name
    if faults:
        raise Corrupt(f"{store.url}: none of the checkpoints here is intact: {faults[0]}")
    if listed := check_first_start(store, any_name=True):
        raise listed_only(store.url, min(listed))
    return ""


def _warn_of_newer(store: Store, others: set[str], name: str) -> None:
    """Warn of what other programs have saved with a higher number than the one that is taken."""
    number = re.search(r"\d+$", name)
    newer = newer_of_other_names(store, others, int(number[0])) if number else []
    newer = [other for other in newer if not store.exists(f"{other}/{MANIFEST}")]  # damaged: told
    if newer:
        logger.warning(
            "%s: going on from %s, though %s is here as well, which is of another program",
            store.url,
            name,
            newer[0],
        )


def _verify(place: Store, tick: Tick) -> None:
    problems = verify(place, on_progress=lambda _, __: tick()).problems
    if problems:
        raise Corrupt(problems[0].message)
