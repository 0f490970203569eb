"""What moves bytes to object stores and back: dtckpt by either engine, DCP, and drivers alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from dtckpt import checkpoint

from ..frame.row import OURS
from ..object_server import ObjectServer
from ..state import ShardedState
from .raw import bytes_of

RAW_S3FS, RAW_OBSTORE, OURS_S3FS, DCP = "raw s3fs", "raw obstore", "dtckpt, s3fs", "DCP"
SYSTEMS = (OURS, OURS_S3FS, DCP, RAW_S3FS, RAW_OBSTORE)
_PART_BYTES = 16 << 20
_NUM_SENT, _NUM_READ = 4, 8
"""Parts on their way at a time, as many as dtckpt has."""


class ObjectSystem(Protocol):
    """Saves a state into an object store and loads it again; each rank calls this."""

    name: str

    def save(self, state: ShardedState) -> None: ...
    def load(self, state: ShardedState) -> None: ...


def object_systems(
    server: ObjectServer, state: ShardedState
) -> tuple[list[ObjectSystem], dict[str, str]]:
    """Return the systems that there are, and why others are missing."""
    systems: list[ObjectSystem] = [
        _Dcp(server),
        _Ours(server, OURS_S3FS, "fsspec"),
        _RawS3fs(server, state),
    ]
    if (missing := why_no_obstore()) is not None:
        systems[1].name = OURS
        return systems, {RAW_OBSTORE: missing, OURS_S3FS: missing}
    return [_Ours(server, OURS, "obstore"), *systems, _RawObstore(server, state)], {}


def why_no_obstore() -> str | None:
    """Return why obstore takes no part, if it does not."""
    try:
        importlib.import_module("obstore")
    except ImportError as error:
        return f"obstore is not installed: {error}"
    return None


class _Ours:
    """dtckpt, with every byte hashed, and verified when it is loaded."""

    def __init__(self, server: ObjectServer, name: str, engine: str) -> None:
        self.name = name
        self._url = server.url(name)
        self._options = server.options | {"engine": engine}

    def save(self, state: ShardedState) -> None:
        checkpoint.save(
            state.tensors, self._url, process_group=state.group, storage_options=self._options
        )

    def load(self, state: ShardedState) -> None:
        checkpoint.load(
            state.tensors, self._url, process_group=state.group, storage_options=self._options
        )


class _Dcp:
    """torch.distributed.checkpoint with its writer and reader for fsspec."""

    name = DCP

    def __init__(self, server: ObjectServer) -> None:
        self._url = server.url(self.name)
        self._options = server.options
        self._api: Any = importlib.import_module("torch.distributed.checkpoint")
        self._fsspec: Any = importlib.import_module(
            "torch.distributed.checkpoint._fsspec_filesystem"
        )

    def save(self, state: ShardedState) -> None:
        writer = self._fsspec.FsspecWriter(self._url, sync_files=False, **self._options)
        self._api.save(dict(state.tensors), storage_writer=writer, process_group=state.group)

    def load(self, state: ShardedState) -> None:
        reader = self._fsspec.FsspecReader(self._url, **self._options)
        self._api.load(dict(state.tensors), storage_reader=reader, process_group=state.group)


def _data(state: ShardedState) -> bytes:
    """Return what a rank holds, in one piece."""
    return b"".join(bytes_of(tensor) for tensor in state.locals.values())


def _ranges(num_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_bytes, _PART_BYTES):
        yield start, min(start + _PART_BYTES, num_bytes)


class _RawS3fs:
    """s3fs alone, with one object for each rank that is in memory beforehand."""

    name = RAW_S3FS

    def __init__(self, server: ObjectServer, state: ShardedState) -> None:
        s3fs: Any = importlib.import_module("s3fs")
        self._fs = s3fs.S3FileSystem(**server.options, config_kwargs={"max_pool_connections": 32})
        self._path = f"{server.url(self.name)}/{state.rank}"
        self._data = _data(state)

    def save(self, state: ShardedState) -> None:
        self._fs.pipe_file(self._path, self._data, chunksize=_PART_BYTES, max_concurrency=_NUM_SENT)

    def load(self, state: ShardedState) -> None:
        ranges = list(_ranges(len(self._data)))
        starts, stops = zip(*ranges, strict=True)
        self._fs.cat_ranges(
            [self._path] * len(ranges), starts, stops, batch_size=_NUM_READ, on_error="raise"
        )


class _RawObstore:
    """obstore alone, likewise."""

    name = RAW_OBSTORE

    def __init__(self, server: ObjectServer, state: ShardedState) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        options = server.options
        self._store = stores.S3Store(
            server.url("").removeprefix("s3://").rstrip("/"),
            endpoint=server.endpoint,
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region="us-east-1",
            client_options={"allow_http": True},
        )
        self._path = f"{self.name}/{state.rank}"
        self._data = _data(state)

    def save(self, state: ShardedState) -> None:
        self._obstore.put(
            self._store,
            self._path,
            self._data,
            chunk_size=_PART_BYTES,
            max_concurrency=_NUM_SENT,
        )

    def load(self, state: ShardedState) -> None:
        def get(part: tuple[int, int]) -> object:
            return self._obstore.get_range(self._store, self._path, start=part[0], end=part[1])

        with ThreadPoolExecutor(_NUM_READ) as pool:
            list(pool.map(get, _ranges(len(self._data))))
