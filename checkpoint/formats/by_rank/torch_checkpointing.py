"""``metadata.pkl`` of torch_checkpointing: which files ranks have written, and what is in them.

A pickle of plain dicts: for each item that was saved with a resharder the files of its ranks, how
each is serialised, and by paths in the item how a tensor lies on ranks
(torch_checkpointing/distributed_metadata.py and dtensor_metadata.py of 0.1.1). Items that were
saved without one are files of the default name beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt

from ....dtensor.geometry.mesh import Mesh
from ....storage.base import Store
from ...state.limits import (
    check_metadata_bytes,
    list_of,
    object_of,
    parse_json,
    shown,
    size_of,
    text_of,
)
from ..names import OF_TORCH_CHECKPOINTING, SAFETENSORS
from ..pickles.unpickling import TensorNote, load_pickle
from .names import ITEM_OF_RANK, TORCH_CHECKPOINTING, FilesOfRanks, RankFile
from .notes import Note, boxes_of, laid, laid_out, replicated, sharded
from .objects import list_of_ints

_MOST_RANKS = 1 << 31
_SERIALISED = {"TorchSerialization": ".pt", "SafetensorsSerialization": SAFETENSORS}
_VERSION = "2.0"


def find(store: Store, names: Sequence[str]) -> FilesOfRanks:
    """Return the files of a checkpoint with a ``metadata.pkl``.

    ``names`` are those directly in the store. Raises Corrupt where files are missing or the
    metadata is malformed, CheckpointError for what dtckpt does not read.
    """
    where = f"{store.url}/{TORCH_CHECKPOINTING}"
    size = store.stat(TORCH_CHECKPOINTING).size
    check_metadata_bytes(2 * size, where)
    told = load_pickle(store.read(TORCH_CHECKPOINTING, 0, size), where)
    try:
        return _files(object_of(told, "the metadata"), names, where)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{where}: malformed metadata: {shown(error)}") from error


def _files(told: dict[str, Any], names: Sequence[str], where: str) -> FilesOfRanks:
    if told.get("version") != _VERSION:
        raise CheckpointError(
            f"{where}: of version {shown(told.get('version'))}; expected {_VERSION}, which "
            "torch_checkpointing 0.1 writes. Load it with torch_checkpointing and save it anew"
        )
    size = size_of(told["world_size"], "world_size", below=_MOST_RANKS)
    files: list[RankFile] = []
    for item, info in object_of(told["metadata"], "metadata").items():
        paths = object_of(info["nested_path_to_metadata"], "nested_path_to_metadata")
        groups = {path: list_of(found, path) for path, found in paths.items()}
        layouts = info["rank_to_layout_info"]
        if sorted(layouts) != list(range(size)):
            raise ValueError(f"item {shown(item)} has files of ranks {shown(sorted(layouts))}")
        files += (
            RankFile(item, rank, _name(item, rank, layouts[rank], where), _told(groups, rank))
            for rank in range(size)
        )
    described = {file.item for file in files}
    beside = [match for match in map(ITEM_OF_RANK.fullmatch, sorted(names)) if match]
    for match in beside:
        if match["item"] not in described and int(match["rank"]) < size:
            files.append(RankFile(match["item"], int(match["rank"]), match[0], {}))
    known = {file.name.partition("/")[0] for file in files} | {TORCH_CHECKPOINTING}
    return FilesOfRanks(OF_TORCH_CHECKPOINTING, files, tuple(sorted(set(names) - known)))


def _name(item: str, rank: int, layout: Any, where: str) -> str:
    """Return the name of a file; CheckpointError where it is serialised in an unknown way."""
    if layout is None:
        return f"{text_of(item, 'an item')}_{rank}.pt"
    kind = text_of(layout["serialization_format"]["type"], "a serialization format")
    name = text_of(layout["file_path"], "a file")
    ending = _SERIALISED.get(kind)
    if ending is None or (ending == SAFETENSORS) != name.endswith(SAFETENSORS):
        raise CheckpointError(
            f"{where}: {shown(name)} of item {shown(item)} is a {shown(kind)}, which dtckpt does "
            "not read; load it with torch_checkpointing and save it anew"
        )
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{shown(name)} is no name of a file in the checkpoint")
    return name


def _told(groups: Mapping[str, list[Any]], rank: int) -> dict[str, Any]:
    """Return what is told of the tensors of a rank, by path."""
    found: dict[str, Any] = {}
    for path, several in groups.items():
        for group in several:
            if rank in group["ranks"]:
                found[path] = group["sharding_metadata"]
    return found


def with_layouts(value: Any, file: RankFile, where: str) -> Any:
    """Put the layouts that are told of a file in the places of its plain tensors.

    Raises Corrupt where they are not those of its tensors.
    """
    is_flat = file.name.endswith(SAFETENSORS)
    for path, told in file.layouts.items():
        try:
            parts = list_of(parse_json(path.encode(), where), "a path")
            if is_flat:
                parts = [".".join(map(str, parts))]
            if not parts:
                value = _laid(value, told)
                continue
            at = value
            for part in parts[:-1]:
                at = at[part]
            at[parts[-1]] = _laid(at[parts[-1]], told)
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(
                f"{where}: {TORCH_CHECKPOINTING} tells of a tensor {shown(path)} that is not in "
                f"the file, or otherwise: {shown(error)}. Fetch both again"
            ) from error
    return value


def _laid(note: Any, told: Any) -> Note:
    """Return what a rank has of a tensor; a DTensor has said it already."""
    if not isinstance(note, TensorNote):
        return note
    kind, data = text_of(told["type"], "a type"), object_of(told["data"], "data")
    if kind == "default_tensor_v1":
        return boxes_of(data, note)
    if kind != "DTensorShardingMetadata":
        raise CheckpointError(
            f"a tensor is laid out as {shown(kind)}, which dtckpt does not know; load it with the "
            "classes that wrote it and save it anew"
        )
    spec = data["mesh_spec"]
    placements = [_placement(one) for one in list_of(data["placements"], "placements")]
    if spec["mesh_dim_names"] is None and all(one is None for one in placements):
        return note  # said of each plain tensor
    mesh = Mesh(
        list_of_ints(spec["mesh_shape"]),
        tuple(spec["mesh_dim_names"] or ()),
        list_of_ints(spec["mesh_data"]),
    )
    named = [replicated() if one is None else one for one in placements]
    return laid(note, laid_out(mesh, named, list_of_ints(data["global_shape"])))


def _placement(told: Any) -> Any:
    kind = text_of(told["type"], "a placement")
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "StridedShard"):
        raise ValueError(f"{shown(kind)} is no placement")
    return sharded(size_of(told["dim"], "a dim"), told.get("split_factor"))
