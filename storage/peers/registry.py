"""Where agents leave word of themselves: a directory that all hosts of a job share.

Each has a file there that says where it listens. It goes when the agent ends by itself; that of one
that was killed stays, so that others can say which host is missing, until an agent starts on that
host again or a day has passed.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

from dtckpt.errors import StorageError

from ..local.store import LocalStore

BEAT_SECONDS = 600.0
"""How often an agent renews its word."""
_FORGOTTEN_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What an agent says of itself."""

    host: str
    addresses: tuple[tuple[str, int], ...]

    def to_bytes(self) -> bytes:
        """Return JSON."""
        return json.dumps({"host": self.host, "addresses": self.addresses}).encode()


class Registry:
    """The entries of one job."""

    def __init__(self, directory: str, job: str) -> None:
        self._store = LocalStore(directory).substore(job)

    def enter(self, entry: Entry) -> None:
        """Leave word, in place of what an earlier agent of the host has left."""
        self._store.publish(f"{entry.host}.json", entry.to_bytes(), overwrite=True)

    def leave(self, entry: Entry) -> None:
        """Take it back, unless another agent of the host has come since."""
        with suppress(StorageError):
            self._store.remove(f"{entry.host}.json", expected=entry.to_bytes())

    def entries(self) -> list[Entry]:
        """Return what agents have left, but for those that have not been heard of for a day."""
        found: list[Entry] = []
        since = time.time() - _FORGOTTEN_SECONDS
        for info in self._store.list():
            if not info.name.endswith(".json") or (info.modified or since) < since:
                continue
            with suppress(StorageError, ValueError, TypeError, KeyError):  # gone, or not ours
                told = json.loads(self._store.read(info.name))
                addresses = tuple((str(host), int(port)) for host, port in told["addresses"])
                found.append(Entry(str(told["host"]), addresses))
        return found
