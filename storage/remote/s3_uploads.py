"""Uploads to S3 in parts that nobody has completed or given up: they are hidden, and paid for.

Each goes by the name of its object with the upload's id behind it, a name that no object has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from ..names import UPLOAD_ID


def upload_name(name: str, upload_id: str) -> str:
    """Return the reserved name of an upload to the object ``name``."""
    return f"{name}{UPLOAD_ID}{quote(upload_id, safe='')}"


def split_upload(name: str) -> tuple[str, str | None]:
    """Return an object's name and the id of an upload to it, if it is one that is named."""
    target, found, upload_id = name.partition(UPLOAD_ID)
    return target, unquote(upload_id) if found else None


def unfinished_uploads(fs: Any, prefix: str) -> Iterator[tuple[str, str, float | None]]:
    """Yield path, id and time of the beginning of every upload below ``prefix``, a path.

    Nothing where ``fs`` is no driver of S3: others clean up by themselves.
    """
    if not hasattr(fs, "call_s3"):
        return
    bucket, key, _ = fs.split_path(prefix)
    below = f"{key.rstrip('/')}/" if key else ""
    more: dict[str, Any] = {}
    while True:
        reply = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=below, **more)
        for upload in reply.get("Uploads", ()):
            begun = upload.get("Initiated")
            path = f"{bucket}/{upload['Key']}"
            yield path, upload["UploadId"], None if begun is None else begun.timestamp()
        if not reply.get("IsTruncated"):
            return
        more = {
            "KeyMarker": reply["NextKeyMarker"],
            "UploadIdMarker": reply["NextUploadIdMarker"],
        }


def abort_upload(fs: Any, path: str, upload_id: str) -> None:
    """Have the server forget an upload; one that it does not know is no error."""
    bucket, key, _ = fs.split_path(path)
    fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
