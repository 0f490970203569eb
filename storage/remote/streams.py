"""Ways to write a large object through fsspec, by what its file system promises."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..base import WriteStream
from ..failures import translated
from .s3_parts import PartsFile

PART_BYTES = 16 << 20
"""Objects up to this size go out in one request, larger ones in parts of it or more."""

# Object stores take 10,000 parts at most.
_MAX_PARTS = 9_000


class MultipartStream(WriteStream):
    """Sends parts as they fill; completing them makes the object appear.

    On S3 up to ``NUM_PARTS`` of them are in flight, which with the one that fills makes 80 MiB for
    objects up to 140 GiB. Other drivers decide for themselves; most send one after the other.
    """

    def __init__(
        self, where: str, size: int, fs: Any, path: str, check: Callable[[int], None]
    ) -> None:
        """``check(size)`` is called after completion and raises if the store has another size."""
        super().__init__(where, size)
        self._fs = fs
        self._path = path
        self._check = check
        self._completing = False
        self._part_bytes = part_bytes(size)
        with translated("create", where):
            self._file = _open_upload(fs, path, self._part_bytes)
        # An fsspec file completes itself when it is collected: a stream that is dropped without
        # an end would leave a truncated object. The finalizer keeps the file alive until it ran.
        self._guard = weakref.finalize(self, _drop, self._file)

    def _append(self, view: memoryview) -> None:
        with translated("write", self._where):
            for start in range(0, view.nbytes, self._part_bytes):
                self._file.write(view[start : start + self._part_bytes])

    def _finish(self) -> None:
        with translated("complete", self._where):
            self._completing = True
            self._file.close()
            self._check(self._announced)
        self._guard.detach()

    def _discard(self) -> None:
        self._guard()
        if self._completing:
            # Completed perhaps, but not known to be right.
            with translated("clean up", self._where), suppress(FileNotFoundError):
                self._fs.rm_file(self._path)


class RenameStream(WriteStream):
    """Writes under a hidden name and moves the result; for file systems rather than objects."""

    def __init__(
        self,
        where: str,
        size: int,
        fs: Any,
        paths: tuple[str, str],
        refuse: Callable[[], None],
        check: Callable[[int], None],
    ) -> None:
        """``paths`` are the hidden one and the final one.

        ``refuse()`` is called just before the move and raises if the name is taken; ``check`` as in
        ``MultipartStream``.
        """
        super().__init__(where, size)
        self._fs = fs
        self._hidden, self._path = paths
        self._refuse = refuse
        self._check = check
        with translated("create", where):
            fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._file = fs.open(self._hidden, "wb")

    def _append(self, view: memoryview) -> None:
        with translated("write", self._where):
            self._file.write(view)

    def _finish(self) -> None:
        with translated("complete", self._where):
            self._file.close()
            self._refuse()
            move(self._fs, self._hidden, self._path)
            self._check(self._announced)

    def _discard(self) -> None:
        with translated("clean up", self._where):
            with suppress(Exception):
                self._file.close()
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._hidden)


def part_bytes(size: int) -> int:
    """The part size for an object of ``size`` bytes: a multiple of 1 MiB."""
    least = -(-size // _MAX_PARTS)
    return max(PART_BYTES, -(-least >> 20) << 20)


def move(fs: Any, source: str, target: str) -> None:
    """Rename where the file system does so, else copy and remove."""
    from fsspec.spec import AbstractFileSystem

    if type(fs).mv is not AbstractFileSystem.mv:
        fs.mv(source, target)
        return
    # The inherited mv takes its paths for patterns.
    fs.cp_file(source, target)
    fs.rm_file(source)


def _open_upload(fs: Any, path: str, num_bytes: int) -> Any:
    """A file that appears when it is closed, not before, written in parts of ``num_bytes``."""
    if hasattr(fs, "call_s3"):
        return PartsFile(fs, path, num_bytes)
    return fs.open(path, "wb", block_size=num_bytes)


def _drop(file: Any) -> None:
    """Abandon an unfinished upload so that nothing can complete it any more."""
    with suppress(Exception):
        file.discard()
    file.closed = True
