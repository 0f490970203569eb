"""S3, by s3fs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

from dtckpt.errors import ObjectNotFound, StorageError

from ...asking import Connection
from ...requests import Requests
from ...trouble import told
from .base import Condition, Dialect, Info
from .s3_bodies import body_of

_MOST_DELETED = 1000
"""Of one request, as the protocol has it."""
_NO_SUCH_REQUEST = frozenset(
    {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML"}
)
"""What servers say that cannot delete many at a time, or want a digest with it that drivers
do not send any more, or cannot be told of a name in XML."""

_PUT_BYTES = 1 << 30
"""s3fs would cut what is longer than twice its chunks into parts, which take no condition."""


@final
class S3(Dialect):
    """Conditions by ETag, on single PUTs; uploads in parts that can be listed and given up."""

    extra: ClassVar[str] = "s3"

    def __init__(self) -> None:
        super().__init__(puts_are_atomic=True)
        self.streams_are_atomic = self.puts_are_counted = self.puts_are_checked = True

    def options(self, given: Info, idle: float) -> Info:
        # The pool of 10 connections that botocore has is narrower than our batches.
        defaults = {
            "max_pool_connections": 32,
            "connect_timeout": idle,
            "read_timeout": idle,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        # botocore rewrites the dictionaries it is given.
        settings: dict[str, Any] = copy.deepcopy(given.get("config_kwargs") or {})
        return given | {"config_kwargs": defaults | settings}

    def tame(self, fs: Any, given: Info) -> None:
        fs.retries = 1

    async def info(self, fs: Any, path: str) -> Any:
        # The driver asks up to three times where nothing is found, in case a directory was meant.
        bucket, key, _ = fs.split_path(path)
        told = await fs._call_s3("head_object", Bucket=bucket, Key=key)
        return _file(path, told, "ContentLength")

    def listing(self, connection: Connection, top: str, where: str, *, deep: bool) -> Info:
        fs = connection.fs
        bucket, key, _ = fs.split_path(top)
        asked = {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/" if key else ""}
        if not deep:
            asked["Delimiter"] = "/"
        found: Info = {}
        while True:
            reply = connection.ask("list", where, lambda: fs._call_s3("list_objects_v2", **asked))
            for found_one in reply.get("Contents", ()):
                path = f"{bucket}/{found_one['Key']}"
                found[path] = _file(path, found_one, "Size")
            for found_one in reply.get("CommonPrefixes", ()):
                path = f"{bucket}/{found_one['Prefix']}"
                found[path] = {"name": path, "type": "directory", "size": 0}
            if not reply.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = reply["NextContinuationToken"]

    def only_same(self, info: Info) -> Condition:
        return {"IfMatch": info["ETag"]} if info.get("ETag") else {}

    async def put(
        self, fs: Any, path: str, data: bytes, condition: Condition, requests: Requests
    ) -> Any:
        bucket, _, _ = fs.split_path(path)
        body = await _body(fs, bucket, data)
        await fs._pipe_file(path, body, chunksize=_PUT_BYTES, **condition)

    async def remove(self, fs: Any, path: str, condition: Condition) -> Any:
        bucket, key, _ = fs.split_path(path)
        await fs._call_s3("delete_object", Bucket=bucket, Key=key, **condition)

    def remove_many(self, connection: Connection, paths: Sequence[str], where: str) -> bool:
        for start in range(0, len(paths), _MOST_DELETED):
            some = paths[start : start + _MOST_DELETED]
            try:
                connection.ask("delete", where, functools.partial(_delete, connection.fs, some))
            except StorageError as error:
                if told(error).code in _NO_SUCH_REQUEST:
                    return False
                raise
        return True

    def begin(
        self, connection: Connection, path: str, where: str, size: int, part: int
    ) -> S3Upload:
        return S3Upload(connection, path, where)

    def unfinished(
        self, connection: Connection, path: str, where: str
    ) -> Iterator[tuple[str, str, float | None]]:
        fs = connection.fs
        bucket, key, _ = fs.split_path(path)
        below = {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/" if key else ""}
        while True:
            reply = connection.ask(
                "list uploads below",
                where,
                lambda asked=below: fs._call_s3("list_multipart_uploads", **asked),
            )
            for upload in reply.get("Uploads", ()):
                begun = upload.get("Initiated")
                found = f"{bucket}/{upload['Key']}"
                yield found, upload["UploadId"], None if begun is None else begun.timestamp()
            if not reply.get("IsTruncated"):
                return
            below["KeyMarker"] = reply["NextKeyMarker"]
            below["UploadIdMarker"] = reply["NextUploadIdMarker"]

    def forget(self, connection: Connection, path: str, where: str, upload_id: str) -> None:
        S3Upload(connection, path, where, upload_id).abort()


@final
class S3Upload:
    """An upload in parts."""

    num_in_flight = 4

    def __init__(
        self, connection: Connection, path: str, where: str, upload_id: str | None = None
    ) -> None:
        """Begin an upload, or take up the one of that id."""
        bucket, key, _ = connection.fs.split_path(path)
        self._connection = connection
        self._where = where
        self._target = {"Bucket": bucket, "Key": key}
        if upload_id is None:
            upload_id = self._call("begin", "create_multipart_upload")["UploadId"]
        self._target["UploadId"] = upload_id

    def send(self, number: int, data: memoryview) -> Any:
        """Send a part; return what identifies it."""
        fs = self._connection.fs

        async def call() -> Any:
            body = await _body(fs, self._target["Bucket"], data)
            return await fs._call_s3("upload_part", **self._target, PartNumber=number, Body=body)

        reply = self._connection.ask("write", self._where, call)
        known = {name: reply[name] for name in ("ETag", "ChecksumSHA256") if name in reply}
        return {"PartNumber": number, **known}

    def complete(self, parts: list[Any]) -> None:
        """Make the object appear."""
        parts = parts or [self.send(1, memoryview(b""))]  # of no parts nothing can be made
        asked: list[int] = []

        def call() -> Any:
            asked.append(1)
            told = {"Parts": parts}
            return fs._call_s3("complete_multipart_upload", **self._target, MultipartUpload=told)

        fs = self._connection.fs
        try:
            self._connection.ask("complete", self._where, call)
        except ObjectNotFound:
            # The first reply may have been lost; the size will tell.
            if len(asked) == 1:
                raise

    def abort(self) -> None:
        """Have the server forget all parts; an upload that it does not know is no error."""
        self._call("clean up", "abort_multipart_upload")

    def _call(self, action: str, name: str, **arguments: Any) -> Any:
        """The driver adds the user's own settings (encryption, who pays)."""
        return self._connection.ask(
            action,
            self._where,
            lambda: self._connection.fs._call_s3(name, **self._target, **arguments),
        )


async def _body(fs: Any, bucket: str, data: bytes | memoryview) -> Any:
    await fs.set_session()
    return body_of(await fs.get_s3(bucket), data)


def _file(path: str, told: Info, size: str) -> Info:
    return {
        "name": path,
        "type": "file",
        "size": told[size],
        "LastModified": told.get("LastModified"),
        "ETag": told.get("ETag", ""),
    }


class KeyRefused(Exception):
    """What a server says of one object among others, in the form of botocore's errors."""

    def __init__(self, told: Info) -> None:
        super().__init__(f"{told.get('Key')}: {told.get('Code')}: {told.get('Message')}")
        self.response = {"Error": told}


async def _delete(fs: Any, paths: Sequence[str]) -> None:
    found = [fs.split_path(path) for path in paths]
    wanted = {"Objects": [{"Key": key} for _, key, _ in found], "Quiet": True}
    reply = await fs._call_s3("delete_objects", Bucket=found[0][0], Delete=wanted)
    for refused in reply.get("Errors", ()):
        if refused.get("Code") != "NoSuchKey":
            raise KeyRefused(refused)
