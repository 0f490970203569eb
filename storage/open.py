"""From a path or URL to the store that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from .base import Store
from .local.store import LocalStore
from .schemes import OWN, Opener, opener_of

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OTHERS = ("http", "https", "hf", "hdfs", "dbfs", "oss", "adl", "wasb", "wasbs", "ftp", "sftp")
_KNOWN = "|".join(map(re.escape, sorted({*OWN, *_OTHERS})))
_HALF_URL = re.compile(rf"(?i)((?:{_KNOWN})(?=:)|[a-z][a-z0-9+.-]+(?=:/)):/?(?!/)")
"""What pathlib makes of a URL, as of ``Path("s3://bucket/run")``."""
_HALF_BELOW = re.compile(rf"(?i).*?/((?:{_KNOWN}):)(?=/)")
"""The same, made absolute."""
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def open_store(target: str | os.PathLike[str] | Store, **options: object) -> Store:
    """The store rooted at ``target``.

    A path or ``file://`` URL gives a ``LocalStore``, which takes ``direct_io``, ``peers://job`` a
    ``PeersStore``, a scheme that was registered (``register_scheme``) what its opener makes, any
    other ``scheme://`` a ``FsspecStore`` with ``options`` handed to its driver, or an
    ``ObstoreStore`` with ``engine="obstore"``; a ``Store`` is returned as it is. A ``UPath`` of
    universal_pathlib is its URL with its own storage options. ``TypeError`` for
    options that the target does not take, ``ValueError`` for a URL that cannot be a root, or that
    ``pathlib.Path`` has cut to a path (``s3:/bucket``), ``StorageError`` if its driver is not
    installed.
    """
    if isinstance(target, Store):
        _refuse(options, "a store that is open")
        return target
    path, options = split_target(target, options)
    if not path:
        raise ValueError("the path of a store is empty; the current directory is '.'")
    match = _SCHEME.match(path)
    if match is None:
        if "::" in path and "://" in path:
            raise ValueError(f"chained URLs cannot be opened as a store: {path.split('://')[0]}...")
        return _local(_plain_path(path), options)
    scheme = match[1].lower()
    path = scheme + path[match.end(1) :]
    if (opener := opener_of(scheme)) is not None:
        return _opened(opener, path, options)
    if scheme in ("file", "local"):
        return _local(_local_path(path[match.end() :]), options)
    if scheme == "peers":
        return _peers(path, options)
    return _remote(path, options)


def split_target(
    target: str | os.PathLike[str], options: dict[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the path or URL of a target, and its options: those of a ``UPath``, and the given.

    >>> split_target("s3://bucket/run", {"anon": True})
    ('s3://bucket/run', {'anon': True})
    """
    given = dict(options or {})
    own = getattr(target, "storage_options", None)
    if own is not None and isinstance(getattr(target, "protocol", None), str):
        is_local = isinstance(target, os.PathLike)  # other UPaths are no paths of this machine
        path = os.fspath(target) if is_local else str(target)
        return path, ({} if is_local else {**own}) | given
    return os.fspath(target), given


def _plain_path(path: str) -> str:
    """Return a local path; ValueError where it is what is left of a URL, or a path of Windows."""
    if path[:6].lower() == "file:/":
        return _local_path(path[5:])
    if os.name != "nt" and _DRIVE.match(path):
        raise ValueError(
            f"{path} is a path of Windows, and this machine has none; for a local directory of "
            f"that name write './{path}'"
        )
    half = _HALF_URL.match(path)
    if half is not None:
        raise ValueError(
            f"{path} is no URL, but would be a local directory {half[1]}: is "
            f"{half[1]}://{path[half.end() :]} meant? pathlib.Path takes a slash away: give URLs "
            f"as str or as a UPath of universal_pathlib. For a local directory write './{path}'"
        )
    below = _HALF_BELOW.match(path)
    if below is not None and not os.path.lexists(below[0]):
        raise ValueError(
            f"{path} has what is left of a URL in it ({path[below.start(1) :]}): is "
            f"{below[1]}/{path[below.end() :]} meant? Give URLs as str, not as a pathlib.Path that "
            f"was made absolute. For a local directory make {below[0]} first"
        )
    return path


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
    """The path in a file URL, whose host may only be empty or localhost.

    ``%20`` and the like are decoded, as ``Path.as_uri`` encodes them. ValueError where only the
    path with the percent sign exists.
    """
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"bad file URL file://{rest}: expected file:///absolute/path")
    decoded = unquote(path)
    if decoded != path and os.path.lexists(path) and not os.path.lexists(decoded):
        raise ValueError(
            f"file://{rest} is the path {decoded}, which does not exist, but {path} does: give "
            "that path without file://"
        )
    return decoded


def _refuse(options: Iterable[str], what: str) -> None:
    options = list(options)
    if options:
        raise TypeError(f"{what} does not take these options: {', '.join(sorted(options))}")
