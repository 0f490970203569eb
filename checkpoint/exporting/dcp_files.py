"""A state as torch.distributed.checkpoint saves it: files of archives, and ``.metadata``.

The format is told in ``formats/dcp.py``, which reads it. Archives and metadata are made by torch
itself (``torch.save``, its public dataclasses), names as its planner flattens a state: dicts, and
lists that hold tensors or dicts, are joined by dots, all else is a value of its own. Only the
pickled properties of tensors are those that every torch since 2.3 reads: torch 2.15 writes one more
value, which older ones refuse.
"""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ...dtensor.torch_private import contiguous_code
from ...storage.base import Store
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..formats.flat_names import flat_leaves
from ..formats.names import METADATA
from ..reading.to_tensors import read_boxes
from ..state.tree import DICT_TAGS, Node, index_tree, tag_of, unflatten

_CHUNK_BYTES = 32 << 20
"""Most bytes of a chunk: torch makes its archive in memory."""
_FILE_BYTES = 128 << 20
"""Where files are cut: each is made in memory, since a store is told how long it will be."""


class _Item(NamedTuple):
    """What one archive holds: a chunk of a tensor, or a value."""

    fqn: str
    node: Node
    tensor: StoredTensor | None
    box: Box
    number: int
    """Of the chunk in its tensor."""

    @property
    def num_bytes(self) -> int:
        return 0 if self.tensor is None else self.box.numel * self.tensor.dtype.itemsize

    @property
    def key(self) -> MetadataIndex:
        if self.tensor is None:
            return MetadataIndex(self.fqn)
        return MetadataIndex(self.fqn, self.box.offsets, self.number)


class DcpFiles:
    """A part of a state, all of its values included, dealt to files."""

    replaces = re.compile(r"\.metadata|__\d+_\d+\.distcp")

    def __init__(self, manifest: Manifest, part: str, where: str) -> None:
        """Raise LayoutMismatch for a part that is no dict, and for two leaves of one name."""
        top = index_tree(manifest.tree).find(part)
        if tag_of(top) not in DICT_TAGS:
            raise LayoutMismatch(
                f"{where}: {part!r} is no dict of a state; export what is above it"
            )
        self._manifest = manifest
        leaves = flat_leaves(top, where, "export a part of them")
        self._leaves = {fqn: leaf for fqn, leaf in leaves.items() if leaf.path}  # {} has no leaves
        items = list(self._items())
        groups = _dealt(items) if items else []
        self._files = {f"__0_{n}.distcp": group for n, group in enumerate(groups)}
        self.names = tuple(dict.fromkeys(item.fqn for item in items if item.tensor is not None))
        self.tied: dict[str, str] = {}
        self.num_bytes = sum(item.num_bytes for item in items)

    @property
    def files(self) -> Sequence[str]:
        """Names of the files in the order of the state."""
        return tuple(self._files)

    def write(
        self, file: str, place: Store, data: StoredData, on_read: Callable[[int], None]
    ) -> str:
        """Write one file, and return where in it every archive begins and how long it is."""
        made = io.BytesIO()
        spans: list[tuple[int, int]] = []
        for item in self._files[file]:
            start = made.tell()
            torch.save(self._value(item, data), made)
            spans.append((start, made.tell() - start))
            on_read(item.num_bytes)
        with place.create(file, made.tell()) as stream:
            stream.write(made.getvalue())  # which is not copied, and no view that outlives an error
        return json.dumps(spans)

    def index(self, told: Mapping[str, str]) -> tuple[str, bytes] | None:
        """Return ``.metadata``."""
        metadata, info = _template()
        tensors: dict[str, Any] = {}
        storage: dict[MetadataIndex, Any] = {}
        for file, group in self._files.items():
            for item, (start, length) in zip(group, json.loads(told[file]), strict=True):
                storage[item.key] = replace(info, relative_path=file, offset=start, length=length)
                _note(tensors, item)
        made = replace(
            metadata,
            state_dict_metadata={fqn: tensors[fqn] for fqn in self._leaves},
            planner_data={fqn: leaf.path for fqn, leaf in self._leaves.items()},
            storage_data=storage,
            storage_meta=StorageMeta(),
        )
        pickled = io.BytesIO()
        pickler = pickle.Pickler(pickled)
        pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced}
        pickler.dump(made)
        return METADATA, pickled.getvalue()

    def _items(self) -> Iterator[_Item]:
        for fqn, leaf in self._leaves.items():
            if leaf.tensor is None:
                yield _Item(fqn, leaf.node, None, Box((), ()), 0)
                continue
            tensor = self._manifest.tensors[leaf.tensor]
            parts = Box.whole(tensor.shape).parts(_CHUNK_BYTES // tensor.dtype.itemsize)
            for number, box in enumerate(parts):
                yield _Item(fqn, leaf.node, tensor, box, number)

    def _value(self, item: _Item, data: StoredData) -> Any:
        if item.tensor is not None:
            return read_boxes(data, item.tensor, [item.box], check_files=False)[0]

        def tensor(name: str, tag: str) -> Any:
            stored = self._manifest.tensors[name]
            (found,) = read_boxes(data, stored, [Box.whole(stored.shape)], check_files=False)
            return found.numpy() if tag == "ndarray" else found

        return unflatten(item.node, tensor, allow_pickle=False, path=(item.fqn,))


def _dealt(items: Sequence[_Item]) -> list[list[_Item]]:
    """Return the items of every file."""
    groups: list[list[_Item]] = [[]]
    held = 0
    for item in items:
        if groups[-1] and held + item.num_bytes > _FILE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += item.num_bytes
    return groups


def _note(tensors: dict[str, Any], item: _Item) -> None:
    """Add a chunk, or a value, to what the metadata tells of leaves."""
    if item.tensor is None:
        tensors[item.fqn] = BytesStorageMetadata()
        return
    leaf = tensors.setdefault(
        item.fqn,
        TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, item.tensor.dtype.torch_name)),
            size=torch.Size(item.tensor.shape),
            chunks=[],
        ),
    )
    chunk = ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes))
    leaf.chunks.append(chunk)


def _reduced(properties: TensorProperties) -> tuple[Any, ...]:
    """Return how properties are pickled: as the five values that every torch takes."""
    # Of a plain tensor: torch has ceased to use all but the dtype.
    state = (properties.dtype, torch.strided, False, contiguous_code(), False)
    return copyreg.__newobj__, (TensorProperties,), state  # pyright: ignore[reportAttributeAccessIssue]


def _template() -> tuple[Metadata, Any]:
    """Return metadata of this torch, and what it notes of an archive: a class of no public name."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"value": 0}, is_coordinator=True)
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder, sync_files=False)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan(
            [writer.prepare_local_plan(planner.create_local_plan())]
        )
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        written = writer.write_data(plan, planner).wait()
        writer.finish(metadata, [written])
    return metadata, written[0].storage_data
