"""Functions of the library that Dynamo puts into a graph as one node, and does not follow into.

A node has tensors, numbers and texts for arguments: a mesh goes as its ``id``, which the graph is
guarded by, and a placement as its class and text. What the function does to tensors is recorded
later, below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.placement import Placement, parse_placement
from ..mesh.device_mesh import DeviceMesh
from ..torch_private import can_record

NODES: dict[str, Callable[..., Any]] = {}
"""The functions by name."""

CAN_RECORD = can_record()
"""Whether Dynamo is to find nodes at all."""

_MESH, _PLACEMENT = "mesh of dtckpt", "placement of dtckpt"
"""Before what stands for a mesh, and for a placement."""


def can_be_told(arg: Any) -> bool:
    """Whether an argument can stand in a graph."""
    # Each by itself: Dynamo says no for a mesh where several classes are asked for, and it does not
    # ask for a tensor whether it is of a class with a way of its own to tell, as meshes have.
    if isinstance(arg, Tensor):
        return True
    if isinstance(arg, list | tuple):
        return all(can_be_told(item) for item in arg)
    if isinstance(arg, DeviceMesh):
        return True
    return arg is None or isinstance(arg, int | float | str | torch.dtype | Placement)


def told(arg: Any) -> Any:
    """Return what stands for an argument in a graph."""
    if isinstance(arg, Tensor):
        return arg
    if isinstance(arg, DeviceMesh):
        return (_MESH, id(arg))
    if isinstance(arg, Placement):
        return (_PLACEMENT, type(arg).__name__, str(arg))
    if isinstance(arg, list | tuple):
        return tuple([told(item) for item in arg])
    return arg


def heard(arg: Any) -> Any:
    """Return the argument that something in a graph stands for."""
    if not isinstance(arg, tuple):
        return arg
    if arg[:1] == (_MESH,):
        return DeviceMesh.with_id(arg[1])
    if arg[:1] != (_PLACEMENT,):
        return tuple([heard(item) for item in arg])
    _, name, text = arg
    placement = parse_placement(text)
    if type(placement).__name__ != name:
        raise PlacementError(
            f"{name} is written as {text}, which a compiled graph would take for a "
            f"{type(placement).__name__}; state its form (dtensor/geometry/placements)"
        )
    return placement
