"""Values between torch.distributed.checkpoint, which pickles them, and nodes of a checkpoint.

What a planner hands to a writer was pickled in this process a moment before, and what a reader
hands to a planner is pickled here: nothing of what is unpickled has come from a file.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dtckpt.errors import Unsavable

from ..formats.trees import StatePath, ValueNodes, component_of, name_of
from ..state.values import Node
from ..tensors.local_tensor import LocalTensor, local_tensor


def node_of_item(
    pickled: io.BytesIO, path: StatePath, url: str, *, allow_pickle: bool
) -> tuple[Node, Sequence[LocalTensor]]:
    """Return the node of a value that a planner has pickled, and the tensors in it.

    Unsavable, with its name, for what the format does not hold.
    """
    name = name_of(path)
    try:
        pickled.seek(0)
        value = torch.load(pickled, map_location="cpu", weights_only=False)
    except Exception as error:
        raise Unsavable(
            f"{name}: the planner gives bytes that torch.load does not read ({error!r}); have it "
            "pickle by torch.save, as DefaultSavePlanner does"
        ) from error
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
    return nodes.node(value, tuple(map(component_of, path))), tensors


def pickled(value: object) -> io.BytesIO:
    """Return a value as planners expect it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
