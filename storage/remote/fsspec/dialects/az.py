"""Azure Blob Storage, by adlfs."""

from __future__ import annotations

import base64
import os
import re
from typing import Any, ClassVar, final

from ...asking import Connection
from ...requests import Requests
from .base import Condition, Dialect, Info

_BLOCK_BYTES = 256 << 20
"""The SDK cuts what is longer than 64 MiB into blocks, which are committed on condition, too."""

_PAGE = 5000
"""Blobs of one request to list, as the service has it."""

# The driver takes paths for URLs: it drops what is empty behind '?' or '#', and all tabs and line
# ends, writes what stands between a '?' and a '#' behind it, and cuts at a version.
_UNSAFE = re.compile(r"[?#](?:/|$)|\?.*#|\?versionid=|[\t\r\n]")


def check_path(path: str) -> None:
    """Raise ``ValueError`` for a path that the driver takes for another one."""
    if _UNSAFE.search(path):
        raise ValueError(
            f"bad object name {path!r}: on Azure '?' and '#' at the end of a component, '?' before "
            "'#', '?versionid=', tabs and line ends are refused, as its driver loses them"
        )


@final
class Az(Dialect):
    """Conditions by ETag; blocks that nobody can list, and that are gone after a week.

    How often a PUT goes out is not known: aiohttp may repeat it.
    """

    extra: ClassVar[str] = "azure"

    def __init__(self) -> None:
        super().__init__(puts_are_atomic=True)
        self.streams_are_atomic = True

    def options(self, given: Info, idle: float) -> Info:
        defaults = {"connection_timeout": idle, "read_timeout": idle, "max_concurrency": 8}
        return defaults | given

    def tame(self, fs: Any, given: Info) -> None:
        policy = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
        if policy is not None:
            policy.total_retries = 0

    def check_path(self, path: str) -> None:
        check_path(path)

    def only_new(self, fs: Any) -> Condition:
        return {"overwrite": False}

    def only_same(self, info: Info) -> Condition:
        if not info.get("etag"):
            return {}
        from azure.core import MatchConditions

        return {"etag": info["etag"], "match_condition": MatchConditions.IfNotModified}

    async def put(
        self, fs: Any, path: str, data: bytes, condition: Condition, requests: Requests
    ) -> Any:
        await fs._pipe_file(path, data, **condition)

    async def remove(self, fs: Any, path: str, condition: Condition) -> Any:
        async with _blob(fs, path) as blob:
            await blob.delete_blob(**condition)

    def begin(
        self, connection: Connection, path: str, where: str, size: int, part: int
    ) -> AzUpload:
        return AzUpload(connection, path, where)

    async def info(self, fs: Any, path: str) -> Any:
        async with _blob(fs, path) as blob:
            return _told(path, await blob.get_blob_properties())

    def listing(self, connection: Connection, top: str, where: str, *, deep: bool) -> Info:
        # The driver's own takes an object that is named like a folder for one.
        fs = connection.fs
        container, key, _ = fs.split_path(top)
        below = f"{key.rstrip('/')}/" if key else None
        found: Info = {}
        so_far: str | None = None

        async def page() -> tuple[Info, str | None]:
            async with fs.service_client.get_container_client(container) as client:
                ask = client.list_blobs if deep else client.walk_blobs
                more = {} if deep else {"delimiter": "/"}
                blobs = ask(
                    name_starts_with=below,
                    include=["metadata"],
                    results_per_page=_PAGE,
                    **more,
                )
                pages = blobs.by_page(continuation_token=so_far)
                async for some in pages:
                    told = [(f"{container}/{blob.name}", blob) async for blob in some]
                    return {
                        path: _told(path, blob) for path, blob in told
                    }, pages.continuation_token
            return {}, None

        while True:
            some, so_far = connection.ask("list", where, page)
            found |= some
            if not so_far:
                return found


@final
class AzUpload:
    """Blocks, which a list of them makes a blob."""

    num_in_flight = 4

    def __init__(self, connection: Connection, path: str, where: str) -> None:
        self._connection = connection
        self._path = path
        self._where = where
        # Blocks are the blob's, and not the upload's: another writer's of one id take their place.
        self._own = os.urandom(8).hex()

    def send(self, number: int, data: memoryview) -> Any:
        """Send a block; return its id."""
        block = bytes(data)  # the SDK takes nothing else
        block_id = base64.b64encode(f"{self._own}{number:08}".encode()).decode()

        async def call() -> None:
            async with _blob(self._connection.fs, self._path) as blob:
                await blob.stage_block(block_id, block, length=len(block))

        self._connection.ask("write", self._where, call)
        return block_id

    def complete(self, parts: list[Any]) -> None:
        """Make the blob appear."""
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id) for block_id in parts]

        async def call() -> None:
            async with _blob(self._connection.fs, self._path) as blob:
                await blob.commit_block_list(blocks, metadata={"is_directory": "false"})

        self._connection.ask("complete", self._where, call)

    def abort(self) -> None:
        """Nothing to do: the service forgets blocks of which nothing is made."""


def _blob(fs: Any, path: str) -> Any:
    container, name, _ = fs.split_path(path)
    return fs.service_client.get_blob_client(container=container, blob=name)


def _told(path: str, properties: Any) -> Info:
    metadata = properties.get("metadata") or {}
    marks = {str(metadata.get(name)).lower() for name in ("hdi_isfolder", "is_directory")}
    is_folder = "size" not in properties or "true" in marks
    return {
        "name": path,
        "type": "directory" if is_folder else "file",
        "size": properties.get("size", 0),
        "last_modified": properties.get("last_modified"),
        "etag": properties.get("etag"),
    }
