"""Matching the state of objects, of which the checkpoint says all: names, lengths, dtypes, shapes.

An object that has not begun yet holds less than it did, or other things: an empty buffer, a list of
nothing, None. What was saved is what ``load_state_dict`` is given. Tensors that the object has are
filled in place where they fit; new ones take the place of others. Modules are no such objects: what
their parameters and buffers are is decided by their code. Only their extra state is.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from dtckpt.errors import CheckpointError

from ...dtensor.geometry.layout import Layout
from ..files.stored_tensor import StoredTensor
from ..optimizers.state_form import empty_as_saved, empty_on_mesh
from ..ranks.together import Ranks
from ..state.coordinates import PerCoordinate
from ..state.names import index_component, key_component
from ..state.subclass_node import SUBCLASS
from ..state.tree import (
    CONTAINERS,
    DICT_TAGS,
    PACKED,
    PAIRS,
    TENSORS,
    Node,
    PerRank,
    below,
    children,
    dict_tag,
    is_stateful,
    item_of,
    tag_of,
    tensor_names,
)
from ..tensors.dtensors import is_dtensor, layout_of
from ..tensors.local_tensor import tensor_tag
from ..tensors.materialising import is_meta, memory_key
from ..tensors.new_subclasses import new_subclass
from ..tensors.subclasses import fits
from .match import Rebuild
from .subclass_matching import Subclasses


@dataclass(kw_only=True)
class SavedForms(Subclasses, ABC):
    """The part of a walk that matches the state of objects, whatever its form is now."""

    ranks: Ranks
    filled_memory: dict[Any, str] = field(init=False, default_factory=dict[Any, str])
    """Memory of the first ``num_filled`` destinations, with the names of what is stored for it."""
    num_filled: int = field(init=False, default=0)

    @abstractmethod
    def tensor(self, value: Any, name: str) -> Rebuild | None:
        """Match a tensor that is filled in place."""

    @abstractmethod
    def value(self, value: Any, name: str, at: str) -> Rebuild | None:
        """Take the value that was saved at a place, in which there are no tensors."""

    def takes_saved_form(self, value: Any, name: str, at: str) -> bool:
        """Whether what was saved decides all about a part of the state of an object.

        Not where a part of it alone is selected, where nothing was saved, where parts of it are
        renamed, and of what has rules of its own: objects, and values of ranks.
        """
        if isinstance(value, PerRank | PerCoordinate) or is_stateful(value) or is_meta(value):
            return False
        if at not in self.index.nodes:
            return False
        if self.renaming is not None and name and not (at and self._keeps_names(value, name, at)):
            return False
        names = list(self.index.leaves_of(at))
        return all(map(self.is_selected, names)) and not any(
            part.startswith("@") for name in names for part in name[len(at) :].split("/")
        )

    def _keeps_names(self, value: Any, name: str, at: str) -> bool:
        """Whether all that lies in a container is found below the place of the container."""
        if dict_tag(value) is not None:
            items = [(key_component(k), v) for k, v in value.items() if type(k) in (str, int)]
        elif isinstance(value, list | tuple):
            parts = cast("list[Any]", value)
            items = [(index_component(i), item) for i, item in enumerate(parts)]
        else:
            return True
        return all(
            self.at(below(name, component)) == below(at, component)
            and self._keeps_names(item, below(name, component), below(at, component))
            for component, item in items
        )

    def unsaved_items(self, state: Any, at: str, rebuild: Rebuild) -> dict[str, Any]:
        """Return the items at the top of an object's state that the checkpoint does not have.

        Within the items the checkpoint says what there is: a history is shorter at an earlier step.
        But ``load_state_dict`` looks up names at the top, and some pass over a missing one without
        an error, such as the position of a rank in its data. ``rebuild`` returns a packed value,
        which is not unpacked again.
        """
        node = self.index.nodes[at]
        if tag_of(node) == PACKED:
            saved: Any = rebuild()
            is_dict = dict_tag(saved) is not None
        else:
            saved = {key for key, _, _ in children(node)}
            is_dict = tag_of(node) in DICT_TAGS
        if not is_dict or dict_tag(state) is None:
            return {}
        return {k: item for k, item in state.items() if isinstance(k, str) and k not in saved}

    def saved_form(self, value: Any, name: str) -> Rebuild | None:
        """Match a part of the state of an object with what was saved, whatever its form is now."""
        at = self.at(name)
        node = self.index.nodes[at]
        tag = tag_of(node)
        if tag in TENSORS:
            return self._saved_tensor(value, name, at)
        if tag == SUBCLASS:
            return self._saved_subclass(value, name, at)
        leaves = [self.index.nodes[leaf] for leaf in self.index.leaves_of(at)]
        has_parts = any(tag_of(leaf) in TENSORS for leaf in leaves) or _has_objects(value)
        if tag in CONTAINERS and has_parts:
            return self._saved_container(value, name, at, node)
        return self.value(value, name, at)

    def _saved_container(self, value: Any, name: str, at: str, node: Node) -> Rebuild:
        tag = tag_of(node)
        is_sequence = tag in ("list", "tuple")
        rebuilds: dict[Any, Rebuild] = {}
        held: dict[Any, Any] = {}
        for key, component, _ in children(node):
            item = item_of(value, key)
            rebuild = self.node_at(item, below(name, component), below(at, component))
            held[key] = item
            if rebuild is not None:
                rebuilds[key] = rebuild
        self.taken.add(at)  # an empty one is a leaf
        into: Any = {}
        if tag in DICT_TAGS and isinstance(value, MutableMapping) and dict_tag(value) is not None:
            into = copy.copy(value)  # of its class
            into.clear()
        elif tag in PAIRS:
            into = PAIRS[tag]()

        def rebuilt() -> Any:
            items = {key: rebuilds[key]() if key in rebuilds else old for key, old in held.items()}
            if is_sequence:
                return list(items.values()) if tag == "list" else tuple(items.values())
            into.update(items)
            return into

        return rebuilt

    def _saved_tensor(self, value: Any, name: str, at: str) -> Rebuild | None:
        node = self.index.nodes[at]
        tag = str(tag_of(node))
        saved = self.stored[node[tag]]
        fits = tensor_tag(value) == tag and _fits(value, saved)
        if fits and not self._is_filled_otherwise(value, saved):
            return self.tensor(value, name)
        if (
            saved.is_plain is False
            and not isinstance(value, torch.Tensor)
            and len(self.ranks.all) > 1
        ):
            self.found.problems.append(
                f"{at}: it was a distributed tensor, and the object has none yet that tells how it "
                "is to lie now; give the object its state first, say by a step of training"
            )
            return None
        made = new_tensor(saved, value, tag)
        self.tensor(made, name)
        destinations = self.found.destinations
        return lambda: destinations[saved.name]

    def _saved_subclass(self, value: Any, name: str, at: str) -> Rebuild | None:
        """Fill a tensor that consists of others if it is as it was saved, else make a new one."""
        node = self.index.nodes[at]
        if fits(node, value, lambda stored, tensor: _fits(tensor, self.stored[stored])):
            return self.subclass(value, name)
        distributed = [n for n in tensor_names(node) if self.stored[n].is_plain is False]
        if distributed and len(self.ranks.all) > 1:
            self.found.problems.append(
                f"{at}: {distributed[0]} was a distributed tensor, and the object has none yet "
                "that tells how it is to lie now; give the object its state first, say by a step "
                "of training"
            )
            return None
        try:
            made = new_subclass(
                node,
                at,
                lambda stored: new_tensor(self.stored[stored], value, "tensor"),
                allow_pickle=self.options.allow_pickle,
            )
        except CheckpointError as error:
            self.found.problems.append(str(error))
            return None
        return self.new_subclass(made, name)

    def _is_filled_otherwise(self, value: Any, saved: StoredTensor) -> bool:
        """Whether the memory of a tensor is a destination of other saved values already."""
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return False
        known, found = self.filled_memory, self.found.destinations
        for name, tensor in islice(found.items(), self.num_filled, None):
            if isinstance(tensor, torch.Tensor):
                known.setdefault(memory_key(tensor), self.stored[name].stored_name)
        self.num_filled = len(found)
        return known.get(memory_key(value), saved.stored_name) != saved.stored_name


def _has_objects(value: Any) -> bool:
    """Whether objects with state of their own are in a container."""
    if dict_tag(value) is not None:
        return any(map(_has_objects, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_objects, value))  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, PerRank | PerCoordinate) or is_stateful(value)


def _fits(value: Any, saved: StoredTensor) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == saved.shape and _torch_name(value) == saved.dtype.torch_name
    if not isinstance(value, torch.Tensor):
        return True  # of a class with rules of its own
    return (
        tuple(value.shape) == saved.shape and str(value.dtype) == f"torch.{saved.dtype.torch_name}"
    )


def _torch_name(array: Any) -> str:
    try:
        return str(torch.from_numpy(np.empty(0, array.dtype)).dtype).removeprefix("torch.")
    except TypeError:
        return ""


def new_tensor(saved: StoredTensor, value: Any, tag: str) -> Any:
    """Return a new tensor or array for a saved one, distributed as ``value`` is if it is so."""
    if is_dtensor(value) and saved.is_plain is not True:
        live = layout_of("", value)
        if live is not None and value.ndim == len(saved.shape):
            layout = Layout(live.mesh, live.placements, saved.shape)
            dtype = getattr(torch, saved.dtype.torch_name)
            return empty_on_mesh(value, layout, dtype, saved.order)
    device = value.device if isinstance(value, torch.Tensor) and not is_dtensor(value) else "cpu"
    made = empty_as_saved(saved, device)
    return made.numpy() if tag == "ndarray" else made
