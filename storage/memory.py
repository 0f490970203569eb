"""A store in the memory of this process: for tests, dry runs and small states."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import final

from dtckpt.errors import StorageError

from .base import ObjectInfo, ReadRequest, Store, WholeStream, WriteStream, check_range
from .failures import already_exists, changed, failing, not_found, out_of_range
from .names import check_component, check_name, check_prefix, join

_numbers = itertools.count(1)


@final
class MemoryStore(Store):
    """Objects in a dictionary, shared with every substore; gone when the process ends.

    ``objects`` is the dictionary to use, from full name to bytes; a fresh one by default. Its
    ``url`` cannot be opened again.
    """

    def __init__(self, objects: MutableMapping[str, bytes] | None = None) -> None:
        self.url = f"in-process://{next(_numbers)}"
        self._objects: MutableMapping[str, bytes] = {} if objects is None else objects
        self._lock = threading.Lock()
        self._prefix = ""

    def stat(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, len(self._get(name)))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        data = self._get(name)
        if max(start, stop or 0) > len(data):
            raise out_of_range(join(self.url, name), start, stop, len(data))
        return data[start:stop]

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        data = self._get(name)
        for request in requests:
            if request.view.nbytes and request.stop > len(data):
                where = join(self.url, name)
                raise out_of_range(where, request.offset, request.stop, len(data))
            request.view[:] = data[request.offset : request.stop]

    def create(self, name: str, size: int) -> WriteStream:
        where = join(self.url, check_name(name))
        stream = WholeStream(where, size, lambda data: self.publish(name, data, overwrite=False))
        if self.exists(name):
            raise already_exists(where)
        return stream

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        key = self._key(name)
        with self._lock, failing(certain=True):
            if not overwrite and key in self._objects:
                raise already_exists(join(self.url, name))
            self._objects[key] = bytes(data)

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        with self._lock, failing(certain=True):
            self._objects[self._key_of(name, expected)] = bytes(data)

    def remove(self, name: str, *, expected: bytes) -> None:
        with self._lock:
            del self._objects[self._key_of(name, expected)]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        root = join(self._prefix, check_prefix(prefix))
        below = f"{root}/" if root else ""
        start = len(self._prefix) + 1 if self._prefix else 0
        with self._lock:
            found = [(key, len(data)) for key, data in self._objects.items()]
        return iter(
            [ObjectInfo(key[start:], n) for key, n in sorted(found) if key.startswith(below)]
        )

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._key(name) for name in names]
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def substore(self, prefix: str) -> Store:
        return self._other(join(self.url, prefix), self._key(prefix))

    def sibling(self, name: str) -> Store:
        parent, _, own = self._prefix.rpartition("/")
        if not own:
            raise StorageError(f"{self.url} is a root and has nothing beside it")
        url = join(self.url.rpartition("/")[0], check_component(name))
        return self._other(url, join(parent, name))

    def parent(self) -> Store | None:
        around, _, own = self._prefix.rpartition("/")
        return self._other(self.url.rpartition("/")[0], around) if own else None

    def _other(self, url: str, prefix: str) -> MemoryStore:
        other = MemoryStore(self._objects)
        other.url, other._prefix, other._lock = url, prefix, self._lock
        return other

    def _key(self, name: str) -> str:
        return join(self._prefix, check_name(name))

    def _key_of(self, name: str, expected: bytes) -> str:
        key = self._key(name)
        found = self._objects.get(key)
        if found is None:
            raise not_found(join(self.url, name))
        if found != expected:
            raise changed(join(self.url, name))
        return key

    def _get(self, name: str) -> bytes:
        key = self._key(name)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            raise not_found(join(self.url, name))
        return data
