"""Values between torch.distributed.checkpoint, which pickles them, and nodes of a checkpoint.

Nothing is unpickled that could run code: a planner that pickles as torch's does is asked for the
value itself, and of any other the bytes are read as weights only. What a reader hands to a planner
is pickled here.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from dtckpt.errors import CheckpointError, Unsavable

from ...dtensor.geometry.box import Box
from ..files.manifest import Manifest
from ..files.stored_data import StoredData
from ..formats.trees import StatePath, ValueNodes, component_of, name_of
from ..reading.to_tensors import read_boxes
from ..state.tree import unflatten
from ..state.values import Node
from ..tensors.local_tensor import LocalTensor, local_tensor


def value_of_item(planner: SavePlanner, item: WriteItem, path: StatePath) -> Any:
    """Return the value that a planner gives for an item; Unsavable, with its name, if it is none.

    Of a planner that pickles in its own way, it is what ``torch.load`` reads as weights only.
    """
    cls: Any = type(planner)
    if isinstance(planner, DefaultSavePlanner) and (
        cls.resolve_data is DefaultSavePlanner.resolve_data
        and cls.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    data: Any = planner.resolve_data(item)
    try:
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        raise Unsavable(
            f"{name_of(path)}: the planner gives bytes that torch.load does not read as weights "
            f"only ({error!r}); have it pickle plain values by torch.save"
        ) from error


def node_of_value(
    value: object, path: StatePath, url: str, *, allow_pickle: bool
) -> tuple[Node, Sequence[LocalTensor]]:
    """Return the node of a value, and the tensors in it.

    Unsavable, with its name, for what the format does not hold.
    """
    tensors: list[LocalTensor] = []

    def tensor(name: str, value: Any) -> Node:
        found = local_tensor(name, value)
        if not found.is_plain:
            raise Unsavable(
                f"{name}: a distributed tensor within a value that the planner pickles; put it "
                "into dicts and lists only, of which the planner tells its parts"
            )
        tensors.append(found)
        return {"ndarray" if isinstance(value, np.ndarray) else "tensor": name}

    kinds: tuple[type[Any], ...] = (torch.Tensor, np.ndarray)
    nodes = ValueNodes(url, kinds, tensor, allow_pickle=allow_pickle)
    try:
        return nodes.node(value, tuple(map(component_of, path))), tensors
    except CheckpointError as error:
        raise Unsavable(str(error)) from error


def pickled(value: object) -> io.BytesIO:
    """Return a value as planners expect it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def stored_value(
    node: Node, manifest: Manifest, data: StoredData, *, allow_pickle: bool = False
) -> Any:
    """Return the value that a node stands for; tensors in it are read whole, each once."""

    @functools.cache
    def tensor(name: str, tag: str) -> Any:
        stored = manifest.tensors[name]
        found = read_boxes(data, stored, [Box.whole(stored.shape)])[0]
        return found.numpy() if tag == "ndarray" else found

    return unflatten(node, tensor, allow_pickle=allow_pickle)
