"""The manifest: one JSON object, written last and atomically. Its presence is the commit.

It grows with the number of tensors and files, not with the number of chunks: a regular tensor is
stored as mesh, placements and writer, from which every chunk follows. The first bytes are a digest
of the whole text, so a damaged manifest is never believed. docs/format.md describes every field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, ObjectNotFound, StorageError

from ...dtensor.geometry.layout import Layout
from ...storage.base import ObjectInfo, Store
from ...storage.names import check_component
from ..state.limits import (
    MAX_BLOCK_BYTES,
    MAX_JSON_NESTING,
    MAX_RANKS,
    MAX_SIZE,
    check_metadata_bytes,
    check_nesting,
    json_memory,
    parse_json,
    shown,
    size_of,
    text_of,
)
from ..state.tree import (
    PACKED,
    TAGS_OF_VERSION_3,
    Node,
    packed_name,
    packed_nodes,
    tags_in,
    tensor_names,
)
from ..tensors.spec import FORMAT_VERSION
from .blocks import DIGEST_BYTES, LENGTH_BYTES, digest
from .foreign import nothing_there
from .places import MANIFEST, data_path
from .stored_tensor import StoredTensor
from .tensor_lines import TensorLines, dump, meshes_from_json, tensors_from_json

OURS = "dtckpt"
"""The format of checkpoints that have a manifest on disk."""
COMPRESSED_VERSION = 2
"""Version of the format from which on files may be compressed."""
VALUES_VERSION = 3
"""Version of the format from which on there are packed values, and more types of values and of
elements."""
_DTYPES_OF_VERSION_3 = {"C128"}
_KNOWN_VERSIONS = (FORMAT_VERSION, COMPRESSED_VERSION, VALUES_VERSION)
_KNOWN_FEATURES = {"borrowed", "compressed", "renamed"}
_PREFIX = b'{"digest": "'
_DIGEST_END = len(_PREFIX) + 32
_SAVE_ID = re.compile(r"[0-9a-f]{1,64}")
_READ_ATTEMPTS = 3
_START_BYTES = 8 << 20
"""Longer manifests, of some ten thousand tensors, are read in two requests more."""


class Place(NamedTuple):
    """Where a chunk lies in a file of another program that has no header."""

    key: str
    start: int
    """First byte of the archive that holds it."""
    size: int
    """Bytes of the archive."""
    record: str = ""
    """The record in it; that of the tensor which the archive is of, if empty."""
    skip: int = 0
    """Bytes of the record before the elements."""
    strides: tuple[int, ...] | None = None
    """Bytes between neighbours in every dim, where elements are not in row-major order."""
    form: str = ""
    """What there is instead of an archive, by a name of the format."""

    @classmethod
    def from_json(cls, value: Any) -> Place:
        """Return the place of a JSON list."""
        place = cls(*value)
        return place if place.strides is None else place._replace(strides=tuple(place.strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What the manifest knows of a data file; enough to tell any other file from it."""

    rank: int
    size: int
    """Length in bytes."""
    header_bytes: int
    """Length of the header, up to the data region."""
    data_bytes: int
    """Length of the data region; the checksum table follows."""
    header_digest: str
    table_digest: str
    stored_bytes: int | None = None
    """Length of the data region as it lies in the file, where it is compressed."""
    name: str | None = None
    """Name in the store of a file that another program wrote; None where a save gave it."""
    places: tuple[Place, ...] = ()
    """Of the chunks in a file that has no header."""
    seen: ObjectInfo | None = field(default=None, compare=False, repr=False)
    """What was told of another program's file before it was read for the manifest, in this process:
    other hosts may have copies of their own, of other times."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        told: dict[str, Any] = {
            "rank": self.rank,
            "size": self.size,
            "header_bytes": self.header_bytes,
            "data_bytes": self.data_bytes,
            "header": self.header_digest,
            "blocks": self.table_digest,
        }
        if self.stored_bytes is not None:
            told["stored_bytes"] = self.stored_bytes
        if self.name is not None:
            told["name"] = self.name
        if self.places:
            told["places"] = list(self.places)
        return told

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Return the record that ``to_json`` wrote; ValueError where it is malformed."""
        return cls(
            rank=size_of(value["rank"], "the rank of a file", below=MAX_RANKS),
            size=size_of(value["size"], "the size of a file"),
            header_bytes=size_of(value["header_bytes"], "header_bytes"),
            data_bytes=size_of(value["data_bytes"], "data_bytes"),
            header_digest=text_of(value["header"], "header"),
            table_digest=text_of(value["blocks"], "blocks"),
            stored_bytes=(
                size_of(value["stored_bytes"], "stored_bytes") if "stored_bytes" in value else None
            ),
            name=text_of(value["name"], "name") if "name" in value else None,
            places=tuple(map(Place.from_json, value.get("places", ()))),
        )

    @property
    def is_compressed(self) -> bool:
        """Whether blocks may be stored shorter than they are."""
        return self.stored_bytes is not None

    @property
    def region_bytes(self) -> int:
        """Length of the data region as it lies in the file."""
        return self.data_bytes if self.stored_bytes is None else self.stored_bytes

    @property
    def table_bytes(self) -> int:
        """Length of the checksum table."""
        return self.size - self.header_bytes - self.region_bytes

    @property
    def table_memory(self) -> int:
        """Bytes that the table takes once it is open; where blocks are stored follows from it."""
        return self.table_bytes * (2 if self.is_compressed else 1)

    def path(self, save_id: str) -> str:
        """Return the name of the file in the checkpoint of a save."""
        return self.name or data_path(save_id, self.rank, is_compressed=self.is_compressed)

    def validate(self) -> None:
        """Raise ValueError where the sizes do not fit together."""
        row_bytes = DIGEST_BYTES + LENGTH_BYTES * self.is_compressed
        num_blocks, rest = divmod(self.table_bytes, row_bytes)
        # A file can hold no more than its own table has room for, whatever it claims.
        most = min(MAX_BLOCK_BYTES * num_blocks, MAX_SIZE) if self.is_compressed else MAX_SIZE
        if min(self.header_bytes, self.table_bytes) < 0 or rest:
            raise ValueError(f"impossible file record {self}")
        if not self.region_bytes <= self.data_bytes <= most:
            raise ValueError(f"impossible lengths of compressed data in file record {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedFile:
    """A data file of an earlier checkpoint beside this one, of which some chunks are still true."""

    source: str
    """Name of that checkpoint's directory."""
    save_id: str
    record: FileRecord

    @property
    def id(self) -> str:
        """How the headers of data files refer to it."""
        return f"{self.save_id}/{self.record.rank}"

    @property
    def path(self) -> str:
        """Name of the file in its own checkpoint."""
        return self.record.path(self.save_id)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"from": self.source, "save_id": self.save_id, **self.record.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> BorrowedFile:
        """Return what ``to_json`` wrote; ValueError where it is malformed."""
        source = check_component(text_of(value["from"], "from"))
        save_id = text_of(value["save_id"], "save_id")
        return cls(source=source, save_id=save_id, record=FileRecord.from_json(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its bytes."""

    save_id: str
    tensors: dict[str, StoredTensor]
    tree: Node
    files: tuple[FileRecord, ...]
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC time of the commit, ISO 8601."""
    borrowed: tuple[BorrowedFile, ...] = ()
    """Files of earlier checkpoints that this one needs, too."""
    metadata: Any = field(default=None)
    """JSON that the user gave at save."""
    format: str = OURS
    """What wrote the files. Of another program's this is the manifest that they would have."""
    stored: Manifest | None = None
    """The one that lies there, if this is how a mapping shows it."""

    @property
    def is_ours(self) -> bool:
        """Whether dtckpt saved it, so that there are checksums."""
        return self.format == OURS

    @property
    def is_compressed(self) -> bool:
        """Whether a data file that it needs is compressed."""
        return any(r.is_compressed for r in (*self.files, *(f.record for f in self.borrowed)))

    @property
    def packed_names(self) -> frozenset[str]:
        """Names in ``tensors`` of the bytes of packed values, which are no tensors of the state."""
        return frozenset(map(packed_name, packed_nodes(self.tree)))

    @property
    def tensors_of_state(self) -> dict[str, StoredTensor]:
        """The tensors and arrays of the state: all of ``tensors`` but bytes of packed values."""
        packed = self.packed_names
        if not packed:
            return self.tensors
        return {name: tensor for name, tensor in self.tensors.items() if name not in packed}

    @property
    def version(self) -> int:
        """The version of the format: the oldest that has all that is needed to read it."""
        return self._version_with(tags_in(self.tree))

    def _version_with(self, tags: AbstractSet[str]) -> int:
        """Return the version with the tags of the tree."""
        dtypes = {tensor.dtype.code for tensor in self.tensors.values()}
        if not TAGS_OF_VERSION_3.isdisjoint(tags) or not dtypes.isdisjoint(_DTYPES_OF_VERSION_3):
            return VALUES_VERSION
        return COMPRESSED_VERSION if self.is_compressed else FORMAT_VERSION

    def path_of(self, record: FileRecord) -> str:
        """Return the name of a data file in the checkpoint's store."""
        return record.path(self.save_id)

    def to_bytes(self) -> bytes:
        """Return the text of the manifest: one line per tensor and per file.

        Raises CheckpointError if it is longer than readers take it.
        """
        lines = TensorLines()
        tensors = ",\n".join(map(lines.line, self.tensors.values()))
        features = {
            "borrowed": bool(self.borrowed),
            "compressed": self.is_compressed,
            "renamed": any(tensor.stored_as is not None for tensor in self.tensors.values()),
        }
        requires = dump([name for name, is_needed in features.items() if is_needed])
        kind = f'"format": {dump(self.format)}, "version": {self.version}'
        body = ",\n".join(
            [
                f'{kind}, "requires": {requires}',
                f'"save_id": {dump(self.save_id)}, "created": {dump(self.created)}',
                f'"metadata": {dump(self.metadata)}',
                f'"meshes": {dump([mesh.to_json() for mesh in lines.meshes])}',
                f'"tensors": {{{tensors}}}',
                f'"tree": {dump(self.tree)}',
                f'"files": {_dump_list([record.to_json() for record in self.files])}',
            ]
        )
        if self.borrowed:
            body += f',\n"borrowed": {_dump_list([file.to_json() for file in self.borrowed])}'
        blank = _PREFIX + b"0" * 32 + b'",\n' + body.encode() + b"}\n"
        check_metadata_bytes(json_memory(blank), f"the manifest of {len(self.tensors)} tensors")
        return _PREFIX + digest(blank).hex().encode() + blank[_DIGEST_END:]

    @classmethod
    def from_bytes(cls, data: bytes, where: str, *, formats: Collection[str] = (OURS,)) -> Manifest:
        """Return the manifest of a text; Corrupt, naming ``where``, unless it is intact.

        Other ``formats`` than ours are for what another rank has told, not for what lies on disk.
        """
        if not is_intact(data):
            raise Corrupt(
                f"{where}: the manifest of {len(data)} bytes does not have the digest that it "
                "states; it was damaged or truncated. Load another checkpoint"
            )
        value = parse_json(data, where)
        try:
            _check_version(value, where, formats)
            manifest = cls._from_json(value)
            manifest.validate(value["version"])
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Corrupt(f"{where}: malformed manifest: {shown(error)}") from error
        return manifest

    def validate(self, version: int | None = None) -> None:
        """Raise ValueError where fields are well-formed but do not fit together.

        So, too, where its files or values are of a later ``version`` than it states.
        """
        for save_id in (self.save_id, *(file.save_id for file in self.borrowed)):
            if not _SAVE_ID.fullmatch(save_id):
                raise ValueError(f"the save id {shown(save_id)} is not hexadecimal")
        check_nesting(self.tree, MAX_JSON_NESTING, "the tree")
        check_nesting(self.metadata, MAX_JSON_NESTING, "metadata")
        named = list(tensor_names(self.tree))
        if sorted(named) != sorted(self.tensors):
            odd = sorted(set(named) ^ set(self.tensors)) or ["a name used twice"]
            raise ValueError(f"tree and tensors do not name the same tensors: {odd[:5]}")
        tags = tags_in(self.tree)
        if version is not None and version < self._version_with(tags):
            raise ValueError(f"version {version} has not all that the manifest needs")
        for node in packed_nodes(self.tree) if PACKED in tags else ():
            tensor = self.tensors[packed_name(node)]
            if tensor.dtype.code != "U8" or len(tensor.shape) != 1:
                raise ValueError(f"packed value {tensor.name!r} is no vector of bytes")
        for tensor in self.tensors.values():
            if isinstance(tensor.layout, Layout) and tensor.layout.is_partial:
                raise ValueError(f"tensor {tensor.name!r} cannot be laid out as {tensor.layout}")
        records = (*self.files, *(file.record for file in self.borrowed))
        if self.is_ours and any(record.name or record.places for record in records):
            raise ValueError("a data file has a name or places of its own")
        if len({record.rank for record in self.files}) != len(self.files):
            raise ValueError("two data files are of the same rank")
        wanted = sum(tensor.stored_bytes for tensor in self.tensors.values())
        held = sum(record.data_bytes for record in records)
        if not self.is_ours:
            held = wanted  # which files hold compressed, or one row for many
        else:
            for record in records:
                record.validate()
        if not wanted <= held < MAX_SIZE:
            raise ValueError(f"the tensors have {wanted} bytes and the files {held}")

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        meshes = meshes_from_json(value["meshes"])
        return cls(
            save_id=text_of(value["save_id"], "save_id"),
            created=text_of(value["created"], "created"),
            metadata=value["metadata"],
            tree=value["tree"],
            tensors=tensors_from_json(value["tensors"], meshes),
            files=tuple(FileRecord.from_json(record) for record in value["files"]),
            borrowed=tuple(BorrowedFile.from_json(file) for file in value.get("borrowed", ())),
            format=text_of(value["format"], "format"),
        )


def read_manifest_bytes(store: Store) -> bytes:
    """Return the manifest's text; NotCommitted where there is none.

    One request brings it, unless it is very long. Its length is known before more is read:
    CheckpointError if it is longer than a manifest may be.
    """
    try:
        for _ in range(_READ_ATTEMPTS):
            data = store.read_start(MANIFEST, _START_BYTES)
            if is_intact(data):
                break
            size = store.stat(MANIFEST).size
            check_metadata_bytes(2 * size, f"{store.url}/{MANIFEST} of {size} bytes")
            try:
                data = store.read(MANIFEST, 0, size)
            except ObjectNotFound:
                raise
            except StorageError:
                if store.stat(MANIFEST).size == size:
                    raise
                continue  # it was replaced between the two calls
            if is_intact(data) or store.stat(MANIFEST).size == size:
                break
        else:
            data = store.read(MANIFEST, 0, store.stat(MANIFEST).size)
    except ObjectNotFound as error:
        raise NotCommitted(nothing_there(store)) from error
    check_metadata_bytes(2 * len(data), f"{store.url}/{MANIFEST} of {len(data)} bytes")
    return data


def read_own_manifest(store: Store) -> Manifest:
    """Return the manifest of a checkpoint that dtckpt has saved."""
    return Manifest.from_bytes(read_manifest_bytes(store), f"{store.url}/{MANIFEST}")


def is_intact(data: bytes) -> bool:
    """Whether a manifest's text has the digest that it states."""
    if not data.startswith(_PREFIX):
        return False
    expected = digest(_PREFIX + b"0" * 32, memoryview(data)[_DIGEST_END:])
    return data[len(_PREFIX) : _DIGEST_END] == expected.hex().encode()


def is_damaged_copy(data: bytes, intact: bytes) -> bool:
    """Whether a damaged text was the same as an intact one, so that no edit lies between them.

    It states that digest still, or all that follows the digest is the same.
    """
    if data[_DIGEST_END:] == intact[_DIGEST_END:]:
        return True
    return data[len(_PREFIX) : _DIGEST_END] == intact[len(_PREFIX) : _DIGEST_END]


def _check_version(value: dict[str, Any], where: str, formats: Collection[str]) -> None:
    if value.get("format") not in formats:
        raise Corrupt(f"{where}: not a dtckpt manifest (format {shown(value.get('format'))})")
    version, requires = value.get("version"), value.get("requires") or []
    if version not in _KNOWN_VERSIONS or not set(requires) <= _KNOWN_FEATURES:
        raise CheckpointError(
            f"{where}: written in format version {shown(version)} with the required features "
            f"{shown(requires)}; this dtckpt reads versions {FORMAT_VERSION} to "
            f"{VALUES_VERSION} with {sorted(_KNOWN_FEATURES)}. Upgrade dtckpt"
        )


def _dump_list(items: Iterable[Any]) -> str:
    return "[" + ",\n".join(map(dump, items)) + "]"
