"""Reading from S3 without holding what is read: bytes go where they belong as they arrive.

The driver collects the pieces of a reply and joins them, which costs the memory of it twice over,
and faulting that in costs more than the copying.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....base import ReadRequest
from ...ranges import Fetch

_CHUNK_BYTES = 1 << 20


async def stream(
    fs: Any,
    path: str,
    fetch: Fetch,
    copied: Callable[[ReadRequest, int], None],
    same: dict[str, str],
) -> None:
    """Bring the bytes of a fetch, as many as there are; on the event loop of an S3 driver.

    After a reply that broke off it is called again, and goes on from there if the object is the
    same by then, of which ``same`` is to be kept, and empty at first.
    """
    bucket, key, _ = fs.split_path(path)
    wanted = f"bytes={fetch.position}-{fetch.stop - 1}"
    reply = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted, **same)
    if reply.get("ETag"):
        same["IfMatch"] = reply["ETag"]
    async with reply["Body"] as body:
        while data := await body.read(_CHUNK_BYTES):
            fetch.take(memoryview(data), copied)
