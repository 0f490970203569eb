"""safetensors files of any program, and the manifest of several of them.

The format: 8 bytes with the length of a JSON header, little endian, the header, and the tensors one
after the other without gaps (https://github.com/huggingface/safetensors). What torch's
HuggingFaceStorageWriter saves in shards are such files, too, whose metadata tells for each tensor
where in the whole it begins (``DCP_SHARDING_INFO``).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...storage.base import ObjectInfo, Store
from ..files.blocks import digest
from ..files.datafile import Entry, entries_of
from ..files.manifest import FileRecord, Manifest
from ..files.stored_data import DataFile, check_size
from ..files.stored_tensor import StoredTensor
from ..state.limits import check_metadata_bytes, object_of, parse_json, shown, size_of, text_of
from ..state.names import key_component, key_of
from ..state.tree import container_node
from .beside import with_notes
from .file_layouts import FileLayouts
from .files import data_file, info_of_file, where_of
from .kinds import HEAD_BYTES, check_readable, is_safetensors, is_torch_save

FORMAT = "safetensors"
_SHARDS = "DCP_SHARDING_INFO"
_NUM_READERS = 16
_LEAST_BYTES = 10
"""Of a file without tensors: the length, and {}."""
_LIKELY_BYTES = 64 << 10
"""What is read of a file before the length of its header is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the header of a file tells."""

    record: FileRecord
    data_start: int
    """First byte of the elements in the file."""
    entries: dict[str, Entry]
    """By name, in file order."""
    boxes: dict[str, Box]
    """Where parts lie in the whole, by name."""
    metadata: dict[str, str]


def manifest_of(
    store: Store,
    files: Sequence[str],
    *,
    chosen: Mapping[str, str] | None = None,
    metadata: Any = None,
) -> Manifest:
    """Return the manifest of the tensors in some files.

    ``chosen`` says for every name of a tensor in which file it is; without it files must not have
    equal names, but for parts of one tensor. Raises Corrupt where files or tensors are missing.
    """
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="dtckpt-headers") as pool:
        headers = list(pool.map(partial(read_header, store), files, count()))
    pieces: dict[str, list[tuple[int, Entry, Box | None]]] = {}
    for number, header in enumerate(headers):
        for name, entry in header.entries.items():
            if chosen is None or chosen.get(name) == files[number]:
                pieces.setdefault(name, []).append((number, entry, header.boxes.get(name)))
    for name in chosen or ():
        if name not in pieces:
            raise Corrupt(
                f"{store.url}: the index names tensor {name!r} in {(chosen or {})[name]}, which "
                "does not have it. Fetch the files again"
            )
    layouts = FileLayouts(store.url, files)
    tensors = {
        key_component(name): _tensor(layouts, store, files, name, pieces[name])
        for name in chosen or pieces  # in the order of the index, where there is one
    }
    for name, kept in _tied(headers, pieces):
        tensors[key_component(name)] = tensors[key_component(kept)]._replace(
            name=key_component(name), same_as=key_component(kept)
        )
    if metadata is None and headers:
        told = headers[0].metadata.items()
        metadata = {k: text for k, text in told if k != _SHARDS and key_component(k) not in tensors}
    made = Manifest(
        save_id=digest(b"".join(h.record.header_digest.encode() for h in headers)).hex(),
        tensors=tensors,
        tree=container_node("dict", [(key_of(name), {"tensor": name}) for name in tensors]),
        files=tuple(header.record for header in headers),
        created="",
        metadata=metadata,
        format=FORMAT,
    )
    made = with_notes(made, left_out=_not_chosen(headers, files, chosen))
    try:
        made.validate()
    except ValueError as error:
        raise Corrupt(f"{store.url}: {shown(error)}") from error
    return made


def _not_chosen(
    headers: Sequence[Header], files: Sequence[str], chosen: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the tensors that files have and the index does not name."""
    if chosen is None:
        return {}
    return {
        key_component(name): f"a tensor of {file} that the index does not name"
        for file, header in zip(files, headers, strict=True)
        for name in header.entries
        if name not in chosen
    }


