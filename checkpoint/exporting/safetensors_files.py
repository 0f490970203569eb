"""Tensors as safetensors files with an index, as Hugging Face's libraries save and load them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.box import Box
from ...storage.base import Store
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..files.stored_tensor import StoredTensor
from ..formats.names import SAFETENSORS
from ..reading.batches import BatchedReader, Part
from ..state.names import key_of
from ..state.tree import TENSORS, TreeIndex, index_tree, tag_of
from ..tensors.dtypes import DType
from ..tensors.source import PIECE_BYTES

_INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8


def check_safetensors(dtype: DType, name: str, remedy: str) -> None:
    """Raise LayoutMismatch where safetensors has no such element type."""
    if dtype.in_file is not dtype:
        raise LayoutMismatch(
            f"tensor {name!r}: safetensors, and so a {SAFETENSORS} file, has no "
            f"{dtype.torch_name}; {remedy}"
        )


def file_head(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return what a file begins with that holds tensors one after the other.

    They are given by name, code of the element type, shape as files state it, and bytes.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key, code, shape, num_bytes in entries:
        header[key] = {"dtype": code, "shape": shape, "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class SafetensorsFiles:
    """The tensors of a part of a state, dealt to files by size."""

    replaces = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")

    def __init__(
        self, manifest: Manifest, part: str, where: str, *, only: str | None, max_file_bytes: int
    ) -> None:
        """``only`` is the name of the file where there is to be one; else they are many.

        Raises LayoutMismatch for values that are no tensors, and for two tensors of one name.
        """
        chosen = _chosen(manifest, index_tree(manifest.tree), part, where)
        self.tied: dict[str, str] = {}
        first: dict[str, str] = {}
        for name, tensor in chosen.items():
            kept = first.setdefault(tensor.stored_name, name)
            if kept != name:
                self.tied[name] = kept
        kept = {name: t for name, t in chosen.items() if name not in self.tied}
        for name, tensor in kept.items():
            check_safetensors(tensor.dtype, name, "export a part without it, or as dcp")
        self._files = _dealt(kept, only, max_file_bytes)
        self.names = tuple(kept)
        self.num_bytes = sum(tensor.num_bytes for tensor in kept.values())

    @property
    def files(self) -> Sequence[str]:
        """Names of the files in the order of their tensors."""
        return tuple(self._files)

    def write(
        self, file: str, place: Store, data: StoredData, on_read: Callable[[int], None]
    ) -> str:
        """Write one file: wide element types first, so that each is aligned to its items."""
        tensors = self._files[file]
        ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        metadata = {"format": "pt"} | {n: kept for n, kept in self.tied.items() if kept in tensors}
        entries = [
            (key, t.dtype.code, t.dtype.file_shape(t.shape), t.num_bytes) for key, t in ordered
        ]
        head = file_head(entries, metadata)
        parts: list[Part] = [(tensor.name, Box.whole(tensor.shape)) for _, tensor in ordered]
        size = len(head) + sum(tensor.num_bytes for _, tensor in ordered)
        with place.create(file, size) as stream:
            stream.write(head)
            for source in BatchedReader(data, on_read).sources(parts):
                for piece in source.pieces(PIECE_BYTES):
                    stream.write(piece)
            if len(self._files) == 1:  # without an index, the file counts as soon as it appears
                data.check_unchanged()
        return ""

    def index(self, told: Mapping[str, str]) -> tuple[str, bytes] | None:
        """Return the index that names the file of every tensor, where there are several."""
        if len(told) == 1:
            return None
        index = {
            "metadata": {"total_size": self.num_bytes},
            "weight_map": {n: file for file, tensors in self._files.items() for n in tensors},
        }
        return _INDEX, json.dumps(index, indent=2).encode()


def _chosen(manifest: Manifest, index: TreeIndex, part: str, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a part by the names that they get."""
    chosen: dict[str, StoredTensor] = {}
    values: list[str] = []
    for leaf in index.leaves_of(part):
        node = index.find(leaf)
        if tag_of(node) not in TENSORS:
            values.append(leaf)
            continue
        components = leaf[len(part) :].strip("/").split("/")
        name = ".".join(str(key_of(component)) for component in components if component)
        if not name or name == "__metadata__":
            raise LayoutMismatch(
                f"{where}: {leaf!r} has no name in a file; export what is above it"
            )
        tensor = manifest.tensors[next(iter(node.values()))]
        if name in chosen:
            raise LayoutMismatch(
                f"{where}: {chosen[name].name!r} and {leaf!r} would both be called {name!r}; "
                "export a part of them"
            )
        chosen[name] = tensor
    if values or not chosen:
        told = ", ".join(values[:3]) + (f" and {len(values) - 3} more" if values[3:] else "")
        raise LayoutMismatch(
            f"{where}: safetensors files hold tensors only, and {part or 'the state'!r} has "
            f"{told or 'none'}; choose a part, such as part='model'"
        )
    return chosen


def _dealt(
    chosen: Mapping[str, StoredTensor], only: str | None, max_file_bytes: int
) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of every file."""
    groups: list[dict[str, StoredTensor]] = [{}]
    held = 0
    for name, tensor in chosen.items():
        if only is None and groups[-1] and held + tensor.num_bytes > max_file_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += tensor.num_bytes
    if len(groups) == 1:
        return {only or "model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}
