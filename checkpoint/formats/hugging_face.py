"""Weights as Hugging Face's libraries save them: one file, several with an index, or shards."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtckpt.errors import Corrupt, NotCommitted

from ...storage.base import Store
from ...storage.names import check_component
from ...storage.one_file import OneFile
from ..files.foreign import ENDINGS
from ..files.manifest import Manifest
from ..state.limits import check_metadata_bytes, object_of, parse_json, shown, text_of
from . import safetensors
from .beside import beside, with_notes
from .files import info_of_file, names_in
from .kinds import HEAD_BYTES, check_readable, is_safetensors, is_torch_save
from .names import SAFETENSORS

_NAMES = (
    *("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors"),
    *("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin"),
)
"""What transformers, diffusers and peft call weights; the first that is there is meant, and of each
the one file before the index, as by their own loaders."""
_SHARD = re.compile(r"(?:shard-(\d{1,9})-)?model-(\d{1,9})-of-(\d{1,9})\.safetensors")
"""Files of ``save_pretrained(distributed_checkpoint=True)``, which have no index."""
_ALIKE = re.compile(
    r"(?:pytorch_model|diffusion_pytorch_model|adapter_model)(?:-\d+-of-\d+)?\.bin(?:\.index\.json)?"
)
"""What often lies beside safetensors files and has the same weights."""


def find(store: Store) -> Manifest | None:
    """Return the manifest of the weights in a store; None where there are none.

    Raises Corrupt where there are some, but not all.
    """
    for name in _NAMES:
        if store.exists(name):
            return _with_beside(store, _of_files(store, [name]))
        if store.exists(f"{name}.index.json"):
            return _with_beside(store, _indexed(store, f"{name}.index.json"))
    shards = _shards(store)
    if not shards:
        return None
    _check_all(store, [(int(found[2]), int(found[3])) for found in shards.values()])
    unsure = _check_ranks(store, shards)
    return _with_beside(store, with_notes(_of_files(store, sorted(shards)), unsure=unsure))


def _shards(store: Store) -> dict[str, re.Match[str]]:
    return {name: found for name in names_in(store) if (found := _SHARD.fullmatch(name))}


def _with_beside(store: Store, made: Manifest) -> Manifest:
    """Return a manifest that tells what lies beside its files."""
    read = [record.name or "" for record in made.files]
    also = _ALIKE if any(name.endswith(SAFETENSORS) for name in read) else None
    return with_notes(made, passed_over=beside(store, read, also=also))


def _check_ranks(store: Store, shards: Mapping[str, re.Match[str]]) -> str:
    """Raise Corrupt where the file of a rank is missing between others.

    Returns what nothing tells: torch notes neither how many ranks have saved nor how large tensors
    are, so that nobody sees that files of the last ranks are missing.
    """
    ranks = {int(found[1]): name for name, found in shards.items() if found[1] is not None}
    if not ranks:
        return ""
    for number in range(1, max(ranks)):
        if number not in ranks:
            missing = re.sub(r"^shard-\d+", f"shard-{number:05d}", ranks[max(ranks)])
            raise Corrupt(
                f"{store.url}: {missing} is missing, though there is {ranks[max(ranks)]}. Fetch "
                "the file of that rank; if it had nothing to save, put a safetensors file of that "
                "name without tensors there"
            )
    last = max(ranks)
    return (
        f"nothing in files of torch's distributed writer says how many ranks have saved: these are "
        f"of {last} ({ranks[last]} is the last). Where files of more are missing, tensors are "
        "shorter than they were; a load into tensors compares the shapes"
    )


def _check_alone(store: OneFile) -> None:
    """Raise Corrupt where a file is one of those of several ranks."""
    found = _SHARD.fullmatch(store.name)
    if found is None or found[1] is None:
        return
    others = sorted(name for name in _shards(store.around) if name != store.name)
    if others or int(found[1]) != 1:
        there = f"{others[0]} is another" if others else "those of the ranks before it are missing"
        raise Corrupt(
            f"{store.url} is the file of one rank, with parts of tensors, and {there}. Open the "
            "directory with the files of all ranks"
        )


def _check_all(store: Store, numbers: Sequence[tuple[int, int]]) -> None:
    """Raise Corrupt unless files that are numbered are all there, and of one save."""
    counts = {count for _, count in numbers}
    if len(counts) > 1:
        raise Corrupt(
            f"{store.url}: files of saves in {' and in '.join(map(str, sorted(counts)))} files lie "
            "here, and no index. Remove those that are not meant"
        )
    (count,) = counts
    there = {number for number, _ in numbers}
    if len(there) != count or not there <= set(range(1, len(numbers) + 1)):
        raise Corrupt(
            f"{store.url}: {len(there)} of {count} files of weights are here, and no index "
            f"(there are numbers {', '.join(map(str, sorted(there)[:8]))}). Fetch all files"
        )


def find_one(store: Store) -> Manifest | None:
    """Return the manifest of a file that is opened by itself; None for a directory.

    Its first bytes tell what it is, whatever its name ends in.
    """
    if not isinstance(store, OneFile):
        return None
    _check_alone(store)
    size = info_of_file(store, store.name).size
    head = store.read(store.name, 0, min(size, HEAD_BYTES))
    if is_safetensors(head, size):
        return safetensors.manifest_of(store, [store.name])
    is_named = store.name.lower().endswith(SAFETENSORS)
    if is_named and not is_torch_save(head):
        return safetensors.manifest_of(store, [store.name])  # which says what is wrong
    if not is_torch_save(head) and not store.name.lower().endswith(ENDINGS):
        check_readable(head, size, store.url)
        raise NotCommitted(
            f"{store.url}: no committed checkpoint here: it is a file, not a directory, and of no "
            f"form that dtckpt reads (it begins with {shown(head[:16])}). Check the path"
        )
    from . import torch_save  # which imports torch

    return torch_save.manifest_of(store, [store.name])


def _of_files(
    store: Store,
    files: Sequence[str],
    chosen: Mapping[str, str] | None = None,
    metadata: Any = None,
) -> Manifest:
    """Return the manifest of files of one kind, which their names tell."""
    if all(file.lower().endswith(SAFETENSORS) for file in files):
        return safetensors.manifest_of(store, files, chosen=chosen, metadata=metadata)
    from . import torch_save  # which imports torch

    return torch_save.manifest_of(store, files, chosen=chosen)


def _indexed(store: Store, name: str) -> Manifest:
    where = f"{store.url}/{name}"
    size = store.stat(name).size
    check_metadata_bytes(2 * size, where)
    try:
        text = store.read(name, 0, size).removeprefix(codecs.BOM_UTF8)
        index = object_of(parse_json(text, where), "the index")
        files = {
            tensor: text_of(file, f"the file of {tensor!r}")
            for tensor, file in object_of(index["weight_map"], "weight_map").items()
        }
        metadata = object_of(index.get("metadata") or {}, "metadata")
    except (KeyError, TypeError) as error:
        raise Corrupt(f"{where}: malformed index: {shown(error)}") from error
    for file in files.values():
        try:
            for part in file.split("/"):
                check_component(part)
        except ValueError as error:
            what = f"{shown(file)} is no name of a file beside the index"
            raise Corrupt(f"{where}: {what}") from error
    names = sorted(set(files.values()))
    return _of_files(store, names, files, metadata)
