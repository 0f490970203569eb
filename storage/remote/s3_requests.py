"""What a server of S3 has been asked, how often, and what it answered.

botocore, s3fs around it and aiohttp below it repeat requests, each by rules of its own, and only
botocore tells how often. So the bodies that go out are counted.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from dtckpt.errors import StorageError

_counting: ContextVar[Requests | None] = ContextVar("dtckpt_counting", default=None)


@final
class Requests:
    """What is asked of a server to write one object."""

    def __init__(self) -> None:
        self._may_be_under_way = False
        self._num_sent = 0

    @contextmanager
    def counted(self, fs: Any) -> Generator[None]:
        """Count what ``fs`` sends with a body during the block, if it is an ``s3fs.S3FileSystem``.

        It is to be asked once, by this thread.
        """
        before = self._num_sent
        # The driver works in a thread of its own, in a copy of this context.
        token = _counting.set(self)
        try:
            if hasattr(fs, "call_s3"):
                _announce_bodies(fs.s3)
            yield
        finally:
            _counting.reset(token)
            self._may_be_under_way |= self._num_sent != before + 1

    def is_last_word(self, error: StorageError) -> bool:
        """Whether nothing comes of it after this failure: no request was made, or a single one that
        was answered with a refusal. An earlier one than the last may still be carried out.
        """
        _, status = _reply(error)
        is_refusal = 400 <= status < 500 and status not in (408, 429)
        return (is_refusal or error.is_certain) and not self._may_be_under_way

    def sent(self) -> None:
        """Count a body that goes out."""
        self._num_sent += 1


def _announce_bodies(client: Any) -> None:
    """Have the bodies counted that a client of aiobotocore sends, if it does so with aiohttp."""
    from aiobotocore.httpsession import AIOHTTPSession

    if getattr(client.meta.config, "http_session_cls", None) is AIOHTTPSession:
        client.meta.events.register("before-send.s3", _count, unique_id="dtckpt-requests")


def _count(request: Any, **_: Any) -> None:
    requests = _counting.get()
    if requests is None:
        return
    if isinstance(request.body, io.BytesIO):
        request.body = _counted_body(request.body, requests)
    elif request.body is not None:
        requests.sent()  # a stream of chunks, which is sent only once


def _counted_body(data: io.BytesIO, requests: Requests) -> Any:
    """Return a body for aiohttp that tells each time that it is sent."""
    from aiohttp.payload import BytesIOPayload

    class Counted(BytesIOPayload):
        async def write(self, writer: Any) -> None:
            requests.sent()
            await super().write(writer)

        async def write_with_length(self, writer: Any, content_length: int | None) -> None:
            requests.sent()
            await super().write_with_length(writer, content_length)

        def seek(self, position: int) -> None:
            """Called by botocore before it makes a new request."""
            data.seek(position)

    return Counted(data)


def server_code(error: BaseException) -> str:
    """Return what a server of S3 calls the error; empty where none has answered."""
    return _reply(error)[0]


def is_condition_failed(error: BaseException) -> bool:
    """Whether the server refused because another object is there than the condition says."""
    return server_code(error) == "PreconditionFailed"


def _reply(error: BaseException) -> tuple[str, int]:
    """Return code and status of the reply behind an error."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            told: dict[str, Any] = response
            status = int(told.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return str(told.get("Error", {}).get("Code", "")), status
    return "", 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
