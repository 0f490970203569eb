"""The manifest: one JSON object, written last and atomically. Its presence is the commit.

It grows with the number of tensors and files, not with the number of chunks: a regular tensor is
stored as mesh, placements and writer, from which every chunk follows. The first bytes are a digest
of the whole text, so a damaged manifest is never believed. docs/format.md describes every field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from dtckpt.errors import CheckpointError, Corrupt, NotCommitted, ObjectNotFound

from ..dtensor.irregular import IrregularLayout
from ..dtensor.layout import Layout
from ..dtensor.mesh import Mesh
from ..dtensor.placement import Placement, parse_placement
from ..storage.base import Store
from .blocks import digest
from .dtypes import dtype_of_code
from .plan import StoredTensor
from .spec import FORMAT_VERSION
from .tree import Node, tensor_names

MANIFEST = "manifest.json"
_KNOWN_FEATURES = {"borrowed"}
_PREFIX = b'{"digest": "'
_DIGEST_END = len(_PREFIX) + 32


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

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "rank": self.rank,
            "size": self.size,
            "header_bytes": self.header_bytes,
            "data_bytes": self.data_bytes,
            "header": self.header_digest,
            "blocks": self.table_digest,
        }

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Return the record that ``to_json`` wrote."""
        return cls(
            rank=int(value["rank"]),
            size=int(value["size"]),
            header_bytes=int(value["header_bytes"]),
            data_bytes=int(value["data_bytes"]),
            header_digest=str(value["header"]),
            table_digest=str(value["blocks"]),
        )


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
        return data_path(self.save_id, self.record.rank)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"from": self.source, "save_id": self.save_id, **self.record.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> BorrowedFile:
        """Return what ``to_json`` wrote."""
        source, save_id = str(value["from"]), str(value["save_id"])
        return cls(source=source, save_id=save_id, record=FileRecord.from_json(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its bytes."""

    save_id: str
    created: str
    """UTC time of the commit, ISO 8601."""
    tensors: dict[str, StoredTensor]
    tree: Node
    files: tuple[FileRecord, ...]
    borrowed: tuple[BorrowedFile, ...] = ()
    """Files of earlier checkpoints that this one needs, too."""
    metadata: Any = field(default=None)
    """JSON that the user gave at save."""

    def path_of(self, record: FileRecord) -> str:
        """Return the name of a data file in the checkpoint's store."""
        return data_path(self.save_id, record.rank)

    def to_bytes(self) -> bytes:
        """Return the text of the manifest: one line per tensor and per file."""
        lines = _TensorLines()
        tensors = ",\n".join(map(lines.line, self.tensors.values()))
        requires = _dump(["borrowed"] if self.borrowed else [])
        body = ",\n".join(
            [
                f'"format": "dtckpt", "version": {FORMAT_VERSION}, "requires": {requires}',
                f'"save_id": {_dump(self.save_id)}, "created": {_dump(self.created)}',
                f'"metadata": {_dump(self.metadata)}',
                f'"meshes": {_dump([mesh.to_json() for mesh in lines.meshes])}',
                f'"tensors": {{{tensors}}}',
                f'"tree": {_dump(self.tree)}',
                f'"files": {_dump_list([record.to_json() for record in self.files])}',
            ]
        )
        if self.borrowed:
            body += f',\n"borrowed": {_dump_list([file.to_json() for file in self.borrowed])}'
        blank = _PREFIX + b"0" * 32 + b'",\n' + body.encode() + b"}\n"
        return _PREFIX + digest(blank).hex().encode() + blank[_DIGEST_END:]

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Return the manifest of a text; Corrupt, naming ``where``, unless it is intact."""
        blank = _PREFIX + b"0" * 32 + data[_DIGEST_END:]
        if data[:_DIGEST_END] != _PREFIX + digest(blank).hex().encode():
            raise Corrupt(
                f"{where}: the manifest of {len(data)} bytes does not have the digest that it "
                "states; it was damaged or truncated. Load another checkpoint"
            )
        try:
            value = cast(dict[str, Any], json.loads(data))
            _check_version(value, where)
            manifest = cls._from_json(value)
            manifest.validate()
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Corrupt(f"{where}: malformed manifest: {error!r}") from error
        return manifest

    def validate(self) -> None:
        """Raise ValueError where fields are well-formed but do not fit together."""
        for save_id in (self.save_id, *(file.save_id for file in self.borrowed)):
            if not re.fullmatch(r"[0-9a-f]+", save_id):
                raise ValueError(f"the save id {save_id!r} is not hexadecimal")
        named = list(tensor_names(self.tree))
        if sorted(named) != sorted(self.tensors):
            odd = sorted(set(named) ^ set(self.tensors)) or ["a name used twice"]
            raise ValueError(f"tree and tensors do not name the same tensors: {odd[:5]}")
        for tensor in self.tensors.values():
            layout = tensor.layout
            if min(tensor.shape, default=0) < 0 or (
                isinstance(layout, Layout) and layout.is_partial
            ):
                raise ValueError(f"tensor {tensor.name!r} cannot be laid out as {layout}")
        for record in (*self.files, *(file.record for file in self.borrowed)):
            table_bytes = record.size - record.header_bytes - record.data_bytes
            if min(record.rank, record.header_bytes, record.data_bytes, table_bytes) < 0:
                raise ValueError(f"impossible file record {record}")

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        meshes = [Mesh.from_json(mesh) for mesh in value["meshes"]]
        return cls(
            save_id=str(value["save_id"]),
            created=str(value["created"]),
            metadata=value["metadata"],
            tree=value["tree"],
            tensors=_tensors_from_json(value["tensors"], meshes),
            files=tuple(FileRecord.from_json(record) for record in value["files"]),
            borrowed=tuple(BorrowedFile.from_json(file) for file in value.get("borrowed", ())),
        )


def data_path(save_id: str, rank: int) -> str:
    """Return the name of a rank's data file; a save id is never used twice."""
    return f"data/{save_id}/{rank:05d}.safetensors"


def read_manifest_bytes(store: Store) -> bytes:
    """Return the manifest's text; NotCommitted where there is none."""
    try:
        return store.read(MANIFEST)
    except ObjectNotFound as error:
        raise NotCommitted(
            f"{store.url}: no committed checkpoint here ({MANIFEST} is missing). Either nothing "
            "was saved to this place, or a save did not finish; load another checkpoint"
        ) from error


def read_manifest(store: Store) -> Manifest:
    """Return the manifest of the checkpoint in ``store``."""
    return Manifest.from_bytes(read_manifest_bytes(store), f"{store.url}/{MANIFEST}")


def _check_version(value: dict[str, Any], where: str) -> None:
    if value.get("format") != "dtckpt":
        raise Corrupt(f"{where}: not a dtckpt manifest (format {value.get('format')!r})")
    version, requires = value.get("version"), value.get("requires") or []
    if version != FORMAT_VERSION or not set(requires) <= _KNOWN_FEATURES:
        raise CheckpointError(
            f"{where}: written in format version {version!r} with the required features "
            f"{requires!r}; this dtckpt reads version {FORMAT_VERSION} with "
            f"{sorted(_KNOWN_FEATURES)}. Upgrade dtckpt"
        )


class _TensorLines:
    """Writes tensors as JSON, of which there may be very many alike."""

    def __init__(self) -> None:
        self.meshes: dict[Mesh, int] = {}
        self._places: dict[tuple[Mesh, tuple[Placement, ...]], str] = {}

    def line(self, tensor: StoredTensor) -> str:
        name = _dump(tensor.name)
        if tensor.same_as is not None:
            return f'{name}: {{"same_as": {_dump(tensor.same_as)}}}'
        start = f'{name}: {{"dtype": "{tensor.dtype.code}", "shape": {list(tensor.shape)}, '
        if isinstance(tensor.layout, IrregularLayout):
            return f'{start}"boxes": {_dump(tensor.layout.to_json()["boxes"])}}}'
        writer = f'"writer": {tensor.writers[0]}'
        if len(tensor.writers) > 1:
            writer = f'"writers": {list(tensor.writers)}, "cut": {tensor.cut}'
        return f"{start}{self._place(tensor.layout)}, {writer}}}"

    def _place(self, layout: Layout) -> str:
        key = (layout.mesh, layout.placements)
        if key not in self._places:
            mesh = self.meshes.setdefault(layout.mesh, len(self.meshes))
            placements = _dump([str(placement) for placement in layout.placements])
            self._places[key] = f'"mesh": {mesh}, "placements": {placements}'
        return self._places[key]


def _tensors_from_json(value: dict[str, Any], meshes: list[Mesh]) -> dict[str, StoredTensor]:
    reader = _TensorReader(meshes)
    tied = {name: str(told["same_as"]) for name, told in value.items() if "same_as" in told}
    found: dict[str, StoredTensor] = {}
    for name, told in value.items():
        if name not in tied:
            found[name] = reader.tensor(name, told)
    for name, other in tied.items():
        found[name] = found[other]._replace(name=name, same_as=other)
    return {name: found[name] for name in value}


class _TensorReader:
    """Reads tensors, most of which are stored alike; those share one layout."""

    def __init__(self, meshes: list[Mesh]) -> None:
        self._meshes = meshes
        self._known: dict[tuple[Any, ...], StoredTensor] = {}

    def tensor(self, name: str, value: dict[str, Any]) -> StoredTensor:
        if "boxes" in value:
            layout = IrregularLayout.from_json(value)
            layout.validate()
            dtype = dtype_of_code(value["dtype"], f"tensor {name!r}")
            return StoredTensor(name=name, dtype=dtype, shape=layout.shape, layout=layout)
        writers = value["writers"] if "writers" in value else (value.get("writer", 0),)
        key = (
            value["dtype"],
            value["mesh"],
            *value["shape"],
            "",
            *value["placements"],
            *writers,
            value.get("cut", 0),
        )
        like = self._known.get(key)
        if like is None:
            like = self._known[key] = self._read(name, value)
        return StoredTensor(name, *like[1:])

    def _read(self, name: str, value: dict[str, Any]) -> StoredTensor:
        shape = tuple(int(n) for n in value["shape"])
        placements = tuple(parse_placement(text) for text in value["placements"])
        layout = Layout(self._meshes[value["mesh"]], placements, shape)
        writers, cut = _writers_from_json(name, value, layout)
        return StoredTensor(
            name=name,
            dtype=dtype_of_code(value["dtype"], f"tensor {name!r}"),
            shape=shape,
            layout=layout,
            writers=writers,
            cut=cut,
        )


def _writers_from_json(
    name: str, value: dict[str, Any], layout: Layout
) -> tuple[tuple[int, ...], int]:
    writers = tuple(int(n) for n in value.get("writers", [value.get("writer", 0)]))
    cut = int(value.get("cut", 0))
    known = range(layout.num_replicas)
    if not writers or not all(writer in known for writer in writers):
        raise ValueError(f"tensor {name!r}: no replicas {writers} in {layout}")
    if len(writers) > 1 and cut not in range(len(layout.shape)):
        raise ValueError(f"tensor {name!r}: cannot be cut along dim {cut}")
    return writers, cut


_dump = json.JSONEncoder(allow_nan=False).encode  # made once: there is a call for every line


def _dump_list(items: Iterable[Any]) -> str:
    return "[" + ",\n".join(map(_dump, items)) + "]"
