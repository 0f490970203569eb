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
from ..dtensor.placement import parse_placement
from ..storage.base import Store
from .blocks import digest
from .dtypes import dtype_of_code
from .plan import StoredTensor
from .spec import FORMAT_VERSION
from .tree import Node, tensor_names

MANIFEST = "manifest.json"
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
    header_digest: str
    table_digest: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "rank": self.rank,
            "size": self.size,
            "header_bytes": self.header_bytes,
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
            header_digest=str(value["header"]),
            table_digest=str(value["blocks"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its bytes."""

    save_id: str
    created: str
    """UTC time of the commit, ISO 8601."""
    tensors: dict[str, StoredTensor]
    tree: Node
    files: tuple[FileRecord, ...]
    metadata: Any = field(default=None)
    """JSON that the user gave at save."""

    def path_of(self, record: FileRecord) -> str:
        """Return the name of a data file in the checkpoint's store."""
        return data_path(self.save_id, record.rank)

    def to_bytes(self) -> bytes:
        """Return the text of the manifest: one line per tensor and per file."""
        meshes: dict[Mesh, int] = {}
        tensors = {name: _tensor_to_json(t, meshes) for name, t in self.tensors.items()}
        body = ",\n".join(
            [
                f'"format": "dtckpt", "version": {FORMAT_VERSION}, "requires": []',
                f'"save_id": {_dump(self.save_id)}, "created": {_dump(self.created)}',
                f'"metadata": {_dump(self.metadata)}',
                f'"meshes": {_dump([mesh.to_json() for mesh in meshes])}',
                f'"tensors": {_dump_lines(tensors)}',
                f'"tree": {_dump(self.tree)}',
                f'"files": {_dump_list([record.to_json() for record in self.files])}',
            ]
        )
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
            manifest._validate()
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Corrupt(f"{where}: malformed manifest: {error!r}") from error
        return manifest

    def _validate(self) -> None:
        """Raise ValueError where fields are well-formed but do not fit together."""
        if not re.fullmatch(r"[0-9a-f]+", self.save_id):
            raise ValueError(f"the save id {self.save_id!r} is not hexadecimal")
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
        for record in self.files:
            if min(record.rank, record.header_bytes, record.size - record.header_bytes) < 0:
                raise ValueError(f"impossible file record {record}")

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        meshes = [Mesh.from_json(mesh) for mesh in value["meshes"]]
        return cls(
            save_id=str(value["save_id"]),
            created=str(value["created"]),
            metadata=value["metadata"],
            tree=value["tree"],
            tensors={n: _tensor_from_json(n, t, meshes) for n, t in value["tensors"].items()},
            files=tuple(FileRecord.from_json(record) for record in value["files"]),
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
    version, requires = value.get("version"), value.get("requires")
    if version != FORMAT_VERSION or requires:
        raise CheckpointError(
            f"{where}: written in format version {version!r} with the required features "
            f"{requires!r}; this dtckpt reads version {FORMAT_VERSION} without any. Upgrade dtckpt"
        )


def _tensor_to_json(tensor: StoredTensor, meshes: dict[Mesh, int]) -> dict[str, Any]:
    value: dict[str, Any] = {"dtype": tensor.dtype.code, "shape": list(tensor.shape)}
    if isinstance(tensor.layout, IrregularLayout):
        return value | {"boxes": tensor.layout.to_json()["boxes"]}
    return value | {
        "mesh": meshes.setdefault(tensor.layout.mesh, len(meshes)),
        "placements": [str(p) for p in tensor.layout.placements],
        "writer": tensor.writer,
    }


def _tensor_from_json(name: str, value: dict[str, Any], meshes: list[Mesh]) -> StoredTensor:
    shape = tuple(int(n) for n in value["shape"])
    layout: Layout | IrregularLayout
    if "boxes" in value:
        layout = IrregularLayout.from_json(value)
        layout.validate()
    else:
        placements = tuple(parse_placement(text) for text in value["placements"])
        layout = Layout(meshes[value["mesh"]], placements, shape)
    writer = int(value.get("writer", 0))
    if isinstance(layout, Layout) and not 0 <= writer < layout.num_replicas:
        raise ValueError(f"tensor {name!r}: no replica {writer} in {layout}")
    return StoredTensor(
        name=name,
        dtype=dtype_of_code(value["dtype"], f"tensor {name!r}"),
        shape=shape,
        layout=layout,
        writer=writer,
    )


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _dump_lines(value: dict[str, Any]) -> str:
    return "{" + ",\n".join(f"{_dump(key)}: {_dump(item)}" for key, item in value.items()) + "}"


def _dump_list(items: Iterable[Any]) -> str:
    return "[" + ",\n".join(map(_dump, items)) + "]"
