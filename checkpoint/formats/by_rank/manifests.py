"""The manifest that files of ranks would have: an item of the state by its key, of all ranks."""

from __future__ import annotations

from dtckpt.errors import Corrupt, NotCommitted

from ....storage.base import Store
from ...files.blocks import digest
from ...files.manifest import Manifest
from ...files.stored_tensor import StoredTensor
from ...state.limits import shown
from ...state.names import key_component
from ...state.values import Node
from ..file_layouts import FileLayouts
from .files import open_all
from .merging import Merger
from .names import FilesOfRanks
from .tensors import Tensors


def manifest_of(store: Store, found: FilesOfRanks) -> Manifest:
    """Return the manifest of files of ranks.

    Raises Corrupt where something is missing, CheckpointError for what dtckpt does not read.
    """
    opened = open_all(store, found.files)
    layouts = FileLayouts(store.url, [file.name for file in found.files])
    tensors: dict[str, StoredTensor] = {}
    nodes: dict[str, Node] = {}
    parts, differing = False, ""
    for item in dict.fromkeys(file.item for file in found.files):
        own = [one for one in opened if one.file.item == item]
        of_item = Tensors(layouts, {one.file.rank: one.number for one in own})
        merger = Merger(own, of_item)
        nodes[item] = merger.node({one: one.value for one in own}, (key_component(item),))
        tensors |= of_item.found
        parts, differing = parts or merger.has_parts, differing or merger.differing
    if found.are_guessed and differing and not parts:
        raise NotCommitted(
            f"{store.url}: {found.files[0].name} and others may be of ranks or of steps: tensor "
            f"{differing!r} differs in them, and none says that it is a part. Load one by its path"
        )
    made = Manifest(
        save_id=digest("".join(one.digest for one in opened).encode()).hex(),
        tensors=tensors,
        tree={"dict": nodes},
        files=tuple(one.record() for one in opened),
        created="",
        metadata={"passed_over": list(found.others)} if found.others else None,
        format=found.kind,
    )
    try:
        made.validate()
    except ValueError as error:
        raise Corrupt(f"{store.url}: {shown(error)}") from error
    return made
