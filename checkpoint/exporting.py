"""Exporting: the tensors of a checkpoint as safetensors files that other libraries load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import LayoutMismatch, ObjectExists

from ..dtensor.geometry.box import Box
from ..storage.base import Store
from ..storage.one_file import OneFile
from ..storage.open import open_store
from .files.manifest import Manifest
from .files.stored_tensor import StoredTensor
from .formats.names import SAFETENSORS
from .formats.opening import open_place, read_manifest, stored_data
from .reading.batches import BatchedReader, Part, counted
from .state.names import key_of
from .state.selecting import near_names
from .state.tree import ABSENT, TENSORS, index_tree, tag_of
from .tensors.source import PIECE_BYTES

MAX_FILE_BYTES = 5_000_000_000
"""As the libraries of Hugging Face cut files by default."""
_INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8
_OURS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
"""What an export may be made of, and replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export has written."""

    url: str
    files: tuple[str, ...]
    """Names of the safetensors files, in order."""
    tensors: tuple[str, ...]
    """Names of the tensors in them."""
    tied: Mapping[str, str]
    """Names that stand for the elements of another one, which alone is written."""
    num_bytes: int
    """Bytes of all tensors that are written."""


def export(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    part: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write the tensors of a checkpoint as safetensors, as Hugging Face's libraries load them.

    ``target`` is a directory, in which ``model.safetensors`` is made, or several files of at most
    ``max_file_bytes`` (a larger tensor has a file of its own) and their index, which is written
    last; or the path of one file that ends in ``.safetensors``. ``part`` is the name of the part
    of the state that is meant, such as ``"model"``; names are those below it, joined by dots:
    ``model/layers.0.weight`` becomes ``layers.0.weight``. Tied tensors are written once, and named
    in the metadata of their file, as by ``safetensors.torch.save_model``.

    Memory is bounded whatever the size; every byte is verified as it is read, if the checkpoint has
    checksums. ``on_progress(done, total)`` is called with bytes.

    Raises LayoutMismatch where the part is not there, holds values that are no tensors, or gives
    two tensors one name, and where the target is the place of the source; ObjectExists where
    weights are in the target, unless ``overwrite``, which takes them away before anything is
    written; and what ``open`` raises. What was written until then is taken away.
    """
    old = open_place(source, **dict(source_options or {}))
    manifest = read_manifest(old)
    chosen = _chosen(manifest, part, old.url)
    place, only = _place(target, dict(target_options or {}))
    files, tied = _dealt(chosen, only, max_file_bytes)
    _refuse_source(old, place)
    _make_room(place, only, overwrite=overwrite)
    total = sum(tensor.num_bytes for file in files.values() for tensor in file.values())
    reader = BatchedReader(stored_data(old, manifest), counted(on_progress, total))
    written: list[str] = []
    try:
        for name, tensors in files.items():
            _write(place, name, tensors, tied, reader)
            written.append(name)  # only now: a file that is there already is another's
        if len(files) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {n: name for name, file in files.items() for n in file},
            }
            place.publish(_INDEX, json.dumps(index, indent=2).encode(), overwrite=False)
    except BaseException:
        place.delete(written)
        raise
    return ExportReport(
        url=place.url,
        files=tuple(files),
        tensors=tuple(name for file in files.values() for name in file),
        tied=tied,
        num_bytes=total,
    )


def _chosen(manifest: Manifest, part: str, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a part by the names that they get."""
    index = index_tree(manifest.tree)
    part = part.strip("/")
    if index.find(part) is ABSENT:
        hint = near_names(part, index.leaves)
        raise LayoutMismatch(f"{where}: there is no part {part!r}{hint}")
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


def _place(
    target: str | os.PathLike[str] | Store, options: dict[str, Any]
) -> tuple[Store, str | None]:
    """Return the store to write to, and the name of the file where it is to be one."""
    if isinstance(target, Store):
        return target, None
    path = os.fspath(target)
    if not path.lower().endswith(SAFETENSORS):
        return open_store(path, **options), None
    folder, _, name = path.rpartition("/")
    return open_store(folder or ("/" if path.startswith("/") else "."), **options), name


def _dealt(
    chosen: Mapping[str, StoredTensor], only: str | None, max_file_bytes: int
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, str]]:
    """Return the tensors of every file, and the names that are tied to others."""
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    groups: list[dict[str, StoredTensor]] = [{}]
    held = 0
    for name, tensor in chosen.items():
        kept = first.setdefault(tensor.stored_name, name)
        if kept != name:
            tied[name] = kept
            continue
        if only is None and groups[-1] and held + tensor.num_bytes > max_file_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += tensor.num_bytes
    if len(groups) == 1:
        return {only or "model.safetensors": groups[0]}, tied
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}, tied


def _refuse_source(old: Store, place: Store) -> None:
    """Raise LayoutMismatch where what is read lies in the target, which may have to make room."""
    source = os.path.dirname(old.url) if isinstance(old, OneFile) else old.url
    paths = [os.path.realpath(url) if os.path.isabs(url) else url for url in (source, place.url)]
    if paths[0] == paths[1]:
        raise LayoutMismatch(
            f"{place.url}: the checkpoint that is exported lies there itself; choose another place"
        )


def _make_room(place: Store, only: str | None, *, overwrite: bool) -> None:
    """Raise ObjectExists where weights are already; with ``overwrite`` take them away."""
    if only is not None:
        names = [only] if place.exists(only) else []
    else:
        names = [info.name for info in place.list() if _OURS.fullmatch(info.name)]
    if names and not overwrite:
        raise ObjectExists(
            f"{place.url}: {names[0]} is there already; choose another place, or pass "
            "overwrite=True to replace it"
        )
    names.sort(key=lambda name: not name.endswith(".json"))
    for name in names:  # the index first: without it what is left is taken for no whole
        place.delete([name])


def _write(
    place: Store,
    name: str,
    tensors: Mapping[str, StoredTensor],
    tied: Mapping[str, str],
    reader: BatchedReader,
) -> None:
    """Write one file: wide element types first, so that each is aligned to its items."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    metadata = {"format": "pt"} | {n: kept for n, kept in tied.items() if kept in tensors}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key, tensor in ordered:
        header[key] = {
            "dtype": tensor.dtype.code,
            "shape": tensor.dtype.file_shape(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts: list[Part] = [(tensor.name, Box.whole(tensor.shape)) for _, tensor in ordered]
    with place.create(name, 8 + len(text) + at) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for source in reader.sources(parts):
            for piece in source.pieces(PIECE_BYTES):
                stream.write(piece)
