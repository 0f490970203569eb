"""An object whose bytes are in memory: nobody asks the store for them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import ObjectInfo, ReadRequest, Store, check_range
from .failures import out_of_range
from .names import join
from .read_only import ReadOnlyStore


class HeldObject(ReadOnlyStore):
    """The object ``name`` of another store with all of its bytes; only to be read."""

    what = "an object that was read, and is only read again"

    def __init__(self, around: Store, name: str, data: memoryview) -> None:
        self.url = around.url
        self.request_bytes = around.request_bytes
        self._around = around
        self._name = name
        self._data = data

    def stat(self, name: str) -> ObjectInfo:
        """Ask the other store: the object may have changed since."""
        return self._around.stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the object, without a request; of others as the other store has them."""
        if name != self._name:
            return self._around.read(name, start, stop)
        check_range(start, stop)
        end = len(self._data) if stop is None else stop
        if max(start, end) > len(self._data):
            raise out_of_range(join(self.url, name), start, stop, len(self._data))
        return bytes(self._data[start:end])

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        """Fill every buffer, as ``read`` does."""
        for request in requests:
            request.view[:] = self.read(name, request.offset, request.stop)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """What the other store has."""
        return self._around.list(prefix)
