"""URL schemes that others serve: registered by a program, or brought by an installed package."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from dtckpt.errors import StorageError

from .base import Store

Opener = Callable[..., Store]
"""Called as ``opener(url, **options)``, with the URL and the storage options that a user gave."""

ENTRY_POINTS = "dtckpt.stores"
"""The group of entry points in which a package names its schemes and their openers."""

_FILES = ("file", "local", "peers", "memory", "in-process")
_OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
OWN = frozenset({*_FILES, *_OBJECTS})
"""What this package serves by itself, and no installed package takes away."""

_NAME = re.compile(r"[a-z][a-z0-9+.-]*")
_registered: dict[str, Opener] = {}


def register_scheme(scheme: str, opener: Opener, *, replace: bool = False) -> None:
    """Have ``opener(url, **options)`` open the stores of all URLs ``scheme://...`` in this process.

    ``options`` are the storage options that a save, a load or a command was given. What the opener
    raises reaches their caller. A package that is to serve its scheme in every process, and in the
    ``dtckpt`` command, names the opener in the group ``dtckpt.stores`` of its entry points instead.

    ``ValueError`` for what cannot be a scheme, and for one that is taken, by this package, another
    opener or a driver that fsspec knows, unless ``replace`` is true or the opener is the same.
    """
    scheme = scheme.lower()
    if _NAME.fullmatch(scheme) is None:
        raise ValueError(f"bad URL scheme {scheme!r}: expected letters, digits, '+', '-' and '.'")
    if not replace and _registered.get(scheme) is not opener and (who := _holder(scheme)):
        raise ValueError(
            f"{scheme}:// is taken, by {who}: choose another scheme, or pass replace=True"
        )
    _registered[scheme] = opener


def unregister_scheme(scheme: str) -> None:
    """Undo ``register_scheme``; ``KeyError`` if nothing was registered for the scheme."""
    del _registered[scheme.lower()]


def opener_of(scheme: str) -> Opener | None:
    """Return who opens the URLs of a scheme (in lower case), if somebody else does.

    ``StorageError`` if a package is installed that serves it, but cannot be loaded, or several are.
    """
    if scheme in _registered:
        return _registered[scheme]
    return None if scheme in OWN else _installed(scheme)


def _holder(scheme: str) -> str:
    """Say who serves a scheme so far; empty if nobody does."""
    if scheme in _registered:
        return f"{_registered[scheme]!r}"
    if scheme in OWN:
        return "dtckpt"
    if _installed(scheme) is not None:
        return f"a package that is installed (entry points {ENTRY_POINTS!r})"
    import fsspec

    return "a driver of fsspec" if scheme in fsspec.available_protocols() else ""


@cache  # every look goes through the metadata of all that is installed
def _installed(scheme: str) -> Opener | None:
    from importlib.metadata import entry_points

    found = {point.value: point for point in entry_points(group=ENTRY_POINTS, name=scheme)}
    if len(found) > 1:
        raise StorageError(f"several installed packages serve {scheme}://: {', '.join(found)}")
    for value, point in found.items():
        try:
            return point.load()
        except Exception as error:
            raise StorageError(f"{value}, which serves {scheme}://, does not load") from error
    return None
