"""Deleting many objects of S3 in few requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .s3_requests import server_code

_MOST = 1000
"""Of one request, as the protocol has it."""
_UNKNOWN = frozenset(
    {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML"}
)
"""What servers say that do not know such requests, or want a digest with them that drivers do not
send any more, or cannot be told of a name in XML."""


def delete_many(fs: Any, paths: Sequence[str]) -> bool:
    """Delete objects of one bucket; return False where the server does not take such requests.

    A missing one is no error. Raises what the driver does, or ``OSError`` for what the server says
    of a single object.
    """
    for start in range(0, len(paths), _MOST):
        found = [fs.split_path(path) for path in paths[start : start + _MOST]]
        wanted = {"Objects": [{"Key": key} for _, key, _ in found], "Quiet": True}
        try:
            reply = fs.call_s3("delete_objects", Bucket=found[0][0], Delete=wanted)
        except Exception as error:
            if server_code(error) in _UNKNOWN:
                return False
            raise
        for error in reply.get("Errors", ()):
            if error.get("Code") != "NoSuchKey":
                raise OSError(f"{error.get('Key')}: {error.get('Code')}: {error.get('Message')}")
    return True
