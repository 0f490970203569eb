"""From a path or URL to the store that serves it."""

from __future__ import annotations

import os
import re

from .base import Store
from .local import LocalStore

__all__ = ["open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(target: str | os.PathLike[str] | Store, **options: object) -> Store:
    """The store rooted at ``target``.

    A path or ``file://`` URL gives a ``LocalStore``, any other ``scheme://`` a ``FsspecStore`` with
    ``options`` handed to its driver; a ``Store`` is returned as it is. ``TypeError`` for options
    that the target does not take, ``ValueError`` for a URL that cannot be a root, ``StorageError``
    if its driver is not installed.
    """
    if isinstance(target, Store):
        _refuse(options, "a store that is open")
        return target
    path = os.fspath(target)
    match = _SCHEME.match(path)
    if match is None:
        if "::" in path and "://" in path:
            raise ValueError(f"chained URLs cannot be opened as a store: {path.split('://')[0]}...")
        _refuse(options, "a local path")
        return LocalStore(path)
    if match[1].lower() in ("file", "local"):
        _refuse(options, "a local path")
        return LocalStore(_local_path(path[match.end() :]))
    from .fsspec_store import FsspecStore

    return FsspecStore(path, **options)


def _local_path(rest: str) -> str:
    """The path in a file URL, whose host may only be empty or localhost."""
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"bad file URL file://{rest}: expected file:///absolute/path")
    return path


def _refuse(options: dict[str, object], what: str) -> None:
    if options:
        raise TypeError(f"{what} takes no options, got {', '.join(sorted(options))}")
