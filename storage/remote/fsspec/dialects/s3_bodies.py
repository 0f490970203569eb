"""What is sent to S3, without copies of it, and how often.

aiohttp repeats requests by itself where a connection was closed, and tells nobody. So the bodies
that go out are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...requests import counting

_PIECE_BYTES = 1 << 18
"""What is handed to a connection at a time; it copies what the network does not take at once."""


def body_of(client: Any, data: bytes | memoryview) -> Any:
    """Return ``data`` for a request of a client of aiobotocore; good for one call.

    Bytes that are in memory botocore hands on as a file, of which reading copies, and aiohttp
    copies it once more to know its length. With other clients than aiohttp's it stays at that.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    if getattr(client.meta.config, "http_session_cls", None) is not AIOHTTPSession:
        return bytes(data)
    client.meta.events.register("before-send.s3", _count, unique_id="dtckpt-bodies")
    return _body_class()(memoryview(data))


def _count(request: Any, **_: Any) -> None:
    requests = counting.get()
    if (
        requests is not None
        and request.body is not None
        and not hasattr(request.body, "is_counted")
    ):
        requests.sent()  # a stream of chunks, which is sent only once


@functools.cache
def _body_class() -> Callable[[memoryview], Any]:
    from aiohttp.payload import Payload

    class Body(Payload):
        """A file to botocore, which computes checksums of it, and a payload to aiohttp."""

        is_counted = True

        def __init__(self, data: memoryview) -> None:
            super().__init__(data)
            self._data = data
            self._position = 0

        def __len__(self) -> int:
            return len(self._data)

        def read(self, size: int | None = None) -> memoryview:
            start = self._position
            stop = len(self) if size is None or size < 0 else min(start + size, len(self))
            self._position = stop
            return self._data[start:stop]

        def seek(self, position: int) -> None:
            self._position = position

        def tell(self) -> int:
            return self._position

        @property
        def size(self) -> int:
            return len(self)

        @property
        def autoclose(self) -> bool:
            return True

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            return str(self._data, encoding, errors)

        async def write(self, writer: Any) -> None:
            await self.write_with_length(writer, None)

        async def write_with_length(self, writer: Any, content_length: int | None) -> None:
            if (requests := counting.get()) is not None:
                requests.sent()
            data = self._data[:content_length]
            for start in range(0, len(data), _PIECE_BYTES):
                await writer.write(data[start : start + _PIECE_BYTES])

    return Body
