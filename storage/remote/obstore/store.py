"""Objects in S3, Google Cloud Storage and Azure, by obstore's own calls and not its fsspec face."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

from dtckpt.errors import ObjectExists, ObjectNotFound, StorageError

from ...base import (
    Level,
    ObjectInfo,
    ReadRequest,
    Store,
    WriteStream,
    check_range,
    is_before,
)
from ...failures import already_exists, changed, failing, not_found, out_of_range
from ...names import UPLOAD_ID, check_component, check_name, check_prefix, is_reserved, join
from ..ranges import FETCH_BYTES, REQUEST_BYTES
from ..requests import Requests, on_condition
from ..trouble import Kind, Told, Trouble, told
from .connection import Connection
from .reads import ShortRead, read_each
from .uploads import UploadStream

_LIST_CHUNK = 1000
# The rest of its time is for looking what came of a write that was not answered.
_SHARE_OF_WRITES = 0.75
_CREATE: dict[str, Any] = {"mode": "create"}


@final
class ObstoreStore(Store):
    """Objects below an ``s3://``, ``gs://`` or ``az://`` URL, by obstore; ``engine="obstore"``.

    ``options`` are obstore's own, and those of s3fs, gcsfs and adlfs as far as obstore has the
    same. Each request has ``deadline`` seconds with all its attempts, and a busy server is asked
    less, as in ``FsspecStore``.

    * An object appears when its upload completes. Creating is one conditional PUT up to the size of
      a part, and ``replace`` another one; after a failure the object is read and compared, so a
      create whose reply was lost is recognised. Of larger objects the name is checked when they
      are begun. ``remove`` compares, then deletes: obstore has no condition for it.
    * A server that ignores conditions lets several racing writers believe to have won; who must
      know reads back, as the commit does.
    * Uploads in parts that a process has left behind when it was killed are told by ``leftovers``
      on S3 where s3fs is installed, and all options are such as s3fs has; obstore has no way.

    May be pickled. A process that was forked from one that had used obstore cannot use it, and gets
    a ``StorageError`` that says so.
    """

    request_bytes = REQUEST_BYTES

    def __init__(self, url: str, **options: Any) -> None:
        self._connection = Connection(url, options)
        self._prefix = self._connection.place.prefix
        self.url = join(self._connection.place.base, self._prefix)

    def stat(self, name: str) -> ObjectInfo:
        import obstore

        path, where = self._at(name)
        try:
            found = self._connection.ask("stat", where, lambda store: obstore.head(store, path))
        except StorageError as error:
            if told(error).status in (400, 403):
                with suppress(ObjectNotFound):  # a look that was refused has not told that
                    self._get(name, 0, 1)  # raises, and says why: the reply to a HEAD has no body
            raise
        return _object_info(name, found)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(start, stop)
        if start == 0 and stop is None:
            return self._whole(name)[0]
        if stop is None or stop == start:
            size = self.stat(name).size
            if start > size:
                raise out_of_range(join(self.url, name), start, stop, size)
            stop = size if stop is None else stop
        if stop == start:
            return b""
        buffer = bytearray(stop - start)
        self.read_into(name, [ReadRequest(start, buffer)])
        return bytes(buffer)

    def read_start(self, name: str, most: int) -> bytes:
        try:
            return bytes(self._get(name, 0, most)) if most else b""
        except ObjectNotFound:
            raise
        except StorageError as error:
            if told(error).kind is not Kind.OTHER or self.stat(name).size:
                raise
            return b""  # of nothing no range can be asked for

    def read_into(self, name: str, requests: Sequence[ReadRequest]) -> None:
        for _ in self.read_each(name, requests):
            pass

    def read_each(self, name: str, requests: Sequence[ReadRequest]) -> Iterator[ReadRequest]:
        check_name(name)
        with self._within(name, requests):
            yield from read_each(lambda start, stop: self._get(name, start, stop), requests)

    def create(self, name: str, size: int) -> WriteStream:
        if size < 0:
            raise ValueError(f"bad object size {size} for {name}: expected 0 or more")
        self._refuse_taken(name)

        def put_whole(data: bytes) -> None:
            with self._connection.in_time():
                self._put(name, data, _CREATE, lambda: self._refuse_taken(name))
                self._settle(name, len(data), None)

        return self._upload(name, size, put_whole)

    def create_anew(self, name: str, size: int) -> WriteStream:
        return self._upload(name, size, lambda data: self.publish(name, data, overwrite=True))

    def _upload(self, name: str, size: int, put_whole: Callable[[bytes], None]) -> WriteStream:
        import obstore

        path, where = self._at(name)

        def put(pieces: Iterable[bytearray], num_bytes: int) -> None:
            self._connection.upload(
                where,
                pieces,
                lambda store, taken, parts: obstore.put(
                    store, path, taken, chunk_size=num_bytes, max_concurrency=parts
                ),
            )

        return UploadStream(
            where, size, put, put_whole, lambda size, error: self._settle(name, size, error)
        )

    def publish(self, name: str, data: bytes, *, overwrite: bool) -> None:
        payload = bytes(data)
        with self._connection.in_time():
            if overwrite:
                self._put(name, payload, {}, lambda: None)
            else:
                self._refuse_taken(name)
                self._put(name, payload, _CREATE, lambda: self._refuse_taken(name))

    def replace(self, name: str, data: bytes, *, expected: bytes) -> None:
        payload = bytes(data)

        def check() -> dict[str, str]:
            return self._check_same(name, expected)

        with self._connection.in_time():
            same = check()
            try:
                self._put(name, payload, {"mode": same} if same else {}, check)
            except ObjectExists:
                tag = same.get("e_tag", "")
                if check() != same or tag == tag.strip('"'):
                    raise
                # As before: some servers (Ceph 16) compare tags without their quotes.
                self._put(name, payload, {"mode": same | {"e_tag": tag.strip('"')}}, check)

    def remove(self, name: str, *, expected: bytes) -> None:
        import obstore

        with self._connection.in_time():
            self._check_same(name, expected)
            path, where = self._at(name)
            was_asked = False

            def remove(store: Any) -> None:
                nonlocal was_asked
                # The attempt before may have removed it, and another writer may have come.
                if was_asked and bytes(obstore.get(store, path).bytes()) != expected:
                    raise Told("another writer was at it", Trouble(Kind.CONDITION))
                was_asked = True
                obstore.delete(store, [path])  # some stores say if somebody else was faster

            self._connection.ask("delete", where, remove)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = (item for item in self._find(prefix) if not is_reserved(item.name))
        return iter(sorted(found, key=lambda item: item.name))

    def level(self, prefix: str = "") -> Level:
        import obstore

        top, where = self._top(prefix)
        with self._listing(where):
            found = self._connection.ask(
                "list", where, lambda store: obstore.list_with_delimiter(store, top or None)
            )
        objects = [
            info for info in self._below(prefix, found["objects"]) if not is_reserved(info.name)
        ]
        start = self._start
        folders = sorted(path.strip("/")[start:] for path in found["common_prefixes"])
        return Level(tuple(sorted(objects, key=lambda item: item.name)), tuple(folders))

    def leftovers(self, prefix: str = "", *, before: float | None = None) -> Iterator[str]:
        found = (item for item in self._find(prefix) if is_reserved(item.name))
        names = [item.name for item in found if is_before(item, before)]
        if (beside := self._connection.beside()) is not None:
            uploads = beside.leftovers(join(self._prefix, prefix), before=before)
            names += [name[self._start :] for name in uploads if UPLOAD_ID in name]
        return iter(sorted(names))

    def delete(self, names: Iterable[str]) -> None:
        paths = [self._at(name, reserved=True)[0] for name in names]
        uploads = [path for path in paths if UPLOAD_ID in path]
        if uploads:
            self._forget(uploads)
            paths = [path for path in paths if UPLOAD_ID not in path]
        if not paths:
            return
        try:
            self._delete(paths)
        except ObjectNotFound:  # some stores tell, and may have stopped there
            for path in paths:
                with suppress(ObjectNotFound):
                    self._delete([path])

    def _forget(self, uploads: Sequence[str]) -> None:
        beside = self._connection.beside()
        if beside is None:
            raise StorageError(
                f"cannot end uploads below {self.url}: obstore does not know how, and s3fs is not "
                "installed or does not understand these options"
            )
        beside.delete(uploads)

    def _delete(self, paths: Sequence[str]) -> None:
        import obstore

        where = join(self._connection.place.base, paths[0])
        if len(paths) > 1:
            where = f"{where} and {len(paths) - 1} more"
        self._connection.ask("delete", where, lambda store: obstore.delete(store, list(paths)))

    def substore(self, prefix: str) -> Store:
        return self._other(join(self._prefix, check_name(prefix)))

    def sibling(self, name: str) -> Store:
        check_component(name)
        parent, _, own = self._prefix.rpartition("/")
        if not own:
            raise StorageError(f"{self.url} is a root and has nothing beside it")
        return self._other(join(parent, name))

    def parent(self) -> Store | None:
        around, _, own = self._prefix.rpartition("/")
        return self._other(around) if own else None

    def _other(self, prefix: str) -> Store:
        other = ObstoreStore.__new__(ObstoreStore)
        other._connection = self._connection
        other._prefix = prefix
        other.url = join(self._connection.place.base, prefix)
        return other

    def _at(self, name: str, *, reserved: bool = False) -> tuple[str, str]:
        """The path of an object in its bucket, and the URL for messages."""
        path = join(self._prefix, check_name(name, reserved=reserved))
        return self._connection.place.check_path(path), join(self.url, name)

    def _top(self, prefix: str) -> tuple[str, str]:
        path = join(self._prefix, check_prefix(prefix))
        return self._connection.place.check_path(path), join(self.url, prefix)

    @property
    def _start(self) -> int:
        """Where names begin in paths."""
        return len(self._prefix) + 1 if self._prefix else 0

    def _get(self, name: str, start: int, stop: int) -> memoryview:
        """What there is of a range."""
        import obstore

        path, where = self._at(name)
        return memoryview(
            self._connection.ask(
                "read", where, lambda store: obstore.get_range(store, path, start=start, end=stop)
            )
        )

    def _whole(self, name: str) -> tuple[bytes, Any]:
        """The bytes of an object, and what the store tells of the very same one."""
        import obstore

        path, where = self._at(name)

        def get(store: Any) -> tuple[bytes | None, Any]:
            reply = obstore.get(store, path)
            is_small = reply.meta["size"] <= FETCH_BYTES
            return bytes(reply.bytes()) if is_small else None, reply.meta

        data, meta = self._connection.ask("read", where, get)
        if data is None:
            buffer = bytearray(meta["size"])
            self.read_into(name, [ReadRequest(0, buffer)])
            data = bytes(buffer)
        if len(data) != meta["size"]:
            raise StorageError(f"short read of {where}: {len(data)} of {meta['size']} bytes")
        return data, meta

    @contextmanager
    def _within(self, name: str, requests: Sequence[ReadRequest]) -> Generator[None]:
        """Say it of a failure to read where a range goes past the end of the object."""
        where = join(self.url, name)
        try:
            yield
        except (StorageError, ShortRead) as error:
            if told(error).kind is not Kind.OTHER:
                raise
            size = self.stat(name).size
            for request in requests:
                if request.view.nbytes and request.stop > size:
                    raise out_of_range(where, request.offset, request.stop, size) from error
            if isinstance(error, ShortRead):
                raise StorageError(f"short read of {where}: {error}") from error
            raise

    def _put(
        self, name: str, data: bytes, condition: dict[str, Any], look: Callable[[], object]
    ) -> None:
        """Write the whole object; a failure that left exactly our bytes there is none.

        ``condition`` is in obstore's words. ``look()`` raises if it does not hold now.
        """
        import obstore

        path, where = self._at(name)
        requests = Requests()

        def ask(given: dict[str, Any]) -> None:
            def put(store: Any) -> None:
                requests.sent()
                obstore.put(store, path, data, use_multipart=False, **given)

            self._connection.ask("write", where, put, attempt=requests.attempt)

        is_new = condition == _CREATE
        try:
            with self._connection.in_time(_SHARE_OF_WRITES):
                on_condition(ask, condition, look)
        except StorageError as error:
            # The object may stand although the reply was lost; what was then asked again has found
            # our own object in the way.
            is_known, found = self._look_again(name)
            is_stopped = told(error).kind is Kind.CONDITION
            is_last = requests.is_last_word(error)
            if is_known and found == data and not (is_new and is_stopped and is_last):
                return
            error.is_certain = is_known and is_last
            if is_stopped:
                with failing(certain=error.is_certain):
                    raise (already_exists if is_new else changed)(where) from error
            if isinstance(error, ObjectNotFound):
                with failing(certain=error.is_certain):
                    if condition and not is_new:
                        raise not_found(where) from error
                    text = f"cannot write {where}: its bucket seems not to exist"
                    raise StorageError(text) from error
            raise

    def _refuse_taken(self, name: str) -> None:
        with failing(certain=True):
            if self.exists(name):
                raise already_exists(join(self.url, name))

    def _check_same(self, name: str, expected: bytes) -> dict[str, str]:
        """The condition that the object, which has these bytes, is still the same one."""
        with failing(certain=True):
            data, meta = self._whole(name)
            if data != expected:
                raise changed(join(self.url, name))
        return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}

    def _look_again(self, name: str) -> tuple[bool, bytes | None]:
        """Whether an object could be looked at after a failure, and its bytes if there is one."""
        try:
            return True, self.read(name)
        except ObjectNotFound:
            return True, None
        except StorageError:
            return False, None

    def _settle(self, name: str, size: int, error: StorageError | None) -> None:
        """Raise ``error``, or another one, unless the store has the object, of this size, by now.

        An upload that was not known any more may have been completed by a request whose reply was
        lost. After other failures what is there may be another writer's.
        """
        if error is not None and told(error).kind is not Kind.MISSING:
            raise error from error.__cause__
        try:
            found = self.stat(name).size
        except ObjectNotFound:
            found = None
        except StorageError:
            if error is None:
                raise
            raise error from error.__cause__
        if found == size:
            return
        if error is None and found is not None:
            self.delete([name])
        raise error or StorageError(
            f"the store has {'nothing' if found is None else f'{found} bytes'} of "
            f"{join(self.url, name)}, {size} bytes were written"
        )

    def _find(self, prefix: str) -> Iterator[ObjectInfo]:
        import obstore

        top, where = self._top(prefix)
        found: list[Any] = []
        coming: Any = None

        def page(store: Any) -> Any:
            nonlocal coming
            # Taken away while it is asked: after a failure another one begins behind what came.
            pages, coming = coming, None
            if pages is None:
                after = found[-1]["path"] if found else None
                pages = obstore.list(store, top or None, offset=after, chunk_size=_LIST_CHUNK)
            items = next(pages, None)
            coming = pages
            return items

        with self._listing(where):
            while items := self._connection.ask("list", where, page):
                found += items
        for info in self._below(prefix, found):
            # obstore cuts the slash off the markers that some programs make for directories.
            if info.size or self.exists(info.name):
                yield info

    def _below(self, prefix: str, found: Iterable[Any]) -> Iterator[ObjectInfo]:
        below = join(self._prefix, prefix)
        below = f"{below}/" if below else ""
        for item in found:
            if item["path"].startswith(below):
                yield _object_info(item["path"][self._start :], item)

    @contextmanager
    def _listing(self, where: str) -> Generator[None]:
        """What is missing where things are listed is the bucket, not an object."""
        try:
            yield
        except ObjectNotFound as error:
            raise StorageError(f"cannot list {where}: its bucket does not exist") from error


def _object_info(name: str, item: Any) -> ObjectInfo:
    modified = item["last_modified"]
    return ObjectInfo(name, item["size"], None if modified is None else modified.timestamp())
