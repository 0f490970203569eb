"""``peers://job``: objects in the memory of the job's agents, one process a host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import final

from dtckpt.errors import StorageError

from ..base import ObjectInfo, ReadRequest, Store, WriteStream, check_range
from ..failures import already_exists, changed, failing, out_of_range
from ..names import check_component, check_name, check_prefix, join
from .crew import Crew, crew_of
from .job import job_of
from .opened import OpenedObjects
from .places import Place, Places
from .publishing import Publisher
from .reading import Replaced, read_object
from .stream import PeersStream

SCHEME = "peers://"
OPTIONS = {"agents", "registry", "token", "host", "copies", "keep", "budget_bytes", "timeout"}
"""What a store takes besides its URL."""
_READ_ATTEMPTS = 16
"""So often an object that others replace is read anew."""


@final
class PeersStore(Store):
    """Objects held by agents, which outlive the ranks that wrote them (docs/memory-tier.md).

    What is written goes to the agent of this host, which is started if it is missing, and to
    ``copies - 1`` others, the next by the names of their hosts. What is published goes to all. It
    is read from any agent that holds it, that of this host first, out of its memory. Once
    a ``manifest.json`` has been published in a directory, agents let the directories of this kind
    beside it go, but for the newest ``keep``.

    An object is as durable as ``copies`` agents are: nothing is ever on a disk.
    """

    def __init__(
        self,
        url: str,
        *,
        agents: Sequence[str] | None = None,
        registry: str | os.PathLike[str] | None = None,
        token: str | None = None,
        host: str | None = None,
        copies: int = 2,
        keep: int = 1,
        budget_bytes: int = 0,
        timeout: float = 30.0,
    ) -> None:
        """Root the store at ``peers://job`` or ``peers://job/prefix``. Nothing is started yet.

        ``agents`` are addresses (``host:port``) and ``registry`` a directory that hosts share; by
        one of them agents of other hosts are known. ``token`` is the secret of the job and
        ``host`` the name of this host. All four come from the environment by default. ``copies``
        is how many hosts hold an object, as far as there are so many; ``keep`` how many
        checkpoints stay; ``budget_bytes`` what an agent that has to be started may hold. An agent
        that makes no progress for ``timeout`` seconds is given up.
        """
        if copies < 1 or keep < 1:
            raise ValueError(f"copies and keep are 1 or more, got {copies} and {keep}")
        if not url.startswith(SCHEME):
            raise ValueError(f"bad URL {url!r} of a store in memory: expected peers://job")
        name, _, prefix = url.removeprefix(SCHEME).rstrip("/").partition("/")
        job = job_of(
            name, host=host, agents=agents, registry=registry, token=token, timeout=timeout
        )
        crew = crew_of(job)
        self._budget_bytes = budget_bytes
        self._num_copies = copies
        self._publisher = Publisher(crew, copies, keep)
        self._root_at(crew, check_prefix(prefix))

    def _root_at(self, crew: Crew, prefix: str) -> None:
        self.url = join(f"{SCHEME}{crew.job.name}", prefix)
        self._crew = crew
        self._prefix = prefix
        self._places = Places(crew)
        self._opened = OpenedObjects()

    def stat(self, name: str) -> ObjectInfo:
        place = self._find(name)
        return ObjectInfo(name, place.size, place.modified)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        for _ in range(_READ_ATTEMPTS):
            place = self._find(name)
            end = place.size if stop is None else stop
            if max(start, end) > place.size:
                raise out_of_range(self._where(name), start, stop, place.size)
            data = bytearray(end - start)
            with suppress(Replaced):
                for _ in self._reads(name, [ReadRequest(start, data)], place):
                    pass
                return bytes(data)
        raise Replaced(f"cannot read {self._where(name)}: it is replaced again and again")

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        for _ in self._reads(name, requests):
            pass

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        return self._reads(name, requests)

    def _reads(
        self, name: str, requests: Sequence[ReadRequest], at: Place | None = None
    ) -> Iterator[ReadRequest]:
        key, where = self._key(name), self._where(name)
        return read_object(where, key, requests, self._places, self._opened, at)

    def create(self, name: str, size: int) -> WriteStream:
        key, where = self._key(name), self._where(name)
        if size < 0:
            raise ValueError(f"bad object size {size} for {where}: expected 0 or more")
        self._crew.start_own(self._budget_bytes)
        if self._places.find(key) is not None:
            raise already_exists(where)
        return PeersStream(where, key, size, self._crew, self._num_copies)

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        key, where = self._key(name), self._where(name)
        with failing(certain=True):
            self._crew.start_own(self._budget_bytes)
            place = self._places.find(key)
            if place is not None and not overwrite:
                raise already_exists(where)
        above = 0 if place is None else place.stamp
        self._publisher.put(where, key, data, above=above, is_new=not overwrite)

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        with failing(certain=True):
            self._crew.start_own(self._budget_bytes)
            place = self._unchanged(name, expected)
        self._publisher.swap(self._where(name), place, data)

    def remove(self, name: str, *, expected: bytes) -> None:
        self._publisher.remove(self._where(name), self._unchanged(name, expected))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = len(self._prefix) + 1 if self._prefix else 0
        places = self._places.below(join(self._prefix, check_prefix(prefix)))
        return iter([ObjectInfo(p.key[start:], p.size, p.modified) for p in places])

    def delete(self, names: Iterable[str]) -> None:
        keys = [join(self._prefix, check_name(name, reserved=True)) for name in names]
        for key in keys:
            self._places.forget(key)
        if keys:
            self._crew.ask_all("delete", names=keys, up_to=None)

    def substore(self, prefix: str) -> Store:
        return self._other(join(self._prefix, check_name(prefix)))

    def sibling(self, name: str) -> Store:
        around, _, own = self._prefix.rpartition("/")
        if not own:
            raise StorageError(f"{self.url} is a root and has nothing beside it")
        return self._other(join(around, check_component(name)))

    def close(self) -> None:
        """Let go of the memory of agents that was opened to be read."""
        self._opened.clear()

    def _other(self, prefix: str) -> PeersStore:
        other = PeersStore.__new__(PeersStore)
        other._budget_bytes = self._budget_bytes
        other._num_copies = self._num_copies
        other._publisher = self._publisher
        other._root_at(self._crew, prefix)
        return other

    def _key(self, name: str) -> str:
        return join(self._prefix, check_name(name))

    def _where(self, name: str) -> str:
        return join(self.url, name)

    def _find(self, name: str) -> Place:
        place = self._places.find(self._key(name))
        if place is None:
            raise self._places.missing(self._where(name))
        return place

    def _unchanged(self, name: str, expected: bytes) -> Place:
        """Return where an object is that holds exactly ``expected``."""
        place = self._find(name)
        if self.read(name) != expected:
            raise changed(self._where(name))
        return place
