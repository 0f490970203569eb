"""Checkpoints of torch.distributed.checkpoint: ``.metadata``, and archives one after the other.

``.metadata`` is a pickle of a ``Metadata``: for every tensor its shape, dtype and chunks, for every
chunk and every other value the file, where in it an archive of ``torch.save`` begins, and how long
that is; and for every name the path in the state (torch/distributed/checkpoint/metadata.py and
filesystem.py of torch 2.13).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from dtckpt.errors import CheckpointError, Corrupt

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ...storage.names import check_component
from ..files.blocks import digest
from ..files.manifest import FileRecord, Manifest, Place
from ..files.stored_tensor import StoredTensor
from ..state.limits import check_metadata_bytes, shown, size_of, text_of
from ..state.tree import ABSENT
from ..state.values import Node
from ..tensors.dtypes import BY_TORCH_NAME, DType
from .archives.archive import Archive, Span, open_archives
from .archives.archived_files import open_compressed
from .archives.forms import IN_SAFETENSORS, ZSTD
from .archives.value_tensors import ValueTensors
from .beside import beside, with_notes
from .file_layouts import FileLayouts, unflattened
from .files import info_of_file, record_of
from .names import METADATA, OF_TORCH
from .pickles.arrays import NotHeld
from .pickles.unpickling import Inert, Record, load_pickle
from .trees import ValueNodes, component_of, name_of, paths_of, tree_of_paths

_KNOWN: Mapping[str, Any] = {
    **{
        f"{OF_TORCH}.metadata.{name}": Record
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex"),
            *("ChunkStorageMetadata", "TensorProperties", "StorageMeta"),
        )
    },
    f"{OF_TORCH}.filesystem._StorageInfo": Record,
    f"{OF_TORCH}.filesystem._StoragePrefix": Record,
    **{
        f"{OF_TORCH}.planner.{name}": Record
        for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
    },
    f"{OF_TORCH}.planner.WriteItemType": Inert(int),
    **{
        f"megatron.core.dist_checkpointing.strategies.torch.{name}": Record
        for name in ("MCoreMetadata", "MCoreSavePlan")
    },
    f"{OF_TORCH}.metadata._MEM_FORMAT_ENCODING": Inert(int),
    # Where torch up to 2.2 had the properties of tensors.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": Record,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": Inert(int),
}


class _Where(NamedTuple):
    """Where an archive lies."""

    file: str
    span: Span
    form: str


_FORMS: dict[tuple[str, ...], str] = {(): "", ("stream.zstd/1",): ZSTD}
"""By the extensions that torch names, in the order in which they are undone."""
_NUM_READERS = 32
_OWN_FILES = re.compile(r"\.metadata.*|.*\.distcp")
_ELEMENTS = "data/0"
"""The record of an archive of one tensor that has its elements."""


def read(store: Store, known: Collection[str] = ()) -> Manifest:
    """Return the manifest of the checkpoint in a store.

    ``known`` are names of files beside that somebody else reads.

    Raises Corrupt where parts of it are missing, CheckpointError for what dtckpt does not read.
    """
    size = store.stat(METADATA).size
    where = f"{store.url}/{METADATA}"
    check_metadata_bytes(2 * size, where)
    data = store.read(METADATA, 0, size)
    told = load_pickle(data, where, _KNOWN)
    try:
        index = _Index(told, store, where)
        made = with_notes(index.manifest(digest(data).hex()), left_out=index.left_out)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{where}: malformed metadata: {shown(error)}") from error
    return with_notes(made, passed_over=beside(store, known, also=_OWN_FILES))


class _Index:
    """What ``.metadata`` tells, as a manifest."""

    def __init__(self, told: Any, store: Store, where: str) -> None:
        self._store = store
        self._where = where
        self.left_out: dict[str, str] = {}
        """Values that are not held, by name."""
        self.why: NotHeld | None = None
        """Of the first of them."""
        self._leaves: dict[str, Any] = dict(told.state_dict_metadata)
        self._flattened = _flattened(told)
        self._paths = paths_of(self._leaves, getattr(told, "planner_data", None))
        self._archives: dict[str, dict[tuple[int, ...] | None, _Where]] = defaultdict(dict)
        for key, info in told.storage_data.items():
            offset = getattr(key, "offset", None)
            at = None if offset is None else tuple(offset)
            self._archives[text_of(key.fqn, "a name")][at] = _where(info, where)
        names = {w.file for chunks in self._archives.values() for w in chunks.values()}
        self._files = sorted(names)
        self._numbers = {name: number for number, name in enumerate(self._files)}
        with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="dtckpt-sizes") as pool:
            seen = list(pool.map(partial(info_of_file, store), self._files))
        self._seen = dict(zip(self._files, seen, strict=True))
        for places in self._archives.values():
            for place in places.values():
                self._check(place)
        self._layouts = FileLayouts(store.url, self._files)
        self._tensors: dict[str, StoredTensor] = {}
        self._places: dict[str, list[Place]] = defaultdict(list)

    def manifest(self, save_id: str) -> Manifest:
        """Return the manifest; values are read for it, tensors are not."""
        values = [fqn for fqn, leaf in self._leaves.items() if not hasattr(leaf, "chunks")]
        nodes = self._values(values)
        for fqn, leaf in self._leaves.items():
            if hasattr(leaf, "chunks"):
                dtype = _dtype(leaf.properties)
                if dtype is None:
                    self._leave_out(fqn, f"a tensor of {shown(_torch_dtype(leaf.properties))}")
                else:
                    nodes[fqn] = self._tensor(fqn, leaf, dtype)
        if self.why is not None and not nodes:
            raise CheckpointError(f"{self._where}: {self.why}") from self.why
        made = Manifest(
            save_id=save_id,
            tensors=self._tensors,
            tree=tree_of_paths(
                ((self._paths[f], nodes[f]) for f in self._leaves if f in nodes), self._where
            ),
            files=tuple(self._record(name) for name in self._files),
            created="",
            format=OF_TORCH,
        )
        made.validate()
        return made

    def _leave_out(self, fqn: str, kind: str) -> None:
        """Note a tensor that the manifest cannot hold."""
        name = name_of(self._paths[fqn])
        self.left_out[name] = kind
        self.why = self.why or NotHeld(f"{fqn!r} is {kind}, which dtckpt does not hold", kind)
        self._refuse_in_list(fqn)

    def _refuse_in_list(self, fqn: str) -> None:
        """Raise CheckpointError where what follows would move up without a value."""
        if any(type(part) is int for part in self._paths[fqn]):
            why = self.left_out[name_of(self._paths[fqn])]
            raise CheckpointError(
                f"{self._where}: {fqn!r} is {why}, in a list. Load it with torch and save it anew "
                "without that"
            )

    def _tensor(self, fqn: str, leaf: Any, dtype: DType) -> Node:
        if fqn in self._flattened:
            return self._flat_tensor(fqn, leaf, dtype)
        name, shape = name_of(self._paths[fqn]), _shape(leaf.size)
        tensor = StoredTensor(name, dtype, shape, self._layout(fqn, leaf))
        for box in _boxes(leaf):
            if not box.is_empty or box.sizes == shape:
                at = self._archive(fqn, box.offsets)
                self._places[at.file].append(self._place(tensor, box, at, fqn))
        self._tensors[name] = tensor
        return {"tensor": name}

    def _flat_tensor(self, fqn: str, leaf: Any, dtype: DType) -> Node:
        name, shape = name_of(self._paths[fqn]), self._flattened[fqn]
        parts = [
            (box, start, self._archive(fqn, chunk.offsets))
            for chunk in _boxes(leaf)
            for box, start in unflattened(shape, _shape(leaf.size), chunk)
        ]
        boxes = [(self._numbers[at.file], box) for box, _, at in parts]
        layout = self._layouts.of_parts(fqn, shape, boxes)
        tensor = StoredTensor(name, dtype, shape, layout)
        for box, start, at in parts:
            skip = start * tensor.dtype.itemsize
            place = Place(tensor.key(box), at.span.start, at.span.size, _ELEMENTS, skip)
            self._places[at.file].append(place._replace(form=at.form))
        self._tensors[name] = tensor
        return {"tensor": name}

    def _place(self, tensor: StoredTensor, box: Box, at: _Where, fqn: str) -> Place:
        """Return where a chunk is: an archive has more bytes than the elements in it."""
        place = Place(tensor.key(box), at.span.start, at.span.size, form=at.form)
        if at.form or at.span.size != box.numel * tensor.dtype.itemsize:
            return place
        return place._replace(record=fqn, form=IN_SAFETENSORS)

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
        by_file: dict[tuple[str, str], list[str]] = defaultdict(list)
        for fqn in fqns:
            at = self._archive(fqn, None)
            by_file[at.file, at.form].append(fqn)
        nodes: dict[str, Node] = {}
        for (file, form), names in by_file.items():
            spans = [self._archive(fqn, None).span for fqn in names]
            if form == ZSTD:
                archives = [open_compressed(self._store, file, span) for span in spans]
            else:
                archives = open_archives(self._store, file, spans)
            for fqn, archive in zip(names, archives, strict=True):
                node = self._value(fqn, archive)
                if node is not ABSENT:
                    nodes[fqn] = node
                else:
                    self._refuse_in_list(fqn)
        return nodes

    def _value(self, fqn: str, archive: Archive) -> Node:
        """Return the node of a value, ABSENT if it is left out.

        Tensors in it are tensors of the checkpoint.
        """
        where, at = f"{archive.where}, {fqn!r}", self._archive(fqn, None)
        found = ValueTensors(
            self._layouts,
            self._numbers[at.file],
            Place("", at.span.start, at.span.size, form=at.form),
            where,
        )
        value = load_pickle(archive.read("data.pkl"), where, with_unheld=True)
        path = tuple(map(component_of, self._paths[fqn]))
        made = ValueNodes(where, found.kinds, found.node, tensors=found)
        node = made.node_if_held(value, path)
        self.left_out |= made.left_out
        self.why = self.why or made.why
        self._tensors |= found.tensors
        self._places[at.file] += found.places
        return node

    def _check(self, at: _Where) -> None:
        """Raise Corrupt where a file is shorter than an archive in it tells."""
        size, last = self._seen[at.file].size, at.span.start + at.span.size
        if last > size:
            raise Corrupt(
                f"{self._store.url}/{at.file}: the file has {size} bytes, {METADATA} tells of "
                f"{last}: it was cut short. Fetch it again"
            )

    def _record(self, file: str) -> FileRecord:
        places = tuple(sorted(self._places[file], key=lambda place: (place.start, place.key)))
        return record_of(self._numbers[file], self._seen[file], places)


def _where(info: Any, where: str) -> _Where:
    descriptors = getattr(info, "transform_descriptors", None) or ()
    form = _FORMS.get(tuple(descriptors))
    if form is None:
        raise CheckpointError(
            f"{where}: {shown(info.relative_path)} was written by extensions "
            f"({shown(descriptors)}) of which dtckpt reads none but zstd's; load it with torch and "
            "save it anew"
        )
    file = text_of(info.relative_path, "a file")
    try:
        check_component(file)
    except ValueError as error:
        raise Corrupt(f"{where}: {shown(file)} is no name of a file beside {METADATA}") from error
    start = size_of(info.offset, "an offset")
    return _Where(file, Span(start, size_of(info.length, "a length")), form)


def _flattened(told: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that Megatron before 0.14 has written in others, by name."""
    noted = (getattr(told, "mcore_data", None) or {}).items()
    shapes = {fqn: data.get("nd_reformulated_orig_global_shape") for fqn, data in noted}
    return {fqn: _shape(shape) for fqn, shape in shapes.items() if shape is not None}


def _shape(sizes: Any) -> tuple[int, ...]:
    return tuple(size_of(n, "a size") for n in sizes)


def _boxes(leaf: Any) -> list[Box]:
    return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in leaf.chunks]


def _torch_dtype(properties: Any) -> Any:
    """Return the dtype of a tensor, or what stands in its place."""
    state = getattr(properties, "args", ())
    return state[0] if state else getattr(properties, "dtype", None)


def _dtype(properties: Any) -> DType | None:
    """Return the element type of a tensor; None for one that dtckpt does not hold."""
    dtype = _torch_dtype(properties)
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else ""
    return BY_TORCH_NAME.get(name)
