"""Meshes, placements, layouts and distributed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.errors import (
    CollectiveMismatch,
    PlacementError,
    UnsupportedOp,
)
from dtckpt.lazy import lazy_exports

from .debug.environment import check_if_asked

if TYPE_CHECKING:
    from .adopt import from_torch, to_torch
    from .box import Box
    from .costs import CostModel
    from .device_mesh import DeviceMesh, init_device_mesh
    from .dtensor import DTensor, distribute_tensor, redistribute_many
    from .factories import empty, full, ones, rand, randint, randn, randperm, zeros
    from .interop import layout_from_torch, mesh_from_torch, placements_from_torch
    from .irregular import IrregularLayout
    from .layout import Layout
    from .mesh import Mesh
    from .modes import implicit_replication, strict
    from .modules import distribute_module
    from .placement import Partial, Placement, Ragged, Replicate, Shard, parse_placements
    from .redistribute.explain import Explanation, explain
    from .rules.table import register_sharding
    from .spec import DTensorSpec, TensorMeta
    from .state_dicts import compute_local_shape_and_global_offset

__all__ = [
    "Box",
    "CollectiveMismatch",
    "CostModel",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Explanation",
    "IrregularLayout",
    "Layout",
    "Mesh",
    "Partial",
    "Placement",
    "PlacementError",
    "Ragged",
    "Replicate",
    "Shard",
    "TensorMeta",
    "UnsupportedOp",
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "from_torch",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "layout_from_torch",
    "mesh_from_torch",
    "ones",
    "parse_placements",
    "placements_from_torch",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute_many",
    "register_sharding",
    "strict",
    "to_torch",
    "zeros",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            "Box": ".box",
            "CostModel": ".costs",
            "DTensor": ".dtensor",
            "DTensorSpec": ".spec",
            "DeviceMesh": ".device_mesh",
            "Explanation": ".redistribute.explain",
            "IrregularLayout": ".irregular",
            "Layout": ".layout",
            "Mesh": ".mesh",
            "Partial": ".placement",
            "Placement": ".placement",
            "Ragged": ".placement",
            "Replicate": ".placement",
            "Shard": ".placement",
            "TensorMeta": ".spec",
            "compute_local_shape_and_global_offset": ".state_dicts",
            "distribute_module": ".modules",
            "distribute_tensor": ".dtensor",
            "empty": ".factories",
            "explain": ".redistribute.explain",
            "from_torch": ".adopt",
            "full": ".factories",
            "implicit_replication": ".modes",
            "init_device_mesh": ".device_mesh",
            "layout_from_torch": ".interop",
            "mesh_from_torch": ".interop",
            "ones": ".factories",
            "parse_placements": ".placement",
            "placements_from_torch": ".interop",
            "rand": ".factories",
            "randint": ".factories",
            "randn": ".factories",
            "randperm": ".factories",
            "redistribute_many": ".dtensor",
            "register_sharding": ".rules.table",
            "strict": ".modes",
            "to_torch": ".adopt",
            "zeros": ".factories",
        },
    )


def __dir__() -> list[str]:
    return __all__


check_if_asked()
