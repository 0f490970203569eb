"""Objects in anything that fsspec can reach: S3, Google Cloud Storage, Azure, memory://, SFTP."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError

from ...base import (
    Level,
    ObjectInfo,
    ReadRequest,
    Store,
    WholeStream,
    WriteStream,
    check_range,
    is_before,
)
from ...failures import already_exists, changed, failing, not_found, out_of_range, translated
from ...names import (
    check_name,
    is_reserved,
    is_valid,
    join,
    reserved_name,
)
from ..ranges import REQUEST_BYTES
from ..requests import Requests, on_condition
from ..trouble import Kind, Told, Trouble, told
from .dialects.base import Condition, Dialect, Info, method
from .driver import Driver
from .fetching import ShortRead, fetch_each
from .listing import object_info
from .place import Place
from .streams import PART_BYTES, MultipartStream, RenameStream, move
from .uploads import split_upload, upload_name

# The rest of its time is for looking what came of a write that was not answered.
_SHARE_OF_WRITES = 0.75


@final
class FsspecStore(Store):
    """Objects below an fsspec URL; ``options`` go to its driver as they are.

    Nothing that a driver says is taken on trust: no listing cache is used, every range is measured,
    every stream is measured afterwards, and every exception becomes a ``StorageError``.

    * Each request has ``deadline`` seconds (an option, 120 by default) with all its attempts:
      ``StorageTimeout`` after that. What fails for the moment is asked again after pauses, and a
      busy server less at a time, by all of the process.
    * Object stores: an object appears when its upload completes. ``publish`` is one conditional
      PUT where the driver has it; after a failure the object is read and compared, so a create
      whose reply was lost is recognised. ``replace`` is one, too, on S3, Google and Azure. Where
      the server ignores conditions, several racing writers may believe to have won: who must know
      reads back, as the commit does.
    * Large objects: the name is checked when the object is begun, not when it is completed. Writers
      use names that no one else does.
    * Reads: neighbours are asked for together (``ranges``), several requests at a time
      (``fetching``), and buffers are told of as they fill.
    * Other file systems: objects are written under a hidden name and renamed, or copied where
      renaming is not supported. Exclusive creation is check-then-rename, and nothing is flushed
      beyond what the driver does.

    May be pickled and used after a fork: each process makes its own connection.
    """

    request_bytes = REQUEST_BYTES

    def __init__(self, url: str, **options: Any) -> None:
        self._settle(Place(Driver(url, options)))
        self._dialect.check_path(url)

    def _settle(self, place: Place) -> Store:
        self._place = place
        self.url = place.url
        return self

    @property
    def _dialect(self) -> Dialect:
        return self._place.driver.dialect

    def stat(self, name: str) -> ObjectInfo:
        return object_info(name, self._info(name))

    def _info(self, name: str) -> Info:
        """What the driver tells of an object."""
        connection, path, where = self._place.at(name)
        fs, dialect = connection.fs, self._dialect
        fs.invalidate_cache()
        try:
            info = connection.ask("stat", where, lambda: dialect.info(fs, path))
        except StorageError as error:
            if told(error).status in (400, 403):
                with suppress(ObjectNotFound):  # a look that was refused has not told that
                    self._cat(name, 0, 1)  # raises, and says why: the reply to a HEAD has no body
            raise
        if info["type"] != "file":
            raise not_found(where)
        return info

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        where = join(self.url, check_name(name))
        if stop is None or stop == start:
            size = self.stat(name).size
            if start > size:
                raise out_of_range(where, start, stop, size)
            stop = size if stop is None else stop
        if stop == start:
            return b""
        # One request: the result is not to be put together from pieces.
        with self._within(name, [(start, stop)]):
            data = self._cat(name, start, stop)
            if len(data) != stop - start:
                raise ShortRead(f"bytes {start}:{stop} end at {start + len(data)}")
        return data

    def read_start(self, name: str, most: int) -> bytes:
        check_name(name)
        try:
            return self._cat(name, 0, most) if most else b""
        except ObjectNotFound:
            raise
        except StorageError as error:
            if told(error).kind is not Kind.OTHER or self.stat(name).size:
                raise
            return b""  # of nothing no range can be asked for

    def _cat(self, name: str, start: int, stop: int) -> bytes:
        connection, path, where = self._place.at(name)
        fs, read = connection.fs, self._dialect.read
        data = bytes(connection.ask("read", where, lambda: read(fs, path, start, stop)))
        return data if start else data[:stop]  # some servers know no ranges, and send all

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        for _ in self.read_each(name, requests):
            pass

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        connection, path, where = self._place.at(name)
        ranges = [(r.offset, r.stop) for r in requests if r.view.nbytes]
        with self._within(name, ranges):
            yield from fetch_each(connection, path, where, requests)

    def create(self, name: str, size: int) -> WriteStream:
        if size < 0:
            raise ValueError(f"bad object size {size} for {name}: expected 0 or more")
        connection, path, where = self._place.at(name)
        dialect = self._dialect
        in_parts = size > PART_BYTES and dialect.streams_are_atomic
        # A counted PUT refuses by itself; of an empty one it is not known how often it was sent.
        if in_parts or size == 0 or not dialect.puts_are_counted:
            self._refuse_taken(name)
        check = functools.partial(self._check_size, name)
        refuse = functools.partial(self._refuse_taken, name)
        if not dialect.puts_are_atomic:
            return RenameStream(where, size, connection, (_hidden(path), path), refuse, check)
        if in_parts:
            return MultipartStream(where, size, connection, dialect, path, check)
        return WholeStream(where, size, lambda data: self._put_new(name, data))

    def create_anew(self, name: str, size: int) -> WriteStream:
        connection, path, where = self._place.at(name)
        dialect = self._dialect
        if size > PART_BYTES and dialect.puts_are_atomic and dialect.streams_are_atomic:
            check = functools.partial(self._check_size, name)
            return MultipartStream(where, size, connection, dialect, path, check)
        return super().create_anew(name, size)

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        payload = bytes(data)
        with self._in_time():
            if not overwrite:
                self._refuse_taken(name)
            self._put(name, payload, exclusive=not overwrite)

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        payload = bytes(data)
        with self._in_time():
            info = self._info_of(name, expected)
            self._put(name, payload, instead_of=(info, expected))

    def remove(self, name: str, *, expected: bytes) -> None:
        with self._in_time():
            info = self._info_of(name, expected)
            connection, path, where = self._place.at(name)
            condition = self._dialect.only_same(info)
            num_asked = 0

            @contextmanager
            def check_again() -> Generator[None]:
                nonlocal num_asked
                # The attempt before may have removed it, and another writer may have come, of whom
                # a server that looks at no condition takes no notice.
                try:
                    if num_asked:
                        self._check_same(name, expected)
                except ObjectExists as error:
                    raise Told("another writer was at it", Trouble(Kind.CONDITION)) from error
                num_asked += 1
                yield

            def ask(given: Condition) -> None:
                remove = self._dialect.remove
                call = lambda: remove(connection.fs, path, given)  # noqa: E731
                connection.ask("delete", where, call, attempt=check_again)

            try:
                with connection.in_time(_SHARE_OF_WRITES):
                    on_condition(ask, condition, lambda: self._check_same(name, expected))
            except StorageError as error:
                is_known, found = self._look_again(name)
                if is_known and found is None:  # gone by this very request, or by somebody else's
                    raise not_found(where) from error
                if _is_condition_failed(error):
                    raise changed(where) from error
                raise

    def _info_of(self, name: str, expected: bytes) -> Info:
        """What the driver tells of an object that holds these bytes."""
        with failing(certain=True):
            try:
                info = self._info(name)  # first: a condition is not to be of what came afterwards
            except ObjectNotFound as error:
                self.read(
                    name, 0, 1
                )  # which may know better: that it is the bucket that is missing
                raise StorageError(
                    f"{join(self.url, name)} is told both as missing and as there"
                ) from error
        self._check_same(name, expected)
        return info

    def _check_same(self, name: str, expected: bytes) -> None:
        with failing(certain=True):
            if self.read(name) != expected:
                raise changed(join(self.url, name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = (item for item in self._find(prefix) if not is_reserved(item.name))
        return iter(sorted(found, key=lambda item: item.name))

    def level(self, prefix: str = "") -> Level:
        connection, top, below, start = self._place.below(prefix)
        found = self._dialect.listing(connection, top, join(self.url, prefix), deep=False)
        objects: list[ObjectInfo] = []
        folders: set[str] = set()
        for path, info in found.items():
            key = path.strip("/")
            if below != "/" and not key.startswith(below):
                continue  # the driver may tell of what it was asked for, too
            if info["type"] == "directory":
                folders.add(key[start:])
            elif not path.endswith("/") and not is_reserved(key):
                objects.append(self._listed(key[start:], info))
        objects.sort(key=lambda item: item.name)
        return Level(tuple(objects), tuple(sorted(folders)))

    def leftovers(self, prefix: str = "", *, before: float | None = None) -> Iterator[str]:
        hidden = [item for item in self._find(prefix) if is_reserved(item.name)]
        uploads = self._uploads(prefix)
        return iter(sorted(i.name for i in (*hidden, *uploads) if is_before(i, before)))

    def _uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        """Uploads in parts that have neither been completed nor given up, where they are told."""
        connection, root = self._place.connect()
        base = join(root, self._place.prefix).strip("/")
        where = join(self.url, prefix)
        found = self._dialect.unfinished(connection, join(base, prefix), where)
        for path, upload_id, begun in found:
            if is_valid(name := path[len(base) + 1 :]):  # else another program's
                yield ObjectInfo(upload_name(name, upload_id), 0, begun)

    def delete(self, names: Iterable[str]) -> None:
        checked = [check_name(name, reserved=True) for name in names]
        objects = [name for name in checked if split_upload(name)[1] is None]
        if len(objects) > 1 and self._delete_together(objects):
            checked = [name for name in checked if split_upload(name)[1] is not None]
        # One by one: the drivers' rm takes names for patterns, and "w[0:4]" is a fair name.
        for name in checked:
            target, upload_id = split_upload(name)
            connection, path, where = self._place.at(target, reserved=True)
            with suppress(ObjectNotFound):
                if upload_id is not None:
                    self._dialect.forget(connection, path, where, upload_id)
                    continue
                remove = method(connection.fs, "rm_file")
                connection.ask("delete", where, functools.partial(remove, path))

    def _delete_together(self, names: Sequence[str]) -> bool:
        """Delete objects in few requests; False where that is not to be had."""
        connection, _, where = self._place.at(names[0], reserved=True)
        paths = [self._place.at(name, reserved=True)[1] for name in names]
        place = f"{where} and {len(names) - 1} more"
        return self._dialect.remove_many(connection, paths, place)

    def substore(self, prefix: str) -> Store:
        return FsspecStore.__new__(FsspecStore)._settle(self._place.inside(prefix))

    def sibling(self, name: str) -> Store:
        return FsspecStore.__new__(FsspecStore)._settle(self._place.beside(name))

    def parent(self) -> Store | None:
        around = self._place.around()
        return None if around is None else FsspecStore.__new__(FsspecStore)._settle(around)

    def _in_time(self) -> AbstractContextManager[None]:
        """What is asked in the block has one deadline together."""
        return self._place.connect()[0].in_time()

    @contextmanager
    def _within(self, name: str, ranges: Sequence[tuple[int, int]]) -> Generator[None]:
        """Have a range past the end of the object told as that."""
        where = join(self.url, name)
        try:
            with translated("read", where):
                yield
        except StorageError as error:
            if told(error).kind is not Kind.OTHER:
                raise
            size = self.stat(name).size
            for start, stop in ranges:
                if stop > size:
                    raise out_of_range(where, start, stop, size) from error
            if isinstance(error.__cause__, ShortRead):
                raise StorageError(f"short read of {where}: {error.__cause__}") from error
            raise

    def _put_new(self, name: str, data: bytes) -> None:
        self._put(name, data, exclusive=True)
        if not self._dialect.puts_are_checked:
            self._check_size(name, len(data))

    def _put(
        self,
        name: str,
        data: bytes,
        *,
        exclusive: bool = False,
        instead_of: tuple[dict[str, Any], bytes] | None = None,
    ) -> None:
        """Write the whole object; a failure that left exactly our bytes there is none.

        ``exclusive``: only if there is none. ``instead_of``: only in place of the one of which
        the driver told so, and that holds these bytes; as far as the driver has conditional writes.
        """
        connection, path, where = self._place.at(name)
        dialect, requests = self._dialect, Requests()
        condition: Condition = {}
        if exclusive:
            condition = dialect.only_new(connection.fs)
        elif instead_of is not None:
            condition = dialect.only_same(instead_of[0])

        def look() -> None:
            if exclusive:
                self._refuse_taken(name)
            elif instead_of is not None:
                self._check_same(name, instead_of[1])

        def ask(given: Condition) -> None:
            call = lambda: dialect.put(connection.fs, path, data, given, requests)  # noqa: E731
            connection.ask("write", where, call, attempt=requests.attempt)

        try:
            if dialect.puts_are_atomic:
                with connection.in_time(_SHARE_OF_WRITES):
                    on_condition(ask, condition, look)
            else:
                self._write_and_move(name, data, exclusive=exclusive)
        except StorageError as error:
            # The object may stand although the reply was lost; when it was asked for again our own
            # object was found in the way.
            is_known, found = self._look_again(name)
            is_refused = exclusive and _is_condition_failed(error) and requests.is_last_word(error)
            if is_known and found == data and not is_refused:
                return
            error.is_certain = is_known and requests.is_last_word(error)
            if _is_condition_failed(error):
                with failing(certain=error.is_certain):
                    raise (already_exists if exclusive else changed)(where) from error
            if isinstance(error, ObjectNotFound) and dialect.puts_are_atomic and not instead_of:
                with failing(certain=error.is_certain):
                    text = f"cannot write {where}: it seems that the bucket does not exist"
                    raise StorageError(text) from error
            raise

    def _write_and_move(self, name: str, data: bytes, *, exclusive: bool) -> None:
        connection, path, where = self._place.at(name)
        fs, hidden = connection.fs, _hidden(path)

        def write() -> None:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(hidden, data)

        try:
            connection.ask_blocking("write", where, write)
            if exclusive:
                self._refuse_taken(name)
            move(connection, where, hidden, path)
        except BaseException:
            with suppress(Exception):
                connection.ask_blocking("clean up", where, lambda: fs.rm_file(hidden))
            raise

    def _refuse_taken(self, name: str) -> None:
        with failing(certain=True):
            if self.exists(name):
                raise already_exists(join(self.url, name))

    def _found(self, name: str) -> bytes | None:
        """The bytes of an object now; None if there is none."""
        try:
            return self.read(name)
        except ObjectNotFound:
            return None

    def _look_again(self, name: str) -> tuple[bool, bytes | None]:
        """Whether an object could be looked at after a failure, and its bytes if there is one."""
        try:
            return True, self._found(name)
        except StorageError:
            return False, None

    def _check_size(self, name: str, expected: int) -> None:
        try:
            size = self.stat(name).size
        except ObjectNotFound as error:
            raise StorageError(
                f"the store has nothing of {join(self.url, name)}, {expected} bytes were written"
            ) from error
        if size != expected:
            raise StorageError(
                f"the store has {size} bytes of {join(self.url, name)}, {expected} were written"
            )

    def _find(self, prefix: str) -> Iterator[ObjectInfo]:
        connection, top, below, start = self._place.below(prefix)
        found = self._dialect.listing(connection, top, join(self.url, prefix), deep=True)
        for path, info in found.items():
            key = path.lstrip("/")
            # Directory markers end in a slash; an object called like the prefix is not in it.
            inside = below == "/" or key.startswith(below)
            if inside and info["type"] == "file" and not key.endswith("/"):
                yield self._listed(key[start:], info)

    def _listed(self, name: str, info: Info) -> ObjectInfo:
        """What a listing tells of an object; that of HTTP tells no sizes."""
        return self.stat(name) if info["size"] is None else object_info(name, info)


def _is_condition_failed(error: StorageError) -> bool:
    """Whether the server refused because another object is there than the condition says."""
    return told(error).kind is Kind.CONDITION


def _hidden(path: str) -> str:
    directory, _, base = path.rpartition("/")
    return f"{directory}/{reserved_name(base)}"
