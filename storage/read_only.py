"""What stores have in common that are only read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NoReturn

from .base import Store, WriteStream
from .failures import StorageError


class ReadOnlyStore(Store):
    """A store that refuses to be changed, and is by itself: it has no places in it or beside it."""

    what: ClassVar[str]
    """What it is, in the error of what it refuses."""

    def create(self, name: str, size: int) -> WriteStream:
        """Raise StorageError."""
        self.refuse()

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        """Raise StorageError."""
        self.refuse()

    def delete(self, names: Iterable[str]) -> None:
        """Raise StorageError."""
        self.refuse()

    def substore(self, prefix: str) -> Store:
        """Raise StorageError."""
        self.refuse()

    def sibling(self, name: str) -> Store:
        """Raise StorageError."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise StorageError, which says why."""
        raise StorageError(f"{self.url} is {self.what}")
