"""What S3 tells of objects, in one request each time.

The driver asks twice or three times where nothing is found, in case a directory was meant.
"""

from __future__ import annotations

from typing import Any


def head(fs: Any, path: str) -> dict[str, Any]:
    """Return what is told of an object, as the driver's ``info`` does; raises what it raises."""
    bucket, key, _ = fs.split_path(path)
    return _file(path, fs.call_s3("head_object", Bucket=bucket, Key=key), "ContentLength")


def listing(fs: Any, top: str, *, deep: bool) -> dict[str, dict[str, Any]]:
    """Return what is told of all below ``top``, by path: of one level, unless it is to be deep."""
    bucket, key, _ = fs.split_path(top)
    asked = {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/" if key else ""}
    if not deep:
        asked["Delimiter"] = "/"
    found: dict[str, dict[str, Any]] = {}
    while True:
        reply = fs.call_s3("list_objects_v2", **asked)
        for told in reply.get("Contents", ()):
            path = f"{bucket}/{told['Key']}"
            found[path] = _file(path, told, "Size")
        for told in reply.get("CommonPrefixes", ()):
            path = f"{bucket}/{told['Prefix'].rstrip('/')}"
            found[path] = {"name": path, "type": "directory", "size": 0}
        if not reply.get("IsTruncated"):
            return found
        asked["ContinuationToken"] = reply["NextContinuationToken"]


def _file(path: str, told: dict[str, Any], size: str) -> dict[str, Any]:
    return {
        "name": path,
        "type": "file",
        "size": told[size],
        "LastModified": told.get("LastModified"),
        "ETag": told.get("ETag", ""),
    }
