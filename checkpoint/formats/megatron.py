"""Checkpoints of Megatron (``torch_dist``): those of torch, with what is equal on all ranks beside.

``megatron.core.dist_checkpointing`` writes a checkpoint of torch.distributed.checkpoint, whose
names are one flat dict: tensors by their keys, layers stacked, and objects of single ranks as
``<key>/shard_<which>_<of how many>``, in a list each. ``common.pt`` is a file of ``torch.save``
with the rest of the state, and ``metadata.json``, written last, says that both are complete
(megatron/core/dist_checkpointing/serialization.py and strategies/ of 0.16).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtckpt.errors import CheckpointError, Corrupt

from ...storage.base import Store
from ..files.manifest import Manifest, Place
from ..state.limits import (
    MAX_NESTING,
    check_metadata_bytes,
    parse_json,
    shown,
)
from ..state.names import index_component, join, key_component
from ..state.tree import children, container_node, dict_tag
from . import dcp
from .archives.saved import open_saved
from .archives.value_tensors import ValueTensors
from .beside import with_notes
from .file_layouts import FileLayouts
from .files import info_of_file, record_of
from .names import COMMON, CONFIG, METADATA, OF_MEGATRON
from .pickles.unpickling import Namespace, is_known
from .trees import ValueNodes

_BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}
_OF_MEGATRON = ("megatron.", "transformer_engine.", "nemo.")
"""Modules whose objects are left out of the values, by name."""
_MOST_PARTS = 1_000_000
_MOST_CLASSES = 1000
"""Of one pickle, which are a kilobyte each."""


def find(store: Store) -> Manifest | None:
    """Return the manifest of a checkpoint of Megatron; None where there is none.

    Raises Corrupt where a part of it is missing, CheckpointError for what dtckpt does not read.
    """
    config = _config(store)
    if config is None:
        if not (store.exists(METADATA) and store.exists(COMMON)):
            return None
        raise Corrupt(
            f"{store.url}: {CONFIG} is missing, which Megatron writes last: the save did not "
            "finish. Load another checkpoint"
        )
    for key, expected in _BACKENDS.items():
        if config.get(key) != expected:
            raise CheckpointError(
                f"{store.url}/{CONFIG}: {key} is {shown(config.get(key))}; dtckpt reads "
                f"{expected!r}. Load it with Megatron and save it so"
            )
    for name in (METADATA, COMMON):
        info_of_file(store, name)  # Corrupt where it is missing
    return _with_common(dcp.read(store, (COMMON, CONFIG)), store)


def _config(store: Store) -> dict[str, Any] | None:
    """Return what Megatron says of a checkpoint; None where it says nothing."""
    if not store.exists(CONFIG):
        return None
    size = store.stat(CONFIG).size
    check_metadata_bytes(2 * size, f"{store.url}/{CONFIG}")
    try:
        told = parse_json(store.read(CONFIG, 0, size), f"{store.url}/{CONFIG}")
    except Corrupt:
        return None  # somebody else's
    return told if isinstance(told, dict) and "sharded_backend" in told else None


def _with_common(made: Manifest, store: Store) -> Manifest:
    """Return a manifest with what ``common.pt`` has."""
    where, number = f"{store.url}/{COMMON}", len(made.files)
    opened = open_saved(store, COMMON, where, _Known(), with_unheld=True)
    value = opened.value
    if dict_tag(value) is None:
        raise Corrupt(f"{where}: expected a dict, got {shown(value)}")
    left_out = _LeftOut(where)
    whole = Place("", 0, opened.seen.size)
    tensors = ValueTensors(FileLayouts(store.url, []), number, whole, where, opened.memory)
    made_of = ValueNodes(where, tensors.kinds, tensors.node, tensors=tensors)
    tree = made_of.node(left_out.without(value, ()), ())
    nodes = [(key, node) for key, _, node in children(tree)]
    nodes += [(key, node) for key, _, node in children(made.tree)]
    twice = {key for key, _, _ in children(tree)} & {key for key, _, _ in children(made.tree)}
    if twice:
        raise Corrupt(f"{where}: has {sorted(map(str, twice))[0]!r}, as {METADATA} has")
    record = record_of(number, opened.seen, tensors.places, digest=opened.digest)
    whole_manifest = replace(
        made,
        tree=container_node("dict", nodes),
        tensors=made.tensors | tensors.tensors,
        files=(*made.files, record),
        format=OF_MEGATRON,
    )
    try:
        whole_manifest.validate()
    except ValueError as error:
        raise Corrupt(f"{store.url}: {shown(error)}") from error
    return with_notes(whole_manifest, left_out=left_out.found | made_of.left_out)


class _Object:
    """An object of Megatron, such as an enum among the arguments, by the name of its class."""

    name = ""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Known:
    """Names of Megatron, of which nothing is made but a note."""

    def __init__(self) -> None:
        self._classes: dict[str, type[_Object]] = {}

    def get(self, name: str) -> Any:
        """Return what stands for a name; None where it is not Megatron's."""
        if is_known(name) or not name.startswith(_OF_MEGATRON):
            return None
        if name not in self._classes and len(self._classes) < _MOST_CLASSES:
            self._classes[name] = type("Object", (_Object,), {"name": name})
        return self._classes.get(name)


class _LeftOut:
    """Leaves objects out of values, and remembers which."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = _MOST_PARTS
        self.found: dict[str, str] = {}
        """Names of the classes, by path."""

    def without(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a value without objects, which are None in lists."""
        self._left -= 1
        if self._left < 0 or len(path) > MAX_NESTING:
            raise CheckpointError(f"{self._where}: {join(path)[:80]!r} has too many parts")
        if isinstance(value, _Object):
            self.found[join(path)] = value.name
            return None
        if isinstance(value, Namespace):
            value = value.fields
        if isinstance(value, Mapping):
            kept = [
                (key, self.without(item, (*path, key_component(key))))
                for key, item in value.items()
            ]
            kept = [(key, item) for key, item in kept if not isinstance(value[key], _Object)]
            return OrderedDict(kept) if isinstance(value, OrderedDict) else dict(kept)
        if type(value) in (list, tuple):
            items = [self.without(v, (*path, index_component(i))) for i, v in enumerate(value)]
            return items if type(value) is list else tuple(items)
        return value
