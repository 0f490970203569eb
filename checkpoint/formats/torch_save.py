"""Files of ``torch.save``: a pickle, and the memory of every storage it names.

Of the pickle nothing is run. A tensor is where its elements lie in the file, with the strides that
it had. Tensors that are one view of one memory are tied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt

from ...storage.base import Store
from ..files.blocks import digest
from ..files.manifest import FileRecord, Manifest, Place
from ..files.stored_tensor import StoredTensor
from ..state.limits import shown
from ..state.tree import children, container_node, dict_tag
from ..state.values import Node
from .archives.saved import Saved, open_saved
from .archives.value_tensors import ValueTensors
from .beside import with_notes
from .file_layouts import FileLayouts
from .files import record_of, where_of
from .names import OF_TORCH_SAVE
from .pickles.unpickling import TensorNote, unheld_of
from .trees import ValueNodes

_NUM_READERS = 16


def manifest_of(
    store: Store, files: Sequence[str], *, chosen: Mapping[str, str] | None = None
) -> Manifest:
    """Return the manifest of some files, whose dicts make one.

    ``chosen`` says for every name in which file it is. Raises Corrupt where a file is none of
    ``torch.save`` or a name is missing, CheckpointError for what no checkpoint holds.
    """
    index = _Index(store, files)
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="dtckpt-pickles") as pool:
        for number, opened in enumerate(pool.map(partial(_open, store), files)):
            index.add(number, opened, chosen)
    missing = [name for name in chosen or () if name not in index.names]
    if missing:
        raise Corrupt(
            f"{store.url}: the index names {missing[0]!r} in {(chosen or {})[missing[0]]}, which "
            "does not have it. Fetch the files again"
        )
    return index.manifest()


def _open(store: Store, file: str) -> Saved:
    return open_saved(store, file, where_of(store, file), with_unheld=True)


def _told(value: Any) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, TensorNote):
        return f"a tensor of shape {value.shape} and dtype torch.{value.dtype_name}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return shown(value)


class _Index:
    """Files of ``torch.save`` as one manifest."""

    def __init__(self, store: Store, files: Sequence[str]) -> None:
        self._store = store
        self._files = files
        self._layouts = FileLayouts(store.url, files)
        self._tensors: dict[str, StoredTensor] = {}
        self._records: list[FileRecord] = []
        self._tree: Node = {"dict": {}}
        self._left_out: dict[str, str] = {}
        self.names: set[str | int] = set()
        """Keys of the dicts."""

    def add(self, number: int, opened: Saved, chosen: Mapping[str, str] | None) -> None:
        """Take what a file has."""
        file = self._files[number]
        where = where_of(self._store, file)
        value = opened.value
        if (why := unheld_of(value)) is not None:
            raise CheckpointError(f"{where}: {why}")
        if dict_tag(value) is None:
            raise CheckpointError(
                f"{where}: not a dict was saved, but {_told(value)}. Load it with torch and save "
                "it in a dict"
            )
        if chosen is not None:
            value = {key: item for key, item in value.items() if chosen.get(key) == file}
        whole = Place("", 0, opened.seen.size)
        tensors = ValueTensors(self._layouts, number, whole, opened.where, opened.memory)
        made = ValueNodes(where, tensors.kinds, tensors.node, tensors=tensors)
        tree = made.node(value, ())
        self._left_out |= made.left_out
        nodes = [(key, node) for key, _, node in children(tree)]
        if self.names.intersection(key for key, _ in nodes):
            raise Corrupt(f"{where}: has names that are in other files, too")
        self.names.update(key for key, _ in nodes)
        if number:
            before = [(key, node) for key, _, node in children(self._tree)]
            is_plain = all(type(key) is str for key in self.names)
            tree = container_node("dict" if is_plain else "items", before + nodes)
        self._tree = tree
        self._tensors |= tensors.tensors
        self._records.append(
            record_of(
                number,
                opened.seen,
                tensors.places,
                digest=opened.digest,
                fingerprint=opened.fingerprint,
            )
        )

    def manifest(self) -> Manifest:
        """Return the manifest of all files."""
        made = Manifest(
            save_id=digest("".join(r.header_digest for r in self._records).encode()).hex(),
            tensors=self._tensors,
            tree=self._tree,
            files=tuple(self._records),
            created="",
            format=OF_TORCH_SAVE,
        )
        made = with_notes(made, left_out=self._left_out)
        try:
            made.validate()
        except ValueError as error:
            raise Corrupt(f"{self._store.url}: {shown(error)}") from error
        return made
