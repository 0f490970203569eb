"""Checkpoints of torch.distributed.checkpoint: ``.metadata``, and archives one after the other.

``.metadata`` is a pickle of a ``Metadata``: for every tensor its shape, dtype and chunks, for every
chunk and every other value the file, where in it an archive of ``torch.save`` begins, and how long
that is; and for every name the path in the state (torch/distributed/checkpoint/metadata.py and
filesystem.py of torch 2.13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtckpt.errors import CheckpointError, Corrupt

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ..files.blocks import digest
from ..files.manifest import FileRecord, Manifest, Place
from ..files.stored_tensor import StoredTensor
from ..state.limits import check_metadata_bytes, shown, size_of, text_of
from ..state.values import Node
from ..tensors.dtypes import BY_TORCH_NAME, DType
from .archived_files import check_contiguous
from .archives import Archive, Span, open_archives
from .file_layouts import FileLayouts
from .files import size_of_file
from .names import METADATA, OF_TORCH
from .trees import IntKey, StatePath, ValueNodes, component_of, name_of, tree_of_paths
from .unpickling import Inert, Record, TensorNote, load_pickle

_KNOWN: Mapping[str, Any] = {
    **{
        f"{OF_TORCH}.metadata.{name}": Record
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex"),
            *("ChunkStorageMetadata", "TensorProperties", "StorageMeta"),
        )
    },
    f"{OF_TORCH}.filesystem._StorageInfo": Record,
    f"{OF_TORCH}.metadata._MEM_FORMAT_ENCODING": Inert(int),
}


class _Where(NamedTuple):
    """Where an archive lies."""

    file: str
    span: Span


def read(store: Store) -> Manifest:
    """Return the manifest of the checkpoint in a store.

    Raises Corrupt where parts of it are missing, CheckpointError for what dtckpt does not read.
    """
    size = store.stat(METADATA).size
    where = f"{store.url}/{METADATA}"
    check_metadata_bytes(2 * size, where)
    data = store.read(METADATA, 0, size)
    told = load_pickle(data, where, _KNOWN)
    try:
        index = _Index(told, store, where)
        return index.manifest(digest(data).hex())
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{where}: malformed metadata: {shown(error)}") from error


class _Index:
    """What ``.metadata`` tells, as a manifest."""

    def __init__(self, told: Any, store: Store, where: str) -> None:
        self._store = store
        self._where = where
        self._leaves: dict[str, Any] = dict(told.state_dict_metadata)
        self._paths = _paths(self._leaves, getattr(told, "planner_data", None))
        self._archives: dict[str, dict[tuple[int, ...] | None, _Where]] = defaultdict(dict)
        for key, info in told.storage_data.items():
            offset = getattr(key, "offset", None)
            at = None if offset is None else tuple(offset)
            self._archives[text_of(key.fqn, "a name")][at] = _where(info, where)
        names = {w.file for chunks in self._archives.values() for w in chunks.values()}
        self._files = sorted(names)
        self._numbers = {name: number for number, name in enumerate(self._files)}
        self._layouts = FileLayouts(store.url, self._files)
        self._tensors: dict[str, StoredTensor] = {}
        self._places: dict[str, list[Place]] = defaultdict(list)

    def manifest(self, save_id: str) -> Manifest:
        """Return the manifest; values are read for it, tensors are not."""
        values = [fqn for fqn, leaf in self._leaves.items() if not hasattr(leaf, "chunks")]
        nodes = self._values(values)
        for fqn, leaf in self._leaves.items():
            if hasattr(leaf, "chunks"):
                nodes[fqn] = self._tensor(fqn, leaf)
        made = Manifest(
            save_id=save_id,
            tensors=self._tensors,
            tree=tree_of_paths(((self._paths[f], nodes[f]) for f in self._leaves), self._where),
            files=tuple(self._record(name) for name in self._files),
            created="",
            format=OF_TORCH,
        )
        made.validate()
        return made

    def _tensor(self, fqn: str, leaf: Any) -> Node:
        name, shape = name_of(self._paths[fqn]), tuple(size_of(n, "a size") for n in leaf.size)
        tensor = StoredTensor(name, _dtype(leaf.properties, fqn), shape, self._layout(fqn, leaf))
        for box in _boxes(leaf):
            if not box.is_empty or box.sizes == shape:
                at = self._archive(fqn, box.offsets)
                self._places[at.file].append(Place(tensor.key(box), at.span.start, at.span.size))
        self._tensors[name] = tensor
        return {"tensor": name}

    def _layout(self, fqn: str, leaf: Any) -> Any:
        parts = [(self._numbers[self._archive(fqn, box.offsets).file], box) for box in _boxes(leaf)]
        return self._layouts.of_parts(fqn, tuple(leaf.size), parts)

    def _archive(self, fqn: str, at: tuple[int, ...] | None) -> _Where:
        found = self._archives.get(fqn, {}).get(at)
        if found is None:
            what = "its value" if at is None else f"the chunk at {list(at)}"
            raise Corrupt(f"{self._where}: {fqn!r}: nothing tells where {what} lies")
        return found

    def _values(self, fqns: Sequence[str]) -> dict[str, Node]:
        """Read the values that are no tensors, those of each file at once."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for fqn in fqns:
            by_file[self._archive(fqn, None).file].append(fqn)
        nodes: dict[str, Node] = {}
        for file, names in by_file.items():
            spans = [self._archive(fqn, None).span for fqn in names]
            self._check(file, spans)
            archives = open_archives(self._store, file, spans)
            for fqn, archive, span in zip(names, archives, spans, strict=True):
                nodes[fqn] = self._value(fqn, archive, file, span)
        return nodes

    def _value(self, fqn: str, archive: Archive, file: str, span: Span) -> Node:
        """Return the node of a value; tensors in it are tensors of the checkpoint."""
        where = f"{archive.where}, {fqn!r}"

        def tensor(name: str, note: TensorNote) -> Node:
            dtype = note.dtype(where)
            check_contiguous(note, where)
            self._tensors[name] = StoredTensor(
                name, dtype, note.shape, self._layouts.whole(self._numbers[file], note.shape)
            )
            record, skip = f"data/{note.storage.key}", note.start * dtype.itemsize
            self._places[file].append(Place(name, span.start, span.size, record, skip))
            return {"tensor": name}

        value = load_pickle(archive.read("data.pkl"), where)
        path = tuple(map(component_of, self._paths[fqn]))
        return ValueNodes(where, tensor).node(value, path)

    def _check(self, file: str, spans: Sequence[Span]) -> int:
        """Return the length of a file, which has all these spans."""
        size = size_of_file(self._store, file)
        last = max((span.start + span.size for span in spans), default=0)
        if last > size:
            raise Corrupt(
                f"{self._store.url}/{file}: the file has {size} bytes, {METADATA} tells of "
                f"{last}: it was cut short. Fetch it again"
            )
        return size

    def _record(self, file: str) -> FileRecord:
        places = tuple(sorted(self._places[file], key=lambda place: (place.start, place.key)))
        size = self._check(file, [Span(place.start, place.size) for place in places])
        return FileRecord(
            rank=self._numbers[file],
            size=size,
            header_bytes=0,
            data_bytes=size,
            header_digest="",
            table_digest="",
            name=file,
            places=places,
        )


