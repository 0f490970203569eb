"""What may be asked of any driver of fsspec, and what is known of one that nothing is known of."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from dtckpt.errors import StorageError

from ...asking import Connection
from ...requests import Requests
from ..listing import listing

Info = dict[str, Any]
"""What a driver tells of an object."""
Condition = dict[str, Any]
"""Arguments that make a request conditional, for ``put`` or ``remove``; empty: it is not."""


class Upload(Protocol):
    """An object that is sent in parts, which nobody sees before it is complete."""

    def send(self, number: int, data: memoryview) -> Any:
        """Send a part, counted from 1; return what ``complete`` is to be told of it.

        The memory is used again as soon as nobody has a view of it.
        """
        ...

    def complete(self, parts: list[Any]) -> None:
        """Make the object of the parts appear."""
        ...

    def abort(self) -> None:
        """Have the server forget all parts."""
        ...

    num_in_flight: int
    """So many parts may be sent at a time."""


class Dialect:
    """A driver, by the coroutines of fsspec's interface if it has them.

    Methods that ask raise what ``Connection.ask`` does.
    """

    extra: ClassVar[str] = ""
    """Of the package, the one that installs the driver."""

    def __init__(self, *, puts_are_atomic: bool = False) -> None:
        self.puts_are_atomic = puts_are_atomic
        """Whether an object that is written by one call appears complete or not at all."""
        self.puts_are_counted = False
        """Whether it is known how often a server was asked to write something."""
        self.puts_are_checked = False
        """Whether the server has compared length and checksum of what it has confirmed."""
        self.streams_are_atomic = False
        """Whether a large object does, too, by ``begin``."""

    def options(self, given: Info, idle: float) -> Info:
        """Return the user's options with what must not be left to defaults.

        ``idle`` is for how many seconds a server may say nothing before another attempt is made.
        """
        return given

    def tame(self, fs: Any, given: Info) -> None:
        """Have a driver that was just made ask only once, unless the user has said otherwise."""

    def check_path(self, path: str) -> None:
        """Raise ``ValueError`` for a path that the driver takes for another one."""
        if "?versionId=" in path:
            raise ValueError(f"bad object name {path!r}: drivers cut it at '?versionId='")

    def only_new(self, fs: Any) -> Condition:
        """Return the condition that there is no object, as far as the driver has any."""
        known = inspect.signature(method(fs, "pipe_file")).parameters
        return {"mode": "create"} if "mode" in known else {}

    def only_same(self, info: Info) -> Condition:
        """Return the condition that the object is the one of ``info``."""
        return {}

    def read(self, fs: Any, path: str, start: int, stop: int) -> Any:
        """Ask for bytes of an object, as many as are there; what is returned is awaited."""
        return method(fs, "cat_file")(path, start=start, end=stop)

    def put(self, fs: Any, path: str, data: bytes, condition: Condition, requests: Requests) -> Any:
        """Write a whole object; what is returned is awaited. ``requests`` counts what is sent."""
        return method(fs, "pipe_file")(path, data, **condition)

    def remove(self, fs: Any, path: str, condition: Condition) -> Any:
        """Delete an object; what is returned is awaited."""
        return method(fs, "rm_file")(path)

    def remove_many(self, connection: Connection, paths: Sequence[str], where: str) -> bool:
        """Delete objects in few requests, missing or not; False where that is not to be had."""
        return False

    def begin(self, connection: Connection, path: str, where: str, size: int, part: int) -> Upload:
        """Begin an object of ``size`` bytes that is sent in parts of ``part`` bytes.

        ``StorageError`` where nobody can, as ``streams_are_atomic`` says.
        """
        raise StorageError(f"cannot create {where}: this driver sends nothing in parts")

    def unfinished(
        self, connection: Connection, path: str, where: str
    ) -> Iterator[tuple[str, str, float | None]]:
        """Yield path, id and time of the beginning of every upload below ``path``, where told."""
        return iter(())

    def forget(self, connection: Connection, path: str, where: str, upload_id: str) -> None:
        """Give up an upload that ``unfinished`` has told of, or none where it tells of none."""

    def info(self, fs: Any, path: str) -> Any:
        """Ask what is told of an object; what is returned is awaited."""
        return method(fs, "info")(path)

    def listing(self, connection: Connection, top: str, where: str, *, deep: bool) -> Info:
        """Return what is told of all below ``top``, by path: of one level, unless it is deep.

        Where objects may be named like folders, the paths of folders end in a slash.
        """
        return listing(connection, top, where, deep=deep)


def method(fs: Any, name: str) -> Any:
    """Return a method of a driver: the coroutine, if it has coroutines."""
    return getattr(fs, f"_{name}" if fs.async_impl else name)
