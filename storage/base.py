"""The interface of every store: named, immutable objects made of bytes.

A store holds objects under names (``names``). It reads exact ranges, streams new objects of known
size, publishes small ones atomically, lists and deletes. It knows nothing of tensors.

========================  ====================================================================
concurrency               what may happen
========================  ====================================================================
``Store``                 every method may be called from any thread at any time
``WriteStream``           belongs to one thread; streams of one store are independent
``read_into``             may fill the buffers in any order and from several threads of its own
``WriteStream.write``     may hand the bytes to background transfers, but only as its own copy
========================  ====================================================================

Visibility: an object appears under its name complete or not at all. A failed ``close`` or
``publish`` leaves nothing, except that when its very last step fails (the reply was lost, the
directory could not be flushed) the complete object may be there, or appear later. It is never
partial. The error's ``is_certain`` says that nothing came of it nor will.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from dtckpt.errors import ObjectNotFound, StorageError

from .failures import changed, failing
from .names import join

if TYPE_CHECKING:
    from typing_extensions import Buffer


def byte_view(data: Buffer) -> memoryview:
    """``data`` as a flat view of bytes, without a copy; ``ValueError`` if it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("the buffer must be C-contiguous")
    if view.nbytes == 0:
        return view if view.ndim == 1 and view.format == "B" else memoryview(bytearray())
    return view.cast("B")


def check_range(start: int, stop: int | None) -> None:
    """Raise ``ValueError`` unless ``0 <= start <= stop`` (``None``: the end)."""
    if start < 0 or (stop is not None and stop < start):
        raise ValueError(f"bad byte range {start}:{stop}: expected 0 <= start <= stop")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store tells of an object without reading it."""

    name: str
    """Relative to the store that was asked."""
    size: int
    """In bytes."""
    modified: float | None = field(default=None, compare=False)
    """When it was last written to, in seconds since 1970; None where the store does not tell.

    It is as exact as the store is: to a tick of the clock on a local disk, to a second in many
    object stores. What a listing tells of a local file is when it was put here, if that is later.
    """
    identity: str = field(default="", compare=False)
    """What tells the object from one of the same name that replaces it: the inode of a local file.

    Empty where the store does not tell.
    """


@dataclass(frozen=True, slots=True)
class Level:
    """What lies directly below a name: one level of a listing."""

    objects: tuple[ObjectInfo, ...]
    folders: tuple[str, ...]
    """Names, relative to the store that was asked, below which there are objects, or were; a
    folder of a file system may be empty."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """Fill ``buffer`` with the object's bytes from ``offset`` on.

    The buffer is anything that gives a writable, C-contiguous ``memoryview``; ``ValueError`` if it
    does not.
    """

    offset: int
    """Of the first byte in the object."""
    buffer: Buffer
    view: memoryview = field(init=False, repr=False)
    """The buffer as flat bytes; its length is the number of bytes to read."""

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"bad read offset {self.offset}: expected 0 or more")
        if memoryview(self.buffer).readonly:
            raise ValueError("the buffer of a read request must be writable")
        object.__setattr__(self, "view", byte_view(self.buffer))

    @property
    def stop(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.view.nbytes


def is_before(item: ObjectInfo, time: float | None) -> bool:
    """Whether an object was, as far as is known, not written to after ``time`` (None: any).

    Stores tell times in steps, of up to a second: what is as old as ``time`` is old enough.
    """
    return time is None or (item.modified is not None and item.modified <= time)


class WriteStream(ABC):
    """A new object being written, front to back, in exactly the announced number of bytes.

    Who does not know how many it will be announces the most, and says by ``shorten`` where it ends.

    A context manager: leaving the block normally closes, leaving it by any exception (Ctrl-C too)
    aborts. After a failed ``write`` nothing but ``abort`` makes sense; ``close`` then raises.

    Subclasses supply ``_append``, ``_finish`` and ``_discard``.
    """

    def __init__(self, where: str, announced: int) -> None:
        """``where`` is for messages. ``ValueError`` if ``announced`` (bytes) is negative."""
        self._where = where
        self._announced = announced
        self._size = 0
        self._state: Literal["open", "failed", "closed", "aborted"] = "open"
        if announced < 0:
            raise ValueError(f"bad object size {announced} for {where}: expected 0 or more")

    @property
    def size(self) -> int:
        """The number of bytes written so far."""
        return self._size

    @property
    def alignment(self) -> int:
        """Pieces whose address, position and length are multiples of it are not copied again.

        It is 1 where it does not matter. Pieces that are not aligned are always right, only slower.
        """
        return 1

    def write(self, data: Buffer) -> None:
        """Append ``data``; on return the caller may reuse its buffer.

        Raises ``StorageError`` at once when that exceeds the announced size.
        """
        view = byte_view(data)
        if self._state != "open":
            raise StorageError(f"cannot write to {self._where}: the stream is {self._state}")
        if self._size + view.nbytes > self._announced:
            self._state = "failed"
            raise self._wrong_size(self._size + view.nbytes)
        try:
            self._append(view)
        except BaseException:
            self._state = "failed"
            raise
        self._size += view.nbytes

    def shorten(self) -> None:
        """Let the object end here: from now on the bytes written so far are those announced.

        Raises ``StorageError`` if a write has failed or the stream has ended.
        """
        if self._state != "open":
            raise StorageError(f"cannot shorten {self._where}: the stream is {self._state}")
        self._announced = self._size

    def close(self) -> None:
        """Complete the object: on return it is durable and visible under its name.

        Raises ``ObjectExists`` if another writer took the name, ``StorageError`` if the bytes
        written are not as many as announced or the store failed. Closing again does nothing.
        """
        if self._state == "closed":
            return
        if self._state == "aborted":
            raise StorageError(f"cannot close {self._where}: the stream was aborted")
        refusal: StorageError | None = None
        if self._state == "failed":
            refusal = StorageError(f"cannot close {self._where}: an earlier write failed")
        elif self._size != self._announced:
            refusal = self._wrong_size(self._size)
        if refusal is not None:
            self._abort_because(refusal)
            raise refusal
        try:
            self._finish()
        except BaseException as error:
            self._abort_because(error)
            raise
        self._state = "closed"

    def abort(self) -> None:
        """Give up: nothing is left under the name. Does nothing after ``close`` or ``abort``."""
        if self._state in ("open", "failed"):
            self._state = "aborted"
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abort_because(error)
        elif self._state != "aborted":
            self.close()

    def _abort_because(self, error: BaseException) -> None:
        """Abort without hiding ``error`` behind a failure to clean up."""
        try:
            self.abort()
        except Exception as second:
            error.add_note(f"and cleaning up failed: {second}")

    def _wrong_size(self, got: int) -> StorageError:
        return StorageError(
            f"cannot complete {self._where}: {self._announced} bytes were announced, {got} written"
        )

    @abstractmethod
    def _append(self, view: memoryview) -> None:
        """Take the bytes of ``view``, which stays valid only during the call."""

    @abstractmethod
    def _finish(self) -> None:
        """Make the object durable and visible; every announced byte has been appended."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove every trace of the object; also called after ``_finish`` raised."""


