"""Objects as files below a directory of a local or network file system (POSIX)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar, final

from dtckpt.errors import ObjectExists, StorageError

from ..base import Level, ObjectInfo, ReadRequest, Store, WriteStream, check_range, is_before
from ..failures import (
    already_exists,
    changed,
    failing,
    not_found,
    out_of_range,
    reading,
    translated,
)
from ..names import check_component, check_name, check_prefix, is_reserved, join, reserved_name
from .direct import ALIGNMENT, DirectWriter, direct_io_pays
from .posix import (
    link_new,
    locked_directory,
    make_directories,
    preallocate,
    read_at,
    sync_directory,
    write_at,
    written_bytes,
)

_T = TypeVar("_T")

# A directory can be removed by another process between making it and using it.
_OPEN_ATTEMPTS = 8

_NO_FILE = ": what is there is no regular file"

# Smaller objects are written before a probe would have ended.
_DIRECT_BYTES = 32 << 20


@final
class LocalStore(Store):
    """One file per object, safe against crashes and power loss.

    An object is written under a hidden name beside its own (``.{name}.{nonce}.tmp``), flushed,
    linked to its name and made durable by flushing the directory. Linking never replaces, so
    creation is exclusive on every file system with hard links; replacement is ``rename``, one at a
    time in each directory where directories can be locked (``flock``; NFS cannot). Modes
    follow the umask. Reading needs no write permission and opens the file anew each time.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, direct_io: bool | Literal["auto"] = "auto"
    ) -> None:
        """Root the store at ``path`` (``~`` and relative paths are resolved now).

        Nothing is made or checked: the directory appears with the first object. ``direct_io`` says
        whether large objects are written past the page cache; by default a probe of the device
        decides. Where the file system cannot do it they are written as usual.
        """
        if direct_io not in (True, False, "auto"):
            raise ValueError(f"direct_io is True, False or 'auto', got {direct_io!r}")
        self._direct_io: bool | Literal["auto"] = direct_io
        if os.name != "posix":
            raise StorageError(f"cannot open {path}: local storage needs a POSIX system")
        self.url = os.path.abspath(Path(path).expanduser())
        # Directories whose entry in their parent this store has made durable.
        self._durable: set[str] = set()

    def stat(self, name: str) -> ObjectInfo:
        path = self._path(name)
        with reading("stat", path):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise not_found(path, _NO_FILE)
        inode = f"{status.st_dev}:{status.st_ino}"
        return ObjectInfo(name, status.st_size, status.st_mtime, inode)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        path = self._path(name)
        with reading("read", path):
            return _of_one_file(lambda: _read(path, start, stop))

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        path = self._path(name)
        with reading("read", path):
            _of_one_file(lambda: _read_into(path, requests))

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        path = self._path(name)
        with reading("read", path), _opened(path) as (fd, size):
            for request in sorted(requests, key=lambda request: request.offset):
                start, stop = request.offset, request.stop
                if start < stop > size:
                    raise out_of_range(path, start, stop, size)
                filled = read_at(fd, [request.view], start)
                if filled < stop - start:
                    raise out_of_range(path, start, stop, start + filled)
                yield request

    def create(self, name: str, size: int) -> WriteStream:
        path = self._path(name)
        stream = _LocalStream(path, size, overwrite=False)
        if os.path.lexists(path):
            raise already_exists(path)
        stream.open(self._open_unfinished)
        if size >= _DIRECT_BYTES and self._wants_direct(os.path.dirname(path)):
            stream.write_directly()
        return stream

    def create_anew(self, name: str, size: int) -> WriteStream:
        stream = _LocalStream(self._path(name), size, overwrite=True)
        stream.open(self._open_unfinished)
        return stream

    def _wants_direct(self, directory: str) -> bool:
        return direct_io_pays(directory) if self._direct_io == "auto" else self._direct_io

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        path = self._path(name)
        if not overwrite and os.path.lexists(path):
            with failing(certain=True):
                raise already_exists(path)
        self._publish(_LocalStream(path, len(data), overwrite=overwrite), data)

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        path = self._path(name)
        stream = _LocalStream(path, len(data), overwrite=True)
        stream.check = lambda: self._check_unchanged(name, expected)
        self._publish(stream, data)

    def remove(self, name: str, *, expected: bytes) -> None:
        path = self._path(name)
        directory = os.path.dirname(path)
        with reading("delete", path), locked_directory(directory):
            self._check_unchanged(name, expected)
            os.unlink(path)
        with translated("delete", directory):
            self._prune(directory)

    def _publish(self, stream: _LocalStream, data: bytes) -> None:
        try:
            with stream:
                stream.open(self._open_unfinished)
                stream.write(data)
        except StorageError as error:
            # A link that is refused because of another file was not made.
            error.is_certain = not stream.may_stand or isinstance(error, ObjectExists)
            raise

    def _check_unchanged(self, name: str, expected: bytes) -> None:
        if self.read(name) != expected:
            raise changed(self._path(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = (item for item in self._walk(prefix) if not is_reserved(item.name))
        return iter(sorted(found, key=lambda item: item.name))

    def level(self, prefix: str = "") -> Level:
        found = list(self._scan(check_prefix(prefix)))
        objects = (item for item in found if isinstance(item, ObjectInfo))
        return Level(
            tuple(
                sorted((i for i in objects if not is_reserved(i.name)), key=lambda item: item.name)
            ),
            tuple(sorted(item for item in found if isinstance(item, str))),
        )

    def leftovers(self, prefix: str = "", *, before: float | None = None) -> Iterator[str]:
        found = (item for item in self._walk(prefix) if is_reserved(item.name))
        return iter(sorted(item.name for item in found if is_before(item, before)))

    def underway(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in self._walk(prefix):
            if is_reserved(item.name):
                with suppress(OSError):  # it has ended since
                    size = written_bytes(join(self.url, item.name))
                    yield ObjectInfo(item.name, size, item.modified)

    def delete(self, names: Iterable[str]) -> None:
        paths = [join(self.url, check_name(name, reserved=True)) for name in names]
        touched: set[str] = set()
        for path in paths:
            with translated("delete", path):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass  # an aborted stream may have left its directory behind
                except (NotADirectoryError, IsADirectoryError):
                    continue
            touched.add(os.path.dirname(path))
        # The longest first: a directory is looked at after all those within it.
        for directory in sorted(touched, key=len, reverse=True):
            self._prune(directory)

    def substore(self, prefix: str) -> Store:
        return LocalStore(self._path(prefix), direct_io=self._direct_io)

    def sibling(self, name: str) -> Store:
        parent = os.path.dirname(self.url)
        if parent == self.url:
            raise StorageError(f"{self.url} is a root and has nothing beside it")
        return LocalStore(join(parent, check_component(name)), direct_io=self._direct_io)

    def parent(self) -> Store | None:
        around = os.path.dirname(self.url)
        return None if around == self.url else LocalStore(around, direct_io=self._direct_io)

    def _path(self, name: str) -> str:
        return join(self.url, check_name(name))

    def _open_unfinished(self, path: str) -> tuple[int, str]:
        """Make and open a hidden file beside ``path``: its descriptor and its path."""
        directory, base = os.path.split(path)
        attempts = 0
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        while True:
            temporary = os.path.join(directory, reserved_name(base))
            try:
                self._ensure(directory)
                return os.open(temporary, flags, 0o666), temporary
            except FileNotFoundError:
                self._durable.discard(directory)
                attempts += 1
                if attempts == _OPEN_ATTEMPTS:
                    raise

    def _ensure(self, directory: str) -> None:
        """Make ``directory`` durable, with all that lies between it and the root's parent.

        Even a directory that was there may have been made a moment ago by a process that then
        died, so its parent is flushed once by every store that uses it.
        """
        while directory not in self._durable:
            make_directories(directory)
            parent = os.path.dirname(directory)
            try:
                sync_directory(parent)
            except PermissionError:
                # Above the root is no business of ours, and often not readable.
                if directory != self.url:
                    raise
            self._durable.add(directory)
            if directory == self.url:
                return
            directory = parent

    def _prune(self, directory: str) -> None:
        """Remove ``directory`` and its parents as far as they are empty, and flush the rest."""
        with translated("delete", directory):
            while directory != self.url:
                self._durable.discard(directory)
                try:
                    os.rmdir(directory)
                except OSError:
                    break  # not empty, gone already, or not ours to remove
                directory = os.path.dirname(directory)
            with suppress(FileNotFoundError):
                sync_directory(directory)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every regular file below ``prefix``; links to directories are not followed."""
        pending = [check_prefix(prefix)]
        while pending:
            for item in self._scan(pending.pop()):
                if isinstance(item, str):
                    pending.append(item)
                else:
                    yield item

    def _scan(self, below: str) -> Iterator[ObjectInfo | str]:
        """The regular files directly in a directory, and the names of the directories in it."""
        path = join(self.url, below)
        with translated("list", path):
            try:
                entries = list(os.scandir(path))
            except (FileNotFoundError, NotADirectoryError):
                return
            for entry in entries:
                name = join(below, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    yield name
                elif entry.is_file():
                    with suppress(FileNotFoundError):  # deleted since the scan
                        status = entry.stat()
                        # Copies and unpacked archives keep the time of the original.
                        since = max(status.st_mtime, status.st_ctime)
                        yield ObjectInfo(name, status.st_size, since)


class _LocalStream(WriteStream):
    """A hidden file that becomes ``path`` on close."""

    _fd = -1
    _temporary = ""
    _direct: DirectWriter | None = None
    check: Callable[[], None] | None = None
    """Called, if given, just before something is replaced, while no other writer replaces it."""
    may_stand = False
    """Whether the last step has begun: the object may be there although ``close`` raised."""

    def __init__(self, path: str, size: int, *, overwrite: bool) -> None:
        super().__init__(path, size)
        self._path = path
        self._overwrite = overwrite

    def open(self, open_unfinished: Callable[[str], tuple[int, str]]) -> None:
        """Make the hidden file by ``open_unfinished(path)`` and reserve its space."""
        with translated("create", self._path):
            self._fd, self._temporary = open_unfinished(self._path)
        try:
            with translated(f"reserve {self._announced} bytes for", self._path):
                preallocate(self._fd, self._announced)
        except BaseException:
            self.abort()
            raise

    def shorten(self) -> None:
        super().shorten()
        with translated("shorten", self._path):
            os.ftruncate(self._fd, self._size)

    def write_directly(self) -> None:
        """Use direct I/O from now on, if the file system has it."""
        with suppress(OSError):
            self._direct = DirectWriter(self._fd)

    @property
    def alignment(self) -> int:
        return 1 if self._direct is None else ALIGNMENT

    def _append(self, view: memoryview) -> None:
        with translated(f"write {view.nbytes} bytes at {self._size} of", self._path):
            if self._direct is None:
                write_at(self._fd, view, self._size)
            else:
                self._direct.write(view, self._size)

    def _finish(self) -> None:
        with translated(f"flush {self._announced} bytes of", self._path):
            os.fsync(self._fd)
        with translated("complete", self._path):
            self._close_fd()
            if self._overwrite:
                with locked_directory(os.path.dirname(self._path)):
                    if self.check is not None:
                        self.check()
                    self.may_stand = True
                    os.rename(self._temporary, self._path)
            else:
                self.may_stand = True
                link_new(self._temporary, self._path)
            self._temporary = ""
            sync_directory(os.path.dirname(self._path))

    def _discard(self) -> None:
        with translated("clean up", self._temporary or self._where):
            try:
                self._close_fd()
            finally:
                if self._temporary:
                    with suppress(FileNotFoundError):
                        os.unlink(self._temporary)

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_state", "") in ("open", "failed"):  # none where making it failed
            with suppress(StorageError):
                self.abort()


def _of_one_file(read: Callable[[], _T]) -> _T:
    """Call ``read``, again where the file was replaced by another host between open and read.

    A network file system does not keep for this one what another has removed (ESTALE).
    """
    for _ in range(_OPEN_ATTEMPTS - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()


def _read(path: str, start: int, stop: int | None) -> bytes:
    with _opened(path) as (fd, size):
        end = size if stop is None else stop
        if max(start, end) > size:
            raise out_of_range(path, start, stop, size)
        data = os.pread(fd, end - start, start)
        if len(data) < end - start:
            rest = bytearray(end - start - len(data))
            filled = read_at(fd, [memoryview(rest)], start + len(data))
            data += rest[:filled]
        if len(data) < end - start:
            raise out_of_range(path, start, end, start + len(data))
    return data


def _read_into(path: str, requests: Sequence[ReadRequest]) -> None:
    with _opened(path) as (fd, size):
        for run in _adjacent(requests):
            start, stop = run[0].offset, run[-1].stop
            if stop > size:
                raise out_of_range(path, start, stop, size)
            filled = read_at(fd, [request.view for request in run], start)
            if filled < stop - start:
                raise out_of_range(path, start, stop, start + filled)


@contextmanager
def _opened(path: str) -> Generator[tuple[int, int]]:
    """Descriptor and size of the file at ``path``, open for reading."""
    fd = _open_file(path)
    try:
        try:
            status = os.fstat(fd)
        except FileNotFoundError as error:  # so some file systems in user space call it
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
        if not stat.S_ISREG(status.st_mode):
            raise not_found(path, _NO_FILE)
        yield fd, status.st_size
    finally:
        os.close(fd)


def _open_file(path: str) -> int:
    """Open a file for reading, without waiting for the other end of what turns out to be a pipe."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        # A file whose lease another program has to give up first: that is worth waiting for.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise
        return os.open(path, flags)


def _adjacent(requests: Sequence[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """The requests by offset, those that follow one another without a gap together."""
    run: list[ReadRequest] = []
    wanted = (request for request in requests if request.view.nbytes)
    for request in sorted(wanted, key=lambda request: request.offset):
        if run and request.offset != run[-1].stop:
            yield run
            run = []
        run.append(request)
    if run:
        yield run
