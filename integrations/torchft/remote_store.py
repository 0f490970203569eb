"""What a ``SnapshotServer`` of another process serves, as a store that is only read."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlsplit

from dtckpt.errors import ObjectNotFound, StorageError

from ...storage.base import ObjectInfo, ReadRequest
from ...storage.read_only import ReadOnlyStore
from .serving import WRONG_STEP

_PAUSE_SECONDS = 0.05
"""Between two questions whether the other one has got to a step."""


class RemoteStore(ReadOnlyStore):
    """The objects of one step of a server; StorageError once ``deadline`` is over.

    A step that is not served yet is waited for until then.
    """

    what = "the state of a replica, of which objects are only read"

    def __init__(self, address: str, step: int, deadline: float) -> None:
        self.url = f"{address}/{step}"
        self._host = urlsplit(address).netloc
        self._root = f"/{step}"
        self._deadline = deadline
        self._of_thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def stat(self, name: str) -> ObjectInfo:
        """Size of an object."""
        response = self._ask("HEAD", name)
        response.read()  # nothing, after which the connection is free
        return ObjectInfo(name, int(response.headers["Content-Length"]))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of an object."""
        end = self.stat(name).size if stop is None else stop
        if start == end:
            return b""
        held = bytearray(end - start)
        self._fill(name, start, memoryview(held))
        return bytes(held)

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        """Fill every buffer, one after the other."""
        for request in requests:
            if request.view.nbytes:
                self._fill(name, request.offset, request.view)

    def _fill(self, name: str, start: int, view: memoryview) -> None:
        response = self._ask("GET", name, f"bytes={start}-{start + len(view) - 1}")
        done = 0
        try:
            while done < len(view) and (got := response.readinto(view[done:])):
                done += got
        except OSError as error:
            raise self._failed(name, error) from error
        if done < len(view):
            raise StorageError(
                f"{self.url}/{name}: expected bytes {start} to {start + len(view)}, got {done} of "
                "them. The replica has other state by now, or is gone"
            )

    def _ask(self, method: str, name: str, wanted: str = "") -> http.client.HTTPResponse:
        headers = {"Range": wanted} if wanted else {}
        while True:
            try:
                connection = self._connection()
                connection.request(method, f"{self._root}/{quote(name)}", headers=headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._of_thread.connection = None
                raise self._failed(name, error) from error
            if response.status < 300:
                return response
            response.read()
            if response.status != WRONG_STEP:
                raise ObjectNotFound(f"{self.url}/{name}: {response.reason}")
            if time.monotonic() + _PAUSE_SECONDS > self._deadline:
                raise StorageError(f"{self.url}: timed out waiting for it; {response.reason} there")
            time.sleep(_PAUSE_SECONDS)

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection, whose answers have to be there in time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        kept: http.client.HTTPConnection | None = getattr(self._of_thread, "connection", None)
        if kept is None:
            kept = self._of_thread.connection = http.client.HTTPConnection(self._host, timeout=left)
            self._connections.append(kept)
        if kept.sock is not None:
            kept.sock.settimeout(left)
        return kept

    def _failed(self, name: str, error: Exception) -> StorageError:
        self._of_thread.connection = None
        return StorageError(f"{self.url}/{name}: cannot be read from the replica: {error}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Raise StorageError: a manifest names all that is there."""
        self.refuse()

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.close()
