"""Ways to write a large object through fsspec, by what its file system promises."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dtckpt.errors import ObjectNotFound

from ...base import WriteStream
from ..asking import Connection, is_on_loop
from .dialects.base import Dialect, method
from .parts import Parts

PART_BYTES = 16 << 20
"""Objects up to this size go out in one request, larger ones in parts of it or more."""

# Object stores take 10,000 parts at most.
_MAX_PARTS = 9_000


class MultipartStream(WriteStream):
    """Sends parts as they fill; completing them makes the object appear.

    Of four parts on their way, as on S3 and Azure, and the one that fills come 80 MiB in memory
    for objects up to 140 GiB. Google takes one after the other.
    """

    def __init__(
        self,
        where: str,
        size: int,
        connection: Connection,
        dialect: Dialect,
        path: str,
        check: Callable[[int], None],
    ) -> None:
        """``check(size)`` is called after completion and raises if the store has another size."""
        super().__init__(where, size)
        self._connection = connection
        self._path = path
        self._check = check
        self._is_completed = False
        num_bytes = part_bytes(size)
        upload = dialect.begin(connection, path, where, size, num_bytes)
        self._parts = Parts(upload, num_bytes)
        # A stream that is dropped without an end would leave parts, which are paid for.
        self._guard = weakref.finalize(self, _drop, self._parts, connection.fs)

    def _append(self, view: memoryview) -> None:
        self._parts.write(view)

    def _finish(self) -> None:
        self._parts.close()
        self._is_completed = True
        self._check(self._announced)
        self._guard.detach()

    def _discard(self) -> None:
        self._guard()
        if self._is_completed:
            # It is of another size. What is there else may be another writer's.
            remove = method(self._connection.fs, "rm_file")
            with suppress(ObjectNotFound):
                self._connection.ask("clean up", self._where, lambda: remove(self._path))


class RenameStream(WriteStream):
    """Writes under a hidden name and moves the result; for file systems rather than objects."""

    def __init__(
        self,
        where: str,
        size: int,
        connection: Connection,
        paths: tuple[str, str],
        refuse: Callable[[], None],
        check: Callable[[int], None],
    ) -> None:
        """``paths`` are the hidden one and the final one.

        ``refuse()`` is called just before the move and raises if the name is taken; ``check`` as in
        ``MultipartStream``.
        """
        super().__init__(where, size)
        self._connection = connection
        self._hidden, self._path = paths
        self._refuse = refuse
        self._check = check
        fs = connection.fs

        def begin() -> Any:
            fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            return fs.open(self._hidden, "wb")

        self._file = connection.ask_blocking("create", where, begin)

    def _append(self, view: memoryview) -> None:
        self._connection.ask_blocking("write", self._where, lambda: self._file.write(view))

    def _finish(self) -> None:
        self._connection.ask_blocking("complete", self._where, self._file.close)
        self._refuse()
        move(self._connection, self._where, self._hidden, self._path)
        self._check(self._announced)

    def _discard(self) -> None:
        def clean_up() -> None:
            with suppress(Exception):
                self._file.close()
            with suppress(FileNotFoundError):
                self._connection.fs.rm_file(self._hidden)

        self._connection.ask_blocking("clean up", self._where, clean_up)


def part_bytes(size: int) -> int:
    """The part size for an object of ``size`` bytes: a multiple of 1 MiB."""
    least = -(-size // _MAX_PARTS)
    return max(PART_BYTES, -(-least >> 20) << 20)


def move(connection: Connection, where: str, source: str, target: str) -> None:
    """Rename where the file system does so, else copy and remove."""
    from fsspec.spec import AbstractFileSystem

    fs = connection.fs

    def work() -> None:
        if type(fs).mv is not AbstractFileSystem.mv:
            fs.mv(source, target)
            return
        # The inherited mv takes its paths for patterns.
        fs.cp_file(source, target)
        fs.rm_file(source)

    connection.ask_blocking("complete", where, work)


def _drop(parts: Parts, fs: Any) -> None:
    """Abandon an unfinished upload so that nothing is left of it."""
    if is_on_loop(fs):
        threading.Thread(target=_drop, args=(parts, fs), name="dtckpt-drop", daemon=True).start()
        return
    with suppress(Exception):
        parts.discard()
