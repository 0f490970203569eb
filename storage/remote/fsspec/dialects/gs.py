"""Google Cloud Storage, by gcsfs."""

from __future__ import annotations

import functools
from datetime import datetime
from typing import Any, ClassVar, final
from urllib.parse import quote

from ...asking import Connection
from ...requests import Requests
from ...trouble import Kind, Told, Trouble, told
from .base import Condition, Dialect, Info


@final
class Gs(Dialect):
    """Conditions by generation; uploads in chunks, one after the other, that nobody can list."""

    extra: ClassVar[str] = "gcs"

    def __init__(self) -> None:
        super().__init__(puts_are_atomic=True)
        self.streams_are_atomic = True

    def options(self, given: Info, idle: float) -> Info:
        from aiohttp import ClientTimeout

        patience = ClientTimeout(total=None, sock_connect=idle, sock_read=idle)
        return {"requests_timeout": patience} | given

    def tame(self, fs: Any, given: Info) -> None:
        # The number of retries is fixed where its class is made; this is what it wraps.
        once = getattr(type(fs)._request, "__wrapped__", None)
        if once is not None:
            fs._request = functools.partial(once, fs)

    def only_new(self, fs: Any) -> Condition:
        return {"ifGenerationMatch": "0"}

    def only_same(self, info: Info) -> Condition:
        found = info.get("generation")
        return {"ifGenerationMatch": str(found)} if found else {}

    async def read(self, fs: Any, path: str, start: int, stop: int) -> Any:
        try:
            return await fs._cat_file(path, start=start, end=stop)
        except FileNotFoundError:
            # The driver does not say whether it is the bucket that is missing.
            try:
                await _page(fs, fs.split_path(path)[0], maxResults="1")
            except Exception as error:
                if told(error).kind is not Kind.DENIED:
                    raise
            raise

    async def put(
        self, fs: Any, path: str, data: bytes, condition: Condition, requests: Requests
    ) -> Any:
        bucket, key, _ = fs.split_path(path)
        # The driver asks once, and aiohttp does not repeat a POST.
        requests.sent()
        # The driver's own has no such condition but that there is none, and copies the bytes.
        await fs._call(
            "POST",
            f"{fs._location}/upload/storage/v1/b/{quote(bucket)}/o",
            uploadType="media",
            name=key,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            **condition,
        )

    async def remove(self, fs: Any, path: str, condition: Condition) -> Any:
        bucket, key, _ = fs.split_path(path)
        await fs._call("DELETE", "b/{}/o/{}", bucket, key, **condition)

    def begin(
        self, connection: Connection, path: str, where: str, size: int, part: int
    ) -> GsUpload:
        return GsUpload(connection, path, where)

    async def info(self, fs: Any, path: str) -> Any:
        bucket, key, _ = fs.split_path(path)
        return _file(bucket, await fs._call("GET", "b/{}/o/{}", bucket, key, json_out=True))

    def listing(self, connection: Connection, top: str, where: str, *, deep: bool) -> Info:
        fs = connection.fs
        bucket, key, _ = fs.split_path(top)
        asked = {"prefix": f"{key.rstrip('/')}/"} if key else {}
        if not deep:
            asked["delimiter"] = "/"
        found: Info = {}
        while True:
            reply = connection.ask("list", where, lambda: _page(fs, bucket, **asked))
            for item in reply.get("items", ()):
                found[f"{bucket}/{item['name']}"] = _file(bucket, item)
            for prefix in reply.get("prefixes", ()):
                path = f"{bucket}/{prefix}"
                found[path] = {"name": path, "type": "directory", "size": 0}
            if not reply.get("nextPageToken"):
                return found
            asked["pageToken"] = reply["nextPageToken"]


@final
class GsUpload:
    """A resumable upload: the server says how far it has come, and takes what follows.

    One that is not completed is gone after a week; there is nothing to list.
    """

    num_in_flight = 1

    def __init__(self, connection: Connection, path: str, where: str) -> None:
        self._connection = connection
        self._where = where
        self._start = 0
        self._held = memoryview(b"")
        fs = connection.fs
        bucket, key, _ = fs.split_path(path)
        headers, _ = connection.ask(
            "begin",
            where,
            lambda: fs._call(
                "POST",
                f"{fs._location}/upload/storage/v1/b/{quote(bucket)}/o",
                uploadType="resumable",
                name=key,
                json={"name": key},
                headers={"X-Upload-Content-Type": "application/octet-stream"},
            ),
        )
        self._location = str(headers["Location"])

    def send(self, number: int, data: memoryview) -> Any:
        """Send the chunk before this one: only of the last one the size of all is told."""
        if self._held:
            self._transmit("*")
        self._held = data

    def complete(self, parts: list[Any]) -> None:
        """Send the last chunk, which makes the object appear."""
        self._transmit(str(self._start + len(self._held)))

    def _transmit(self, total: str) -> None:
        """Send what is held, or what the server has not got of it."""
        data, start, stop = self._held, self._start, self._start + len(self._held)
        has = start
        is_known = start < stop  # else nothing is sent, and only the end is told

        async def call() -> None:
            nonlocal has, is_known
            if not is_known:
                has = await self._put(f"bytes */{total}", b"", stop)
            while start <= has < stop:
                is_known = False
                span = f"bytes {has}-{stop - 1}/{total}"
                has = await self._put(span, data[has - start :], stop)
                is_known = True

        self._connection.ask("write", self._where, call)
        self._start = stop
        self._held = memoryview(b"")

    def abort(self) -> None:
        """Have the server forget what it has."""

        async def call() -> None:
            from gcsfs.retry import HttpError

            try:
                await self._connection.fs._call("DELETE", self._location)
            except (FileNotFoundError, HttpError) as error:
                if getattr(error, "code", 404) not in (404, 410):
                    raise

        self._connection.ask("clean up", self._where, call)

    async def _put(self, span: str, data: Any, stop: int) -> int:
        """Send bytes, or none; return how far the server has come."""
        fs = self._connection.fs
        headers = {"Content-Range": span}
        reply, body = await fs._call("PUT", self._location, headers=headers, data=data)
        if body:
            return stop  # the object as it is now
        found = reply.get("Range")
        return int(found.rpartition("-")[2]) + 1 if found else 0


async def _page(fs: Any, bucket: str, **asked: str) -> Any:
    """Return a page of a listing."""
    try:
        return await fs._call("GET", "b/{}/o", bucket, json_out=True, **asked)
    except FileNotFoundError as error:
        raise Told(str(error), Trouble(Kind.NO_BUCKET, 404)) from error


def _file(bucket: str, item: Info) -> Info:
    updated = item.get("updated")
    return {
        "name": f"{bucket}/{item['name']}",
        "type": "file",
        "size": int(item.get("size", 0)),
        "updated": None if updated is None else datetime.fromisoformat(updated),
        "generation": item.get("generation"),
    }