def _tied(headers: Sequence[Header], pieces: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield names that metadata ties to the tensor that has their elements.

    As ``safetensors.torch.save_model`` writes it, which leaves tied tensors out. Other metadata may
    have the name of a tensor for a value, too: that of a tied one is a path, or there is no other.
    """
    for header in headers:
        told = header.metadata
        if told.get("format") != "pt":
            continue
        found = {
            name: kept
            for name, kept in told.items()
            if kept in header.entries and kept in pieces and name not in pieces
        }
        others = told.keys() - found.keys() - {"format"}
        for name, kept in found.items():
            if "." in name or not others:
                yield name, kept


def open_file(store: Store, manifest: Manifest, record: FileRecord) -> DataFile:
    """Return a file that a manifest knows; Corrupt unless it is what it was then."""
    name = manifest.path_of(record)
    where = where_of(store, name)
    seen = check_size(store, name, record.size)
    header = read_header(
        store, name, record.rank, end=record.size, header_bytes=record.header_bytes
    )
    if header.record != record:
        raise Corrupt(f"{where}: the file was replaced while it was read. Load it anew")
    entries = {
        key: entry._replace(key=key, first_block=0)
        for name, entry in header.entries.items()
        if (key := _key(manifest, key_component(name), header.boxes.get(name))) is not None
    }
    return data_file(store, seen, record, entries)


def _key(manifest: Manifest, name: str, box: Box | None) -> str | None:
    tensor = manifest.tensors.get(name)
    if tensor is None:  # the index leaves it out
        return None
    return name if box is None else tensor.key(box)


def read_header(
    store: Store,
    name: str,
    number: int,
    *,
    start: int = 0,
    end: int | None = None,
    header_bytes: int = _LIKELY_BYTES,
) -> Header:
    """Return the header of a file, or of what follows byte ``start`` of it.

    One request, and another where the header has more bytes than are expected or the file has no
    known ``end``. Raises Corrupt where the header does not describe the file.
    """
    where = where_of(store, name)
    seen = info_of_file(store, name) if end is None else ObjectInfo(name, end)
    size = seen.size - start
    data = store.read(name, start, start + min(size, max(header_bytes, _LEAST_BYTES)))
    if start == 0:
        _check_kind(data, size, where)
    if size < _LEAST_BYTES:
        raise Corrupt(f"{where}: {size} bytes are no safetensors file")
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= size - 8:
        raise Corrupt(
            f"{where}: bytes {start} to {start + 8} state a header of {length} bytes in a file of "
            f"{size}; it is truncated, or no safetensors file"
        )
    check_metadata_bytes(2 * length, f"the header of {where}")
    if 8 + length > len(data):
        data += store.read(name, start + len(data), start + 8 + length)
    text = data[8 : 8 + length]
    try:
        told = object_of(parse_json(text, where), "the header")
        if told.get("__metadata__", {}) is None:
            del told["__metadata__"]  # as safetensors takes it
        metadata = {
            key: text_of(value, key)
            for key, value in object_of(told.pop("__metadata__", {}), "__metadata__").items()
        }
        named = entries_of(told, 1, where, aligned=False)
        boxes = _boxes(named, metadata, where)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{where}: malformed header of {length} bytes: {shown(error)}") from error
    data_bytes = max((entry.end for entry in named.values()), default=0)
    if 8 + length + data_bytes != size:
        raise Corrupt(
            f"{where}: the file has {size} bytes, its header describes {8 + length + data_bytes}; "
            "it is truncated, or was written by something else. Fetch it again"
        )
    return Header(
        record=FileRecord(
            rank=number,
            size=size,
            header_bytes=8 + length,
            data_bytes=data_bytes,
            header_digest=digest(text).hex(),
            table_digest="",
            name=name,
            seen=seen if end is None else None,
        ),
        data_start=start + 8 + length,
        entries=named,
        boxes=boxes,
        metadata=metadata,
    )


def _check_kind(data: bytes, size: int, where: str) -> None:
    """Raise CheckpointError, saying what it is, where a file is another program's."""
    head = data[:HEAD_BYTES]
    if is_safetensors(head, size):
        return
    if is_torch_save(head):
        raise Corrupt(
            f"{where} is a file of torch.save or another zip archive, and no safetensors file: "
            "open it by its own path, or give it a name that ends in .bin, in the index too"
        )
    check_readable(head, size, where)


def _boxes(entries: Mapping[str, Entry], metadata: Mapping[str, str], where: str) -> dict[str, Box]:
    """Return where the parts of tensors lie in the whole; ValueError where that is malformed."""
    if _SHARDS not in metadata:
        return {}
    found: dict[str, Box] = {}
    told = object_of(parse_json(metadata[_SHARDS].encode(), f"{where}: {_SHARDS}"), _SHARDS)
    for name, info in told.items():
        if name in entries:
            entry = entries[name]
            sizes = entry.dtype.shape_of(entry.shape)
            starts = tuple(size_of(i, "an offset") for i in info["saved_offsets"])
            if len(starts) != len(sizes):
                raise ValueError(f"{name!r} of shape {sizes} begins at {starts}")
            found[name] = Box(starts, sizes)
    return found


def _tensor(
    layouts: FileLayouts,
    store: Store,
    files: Sequence[str],
    name: str,
    pieces: Sequence[tuple[int, Entry, Box | None]],
) -> StoredTensor:
    """Return the tensor that pieces make up, each with the number of its file."""
    number, entry, _ = pieces[0]
    boxes = [(file, box) for file, _, box in pieces if box is not None]
    is_whole = len(pieces) == 1 and not boxes
    if len({e.dtype for _, e, _ in pieces}) > 1 or not (is_whole or len(boxes) == len(pieces)):
        told = ", ".join(files[file] for file in sorted({file for file, _, _ in pieces}))
        raise Corrupt(
            f"{store.url}: tensor {name!r} is in {told}, which do not say that they are parts of "
            "it. Remove the files that are not meant"
        )
    if is_whole:
        shape = entry.dtype.shape_of(entry.shape)
        layout: Layout | IrregularLayout = layouts.whole(number, shape)
    else:
        shape = tuple(map(max, zip(*(box.ends for _, box in boxes), strict=True)))
        layout = layouts.of_parts(name, shape, boxes)
    return StoredTensor(key_component(name), entry.dtype, shape, layout)
