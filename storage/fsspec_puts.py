"""Conditional requests through fsspec: what drivers know of them, and what a refusal is."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = [
    "is_condition_failed",
    "is_refusal",
    "only_new",
    "only_same",
    "put_whole",
    "remove_same",
    "server_code",
]

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


def put_whole(fs: Any, path: str, data: bytes, condition: dict[str, Any]) -> None:
    """Put ``data`` at ``path``, on a condition as ``only_new`` or ``only_same`` has made it.

    Raises what the driver does. A conflict with another conditional request, which says nothing of
    how that one ends, is tried again; a server that does not know such conditions is asked without.
    """
    if "IfMatch" in condition and len(data) > _MULTIPART_BYTES:
        condition = {}
    for attempt in range(_CONFLICT_ATTEMPTS):
        try:
            fs.pipe_file(path, data, **condition)
        except Exception as error:
            code = server_code(error)
            if code == "NotImplemented" and "IfMatch" in condition:
                condition = {}
            elif code != "ConditionalRequestConflict" or attempt == _CONFLICT_ATTEMPTS - 1:
                raise
        else:
            return
        time.sleep(_CONFLICT_SECONDS * 2**attempt * random.uniform(0.5, 1.0))


def remove_same(fs: Any, path: str, info: dict[str, Any]) -> None:
    """Delete an object if it still is the one of ``info``, as far as the driver can say so."""
    condition = only_same(fs, info)
    if condition:
        bucket, key, _ = fs.split_path(path)
        fs.call_s3("delete_object", Bucket=bucket, Key=key, **condition)
    else:
        fs.rm_file(path)


def server_code(error: BaseException) -> str:
    """Return what a server of S3 calls the error; empty where none has answered."""
    return _reply(error)[0]


def is_condition_failed(error: BaseException) -> bool:
    """Whether the server refused because another object is there than the condition says."""
    return server_code(error) == "PreconditionFailed"


def is_refusal(error: BaseException) -> bool:
    """Whether the server answered that it will not, the first time it was asked.

    Where the driver had to ask again, an earlier request may still be carried out.
    """
    _, status, repeated = _reply(error)
    return 400 <= status < 500 and status not in (408, 429) and not repeated


def _reply(error: BaseException) -> tuple[str, int, bool]:
    """Return code and status of the reply behind an error, and whether it was not the first."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            told: dict[str, Any] = response
            metadata = told.get("ResponseMetadata", {})
            code = str(told.get("Error", {}).get("Code", ""))
            status = int(metadata.get("HTTPStatusCode", 0))
            return code, status, bool(metadata.get("RetryAttempts", 0))
    return "", 0, False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
