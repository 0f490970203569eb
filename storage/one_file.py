"""A file by itself as a store: what is opened where somebody names a file, not a directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import ObjectInfo, ReadRequest, Store
from .failures import ObjectNotFound
from .names import join
from .read_only import ReadOnlyStore


class OneFile(ReadOnlyStore):
    """The object ``name`` of another store, and nothing else; only to be read."""

    what = "a file of another program, which is only read"

    def __init__(self, around: Store, name: str) -> None:
        self.name = name
        self.url = join(around.url, name)
        self.around = around
        """The store that the file is in."""
        self.request_bytes = around.request_bytes

    def stat(self, name: str) -> ObjectInfo:
        """Size of the file, and when it was last written to."""
        return self._of(name).stat(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the file."""
        return self._of(name).read(name, start, stop)

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        """Fill every buffer from the file."""
        self._of(name).read_into(name, requests)

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        """Fill every buffer from the file, one after the other."""
        return self._of(name).read_each(name, requests)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The file."""
        return iter(()) if prefix else iter((self.stat(self.name),))

    def close(self) -> None:
        """Release what the other store holds open."""
        self.around.close()

    def _of(self, name: str) -> Store:
        if name != self.name:
            raise ObjectNotFound(f"{self.url} is a file, in which no {name} can be")
        return self.around
