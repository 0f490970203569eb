"""The newest checkpoint of a directory that is intact, whatever its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dtckpt.errors import Corrupt, NotCommitted
from dtckpt.logs import logger_of

from ..checkpoint import verify
from ..checkpoint.files.committing import missing_files
from ..checkpoint.files.manifest import Manifest, read_manifest_bytes
from ..checkpoint.files.places import MANIFEST
from ..checkpoint.ranks.together import closing, ranks_of, together
from ..storage.base import Store
from ..storage.open import open_store

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
    where nothing is there, and Corrupt where something is, and nothing of it intact: a training is
    never begun anew for that.

    Within a process group all ranks call this, the first one looks, and all get its answer.
    """
    options = dict(storage_options or {})
    ranks = ranks_of(purpose="newest")

    def find(_: object) -> bytes:
        store = open_store(root, **options)
        name = _newest(store, by, _faults_of_bytes if read else _faults_of_sizes)
        return name.encode()

    with closing(ranks):
        name = together(ranks, "newest", lambda: b"", find).decode()
    if not name:
        return None
    base = os.fspath(root)
    return f"{base.rstrip('/')}/{name}"


def _newest(store: Store, by: str, faults_of: Any) -> str:
    found: list[tuple[float, str, str]] = []
    faults: list[str] = []
    for info in store.list():
        name, _, rest = info.name.partition("/")
        if rest == MANIFEST:
            try:
                text = read_manifest_bytes(store.substore(name))
                manifest = Manifest.from_bytes(text, f"{store.url}/{name}/{MANIFEST}")
            except NotCommitted:  # deleted since it was listed
                continue
            except Corrupt as error:
                logger.warning("passing over %s/%s: %s", store.url, name, error)
                faults.append(str(error))
                continue
            told = manifest.metadata
            number = told.get(by) if isinstance(told, dict) else None  # pyright: ignore
            order = float(number) if isinstance(number, int | float) else -1.0
            found.append((order, manifest.created, name))
    for _, _, name in sorted(found, reverse=True):
        fault = faults_of(store.substore(name))
        if not fault:
            return name
        logger.warning("passing over %s/%s: %s", store.url, name, fault)
        faults.append(fault)
    if faults:
        raise Corrupt(f"{store.url}: none of the checkpoints here is intact: {faults[0]}")
    return ""


def _faults_of_bytes(store: Store) -> str:
    problems = verify(store).problems
    return problems[0].message if problems else ""


def _faults_of_sizes(store: Store) -> str:
    text = read_manifest_bytes(store)
    missing = missing_files(store, Manifest.from_bytes(text, f"{store.url}/{MANIFEST}"))
    return f"{missing[0]} is missing or has another size" if missing else ""