def _where(info: Any, where: str) -> _Where:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{where}: {shown(info.relative_path)} was written by an extension "
            f"({shown(info.transform_descriptors)}), which dtckpt does not read; load it with "
            "torch and save it anew"
        )
    file = text_of(info.relative_path, "a file")
    if "/" in file or file in ("", ".", ".."):
        raise ValueError(f"{shown(file)} is no name of a file beside {METADATA}")
    start = size_of(info.offset, "an offset")
    return _Where(file, Span(start, size_of(info.length, "a length")))


def _boxes(leaf: Any) -> list[Box]:
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in leaf.chunks]


def _dtype(properties: Any, fqn: str) -> DType:
    state = getattr(properties, "args", ())
    dtype = state[0] if state else getattr(properties, "dtype", None)
    found = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype) or found is None:
        raise CheckpointError(f"tensor {fqn!r} is of dtype {shown(dtype)}, which dtckpt has not")
    return found


def _paths(leaves: Mapping[str, Any], told: Any) -> dict[str, StatePath]:
    """Return the path of every leaf. torch writes int keys as text: an optimizer's become ints."""
    paths: dict[str, StatePath] = {}
    for fqn in leaves:
        path = (told or {}).get(fqn, (fqn,)) if isinstance(told, dict) else (fqn,)
        if not all(type(part) in (str, int) for part in path):
            raise ValueError(f"{shown(path)} is no path")
        paths[text_of(fqn, "a name")] = tuple(path)
    optimizers = {
        p[:i] for p in paths.values() for i, part in enumerate(p) if part == "param_groups"
    }
    return {fqn: _with_numbers(path, optimizers) for fqn, path in paths.items()}


def _with_numbers(path: StatePath, optimizers: set[StatePath]) -> StatePath:
    for i, part in enumerate(path[:-1]):
        number = path[i + 1]
        is_number = isinstance(number, str) and number.isascii() and number.isdecimal()
        if part == "state" and is_number and path[:i] in optimizers:
            return (*path[: i + 1], IntKey(number), *path[i + 2 :])
    return path
