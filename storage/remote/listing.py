"""Listing through fsspec, where nothing there and nothing to be learned are not the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from .s3_looking import listing
from .s3_requests import server_code


def find_files(fs: Any, top: str) -> dict[str, dict[str, Any]]:
    """Return what the driver tells of every file below ``top``, by path; none if it is not there.

    Raises what the driver does where it could not look: a host that does not answer, a listing that
    is denied, a bucket that does not exist. The drivers' own way of walking passes over all these.
    """
    if hasattr(fs, "call_s3"):
        with _nothing_is_no_error(top):
            return listing(fs, top, deep=True)
        return {}
    # No driver walks its own way and takes this argument, too.
    told = {"on_error": _raise_unless_missing} if _walks_as_inherited(fs) else {}
    with _nothing_is_no_error(top):
        return fs.find(top or fs.root_marker, detail=True, **told)
    return {}


def find_level(fs: Any, top: str) -> dict[str, dict[str, Any]]:
    """Return what the driver tells of all that is directly below ``top``; errors as above."""
    with _nothing_is_no_error(top):
        if hasattr(fs, "call_s3"):
            return listing(fs, top, deep=False)
        return {info["name"]: info for info in fs.ls(top or fs.root_marker, detail=True)}
    return {}


@contextmanager
def _nothing_is_no_error(top: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if server_code(error) == "NoSuchBucket":
            raise OSError(f"the bucket of {top} does not exist") from error


def _raise_unless_missing(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _walks_as_inherited(fs: Any) -> bool:
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if fs.async_impl:
        return type(fs)._find is vars(AsyncFileSystem)["_find"]
    return type(fs).find is AbstractFileSystem.find
