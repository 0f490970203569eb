"""From a path or URL to the store that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from .base import Store
from .local.store import LocalStore
from .schemes import Opener, opener_of

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(target: str | os.PathLike[str] | Store, **options: object) -> Store:
    """The store rooted at ``target``.

    A path or ``file://`` URL gives a ``LocalStore``, which takes ``direct_io``, ``peers://job`` a
    ``PeersStore``, a scheme that was registered (``register_scheme``) what its opener makes, any
    other ``scheme://`` a ``FsspecStore`` with ``options`` handed to its driver, or an
    ``ObstoreStore`` with ``engine="obstore"``; a ``Store`` is returned as it is. ``TypeError`` for
    options that the target does not take, ``ValueError`` for a URL that cannot be a root,
    ``StorageError`` if its driver is not installed.
    """
    if isinstance(target, Store):
        _refuse(options, "a store that is open")
        return target
    path = os.fspath(target)
    if not path:
        raise ValueError("the path of a store is empty; the current directory is '.'")
    match = _SCHEME.match(path)
    if match is None:
        if "::" in path and "://" in path:
            raise ValueError(f"chained URLs cannot be opened as a store: {path.split('://')[0]}...")
        return _local(path, options)
    scheme = match[1].lower()
    path = scheme + path[match.end(1) :]
    if (opener := opener_of(scheme)) is not None:
        return _opened(opener, path, options)
    if scheme in ("file", "local"):
        return _local(_local_path(path[match.end() :]), options)
    if scheme == "peers":
        return _peers(path, options)
    return _remote(path, options)


def _opened(opener: Opener, url: str, options: dict[str, Any]) -> Store:
    store = opener(url, **options)
    if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the opener of {url.partition('://')[0]}:// gave a {type(store).__name__}, "
            "expected a dtckpt.storage.Store"
        )
    return store


def _local(path: str, options: dict[str, Any]) -> LocalStore:
    _refuse({name for name in options if name != "direct_io"}, "a local path")
    return LocalStore(path, **options)


def _peers(path: str, options: dict[str, Any]) -> Store:
    from .peers.store import OPTIONS, PeersStore

    _refuse(options.keys() - OPTIONS, "a store in the memory of agents")
    return PeersStore(path, **options)


def _remote(url: str, options: dict[str, Any]) -> Store:
    engine = options.pop("engine", "fsspec")
    if engine == "obstore":
        from .remote.obstore.store import ObstoreStore

        return ObstoreStore(url, **options)
    if engine != "fsspec":
        raise ValueError(f"engine is 'fsspec' or 'obstore', got {engine!r}")
    from .remote.fsspec.store import FsspecStore

    return FsspecStore(url, **options)


def _local_path(rest: str) -> str:
    """The path in a file URL, whose host may only be empty or localhost."""
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"bad file URL file://{rest}: expected file:///absolute/path")
    return path


def _refuse(options: Iterable[str], what: str) -> None:
    options = list(options)
    if options:
        raise TypeError(f"{what} does not take these options: {', '.join(sorted(options))}")
