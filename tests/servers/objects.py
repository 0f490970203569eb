"""Buckets in memory: objects, and pages of lists of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object."""

    data: bytes
    etag: str
    """Equal for equal bytes, as that of S3 is; without quotes."""
    modified: float
    generation: int
    """Another at every write."""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list."""

    objects: dict[str, Stored]
    folders: list[str]
    """Prefixes up to a delimiter below which there are objects."""
    after: str | None
    """Where the next page begins; None if there is none."""


class Objects:
    """Named objects of named buckets; to be used from one thread, except to look at them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {}
        self._now = now
        self._generations = itertools.count(1)

    def put(self, bucket: str, key: str, data: bytes, etag: str | None = None) -> Stored:
        """Write an object, whatever was there."""
        found = Stored(
            data=data,
            etag=digest(data) if etag is None else etag,
            modified=self._now(),
            generation=next(self._generations),
        )
        self.buckets[bucket][key] = found
        return found

    def page(self, bucket: str, prefix: str, delimiter: str, after: str, limit: int) -> Page:
        """Return up to ``limit`` objects and folders whose names come after ``after``."""
        found: dict[str, Stored | None] = {}
        for key, stored in sorted(self.buckets[bucket].items()):
            if not key.startswith(prefix) or key <= after:
                continue
            first, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = prefix + first + cut if cut else key
            if name != after:
                found.setdefault(name, None if cut else stored)
        shown = dict(itertools.islice(found.items(), limit))
        return Page(
            {name: stored for name, stored in shown.items() if stored is not None},
            [name for name, stored in shown.items() if stored is None],
            list(shown)[-1] if len(shown) < len(found) else None,
        )


@dataclass(frozen=True, slots=True)
class RawObjects:
    """What is below a prefix, without a request."""

    objects: Objects
    bucket: str
    prefix: str

    def put(self, name: str, data: bytes) -> None:
        self.objects.put(self.bucket, f"{self.prefix}/{name}", data)

    def get(self, name: str) -> bytes | None:
        """``None`` if nothing has this name."""
        found = self.objects.buckets[self.bucket].get(f"{self.prefix}/{name}")
        return None if found is None else found.data


def digest(data: bytes) -> str:
    """Return what an ETag shows of the bytes."""
    return xxhash.xxh3_128_hexdigest(data)
