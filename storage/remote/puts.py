"""Conditional requests through fsspec: what drivers know of them, and what becomes of conflicts."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable
from typing import Any

from .s3_requests import Requests, server_code

_CONFLICT_ATTEMPTS = 8
_CONFLICT_SECONDS = 0.05

_MULTIPART_BYTES = 64 << 20
"""The driver of S3 cuts objects from about here on into parts, which take no condition."""


def only_new(fs: Any) -> dict[str, Any]:
    """Return the arguments that make a PUT conditional on absence, as far as the driver has any."""
    method: Callable[..., Any] = fs._pipe_file if fs.async_impl else fs.pipe_file
    known = inspect.signature(method).parameters
    if "mode" in known:
        return {"mode": "create"}
    if "overwrite" in known:
        return {"overwrite": False}
    return {}


def only_same(fs: Any, info: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that make a PUT conditional on the object being the one of ``info``."""
    if info is not None and hasattr(fs, "call_s3") and info.get("ETag"):
        return {"IfMatch": info["ETag"]}
    return {}


def put_whole(
    requests: Requests,
    fs: Any,
    path: str,
    data: bytes,
    condition: dict[str, Any],
    look: Callable[[], None],
) -> None:
    """Put ``data`` at ``path``, on a condition as ``only_new`` or ``only_same`` has made it.

    Raises what the driver does. ``look()`` raises if the condition does not hold now; it is called
    before a server that does not know such conditions is asked without.
    """
    if "IfMatch" in condition and len(data) > _MULTIPART_BYTES:
        condition = {}

    def ask(given: dict[str, Any]) -> None:
        with requests.counted(fs):
            fs.pipe_file(path, data, **given)

    _ask(condition, look, ask)


def remove_same(fs: Any, path: str, info: dict[str, Any], look: Callable[[], None]) -> None:
    """Delete an object if it still is the one of ``info``, as far as the driver can say so.

    Errors and ``look`` as of ``put_whole``.
    """

    def ask(condition: dict[str, Any]) -> None:
        if condition:
            bucket, key, _ = fs.split_path(path)
            fs.call_s3("delete_object", Bucket=bucket, Key=key, **condition)
        else:
            fs.rm_file(path)

    _ask(only_same(fs, info), look, ask)


def _ask(
    condition: dict[str, Any],
    look: Callable[[], None],
    ask: Callable[[dict[str, Any]], object],
) -> None:
    """Call ``ask(condition)``, again after a conflict with another conditional request.

    Such a conflict says nothing of how the other one ends.
    """
    for attempt in range(_CONFLICT_ATTEMPTS):
        try:
            ask(condition)
        except Exception as error:
            code = server_code(error)
            if code == "NotImplemented" and condition:
                condition = {}
                look()
            elif code != "ConditionalRequestConflict" or attempt == _CONFLICT_ATTEMPTS - 1:
                raise
        else:
            return
        time.sleep(_CONFLICT_SECONDS * 2**attempt * random.uniform(0.5, 1.0))