class WholeStream(WriteStream):
    """Keeps the bytes and hands them to ``put`` on close."""

    def __init__(self, where: str, size: int, put: Callable[[bytes], None]) -> None:
        super().__init__(where, size)
        self._put = put
        self._data = bytearray()

    def _append(self, view: memoryview) -> None:
        self._data += view

    def _finish(self) -> None:
        # Drivers differ in what they accept; bytes is what they all do.
        self._put(bytes(self._data))

    def _discard(self) -> None:
        self._data = bytearray()


class Store(ABC):
    """Objects under one root (a directory, a bucket prefix). Usable as a context manager.

    Every method raises ``ValueError`` for impossible arguments before any I/O, and ``StorageError``
    or its subclasses ``ObjectNotFound`` and ``ObjectExists`` when the storage fails.
    """

    url: str
    """The root, canonical and without secrets: for messages, and to open the store again."""
    request_bytes: int = 4 << 10
    """How many bytes cost about as much as a request: it is better to read over fewer."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Size of one object, and when it was last written to, as it is now, not from any cache.

        ``ObjectNotFound`` if there is none (a directory is none).
        """

    def exists(self, name: str) -> bool:
        """Whether the object is there now, not from any cache."""
        try:
            self.stat(name)
        except ObjectNotFound:
            return False
        return True

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Exactly the bytes ``start:stop`` (``None``: to the end); never fewer.

        ``StorageError`` naming the range and the size if the object ends before ``stop``.
        """

    def read_start(self, name: str, most: int) -> bytes:
        """The first ``most`` bytes, or all if there are fewer; in one request where it can be.

        For what carries a digest: where the size is not asked for, a storage that hands out fewer
        bytes than there are is not found out.
        """
        size = self.stat(name).size
        while True:
            try:
                return self.read(name, 0, min(size, most))
            except ObjectNotFound:
                raise
            except StorageError:
                before, size = size, self.stat(name).size
                if size >= before:  # else a shorter one has taken its place in between
                    raise

    @abstractmethod
    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        """Fill every buffer exactly, or raise.

        The order of the reads is free, and so is their parallelism. Buffers may not overlap one
        another; ranges may. An empty buffer asks nothing of the object. After an error the
        contents of all buffers are undefined.
        """

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        """Do what ``read_into`` does, and yield every request as soon as its buffer is filled.

        The caller looks at the bytes while they are still in the processor's cache. A store that
        can fill one buffer after the other overrides this; it must not touch a buffer again that
        it has yielded. The order is free. Closing the iterator early ends the reading.
        """
        self.read_into(name, requests)
        yield from requests

    @abstractmethod
    def create(self, name: str, size: int) -> WriteStream:
        """Begin a new object of exactly ``size`` bytes; nothing is visible before its ``close``.

        The stream may say later that it has fewer: ``WriteStream.shorten``.
        Never overwrites: ``ObjectExists`` if the name is taken, here or, where that costs a request
        or another writer took it meanwhile, from ``close``. Space is reserved here where the store
        can do so.
        """

    def create_anew(self, name: str, size: int) -> WriteStream:
        """``create`` that takes the place of what is there, if anything is, on ``close``.

        Till then, and if it is aborted, that stays. A store that can do so without holding all of
        it in memory, as this does, overrides this.
        """
        where = join(self.url, name)
        return WholeStream(where, size, lambda data: self.publish(name, data, overwrite=True))

    @abstractmethod
    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        """Write a small object atomically: readers see nothing, or the old one, or all of this.

        Durable on return. Without ``overwrite`` it raises ``ObjectExists`` if the name is taken;
        of several racing writers exactly one succeeds where the store has conditional writes.
        A store whose replies can be lost reads and compares after a failure, so racers that must
        tell who won publish different bytes; where it has no conditional writes, they read back.
        """

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        """``publish`` in place of an object that holds exactly the bytes ``expected``.

        ``ObjectExists`` if it holds others by now, ``ObjectNotFound`` if there is none. Of several
        racing writers exactly one succeeds where the store can compare and write in one step; where
        not, as here, it compares, then writes.
        """
        with failing(certain=True):
            if self.read(name) != expected:
                raise changed(join(self.url, name))
        self.publish(name, data, overwrite=True)

    def remove(self, name: str, *, expected: bytes) -> None:
        """Delete an object that holds exactly the bytes ``expected``; errors as of ``replace``."""
        if self.read(name) != expected:
            raise changed(join(self.url, name))
        self.delete([name])

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below ``prefix`` (a directory-like name; ``""`` is the root), sorted by name.

        Recursive; ``"a"`` means ``a/...``, not ``ab``. Unfinished writes are not listed.
        """

    def level(self, prefix: str = "") -> Level:
        """What is directly below ``prefix``, sorted by name, without looking any deeper.

        Costs one listing of one level, whatever the folders hold, where the storage can do so; it
        lists all, as here, where it cannot. Unfinished writes are not listed.
        """
        start = len(prefix) + 1 if prefix else 0
        found = list(self.list(prefix))
        objects = (info for info in found if "/" not in info.name[start:])
        firsts = (info.name[start:].partition("/") for info in found)
        folders = dict.fromkeys(join(prefix, first) for first, slash, _ in firsts if slash)
        return Level(tuple(objects), tuple(sorted(folders)))

    def leftovers(self, prefix: str = "", *, before: float | None = None) -> Iterator[str]:
        """Names of unfinished writes below ``prefix``, fit for ``delete``, uploads in parts too.

        Writers that are still alive are among them: ask only where none can be, or for those that
        were last written to, as far as is known, ``before`` a time in seconds since 1970.
        """
        return iter(())

    def underway(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Unfinished writes below ``prefix`` that can be told, with the bytes written so far."""
        return iter(())

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; a missing one is no error. Names must all be valid, or none is removed.

        Directories that this empties are removed too, never the root.
        """

    @abstractmethod
    def substore(self, prefix: str) -> Store:
        """The store of the same kind whose root is ``prefix`` within this one."""

    @abstractmethod
    def sibling(self, name: str) -> Store:
        """The store whose root is called ``name`` beside this one's root, in the same parent.

        ``name`` is a single component. ``StorageError`` if this root has no parent, as that of a
        bucket has not.
        """

    def parent(self) -> Store | None:
        """The store around this one's root; None where there is none, as around a bucket."""
        return None

    def close(self) -> None:
        """Release connections; the store must not be used afterwards. Objects stay."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"
