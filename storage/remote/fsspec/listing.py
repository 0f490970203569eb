"""Listing by fsspec, where nothing there and nothing to be learned are not the same."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dtckpt.errors import ObjectNotFound, StorageError

from ...base import ObjectInfo
from ..asking import Connection

_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


def listing(connection: Connection, top: str, where: str, *, deep: bool) -> dict[str, Any]:
    """Return what the driver tells of all below ``top``, by path; nothing if it is not there.

    Of one level, unless it is to be ``deep``. Raises ``StorageError`` where the driver could not
    look: a host that does not answer, a listing that is denied. The drivers' own way of walking
    passes over these.
    """
    fs = connection.fs
    place = top or fs.root_marker
    # No driver walks its own way and takes this argument, too.
    told = {"on_error": _raise_unless_missing} if _walks_as_inherited(fs) else {}

    def call() -> Any:
        if deep:
            find = fs._find if fs.async_impl else fs.find
            return find(place, detail=True, **told)
        return (fs._ls if fs.async_impl else fs.ls)(place, detail=True)

    try:
        found = connection.ask("list", where, call)
    except ObjectNotFound:
        return {}
    return found if deep else {info["name"]: info for info in found}


def object_info(name: str, info: dict[str, Any]) -> ObjectInfo:
    """Return what a driver tells of an object; each calls the time otherwise."""
    if info["size"] is None:
        raise StorageError(f"cannot stat {name}: its driver does not tell the size")
    found = [info[key] for key in _TIMES if info.get(key) is not None]
    modified: Any = found[0] if found else None
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    return ObjectInfo(
        name, int(info["size"]), float(modified) if isinstance(modified, int | float) else None
    )


def _raise_unless_missing(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _walks_as_inherited(fs: Any) -> bool:
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if fs.async_impl:
        return type(fs)._find is vars(AsyncFileSystem)["_find"]
    return type(fs).find is AbstractFileSystem.find
