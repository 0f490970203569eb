"""Meshes, placements, layouts and distributed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.errors import CollectiveMismatch, MeshDimError, PlacementError, UnsupportedOp
from dtckpt.lazy import lazy_exports

from .debug.environment import check_if_asked

if TYPE_CHECKING:
    from .adopt import from_torch, to_torch
    from .comm.costs import CostModel
    from .dtensor import DTensor, distribute_tensor, redistribute_many
    from .factories import (
        empty,
        full,
        linspace,
        logspace,
        ones,
        rand,
        randint,
        randn,
        randperm,
        zeros,
    )
    from .geometry.box import Box
    from .geometry.irregular import IrregularLayout
    from .geometry.layout import Layout
    from .geometry.mesh import Mesh
    from .geometry.placement import (
        HeadTail,
        Packed,
        Partial,
        Placement,
        Ragged,
        Replicate,
        Shard,
        SplitPlacement,
        parse_placements,
    )
    from .gradients import reduce_gradients
    from .mesh.device_mesh import DeviceMesh, init_device_mesh
    from .mesh.modes import implicit_replication, partial_gradients, strict
    from .mesh.spec import DTensorSpec, TensorMeta
    from .mesh.torch_layouts import layout_from_torch, placements_from_torch
    from .mesh.torch_mesh import mesh_from_torch
    from .modules import distribute_module
    from .ops.user_rules.register_sharding import register_sharding
    from .redistribute.explain import Explanation, explain
    from .redistribute.parts import redistribute_parts
    from .state_dicts import compute_local_shape_and_global_offset

__all__ = [
    "Box",
    "CollectiveMismatch",
    "CostModel",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Explanation",
    "HeadTail",
    "IrregularLayout",
    "Layout",
    "Mesh",
    "MeshDimError",
    "Packed",
    "Partial",
    "Placement",
    "PlacementError",
    "Ragged",
    "Replicate",
    "Shard",
    "SplitPlacement",
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
    "linspace",
    "logspace",
    "mesh_from_torch",
    "ones",
    "parse_placements",
    "partial_gradients",
    "placements_from_torch",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute_many",
    "redistribute_parts",
    "reduce_gradients",
    "register_sharding",
    "strict",
    "to_torch",
    "zeros",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            ".adopt": "from_torch to_torch",
            ".comm.costs": "CostModel",
            ".dtensor": "DTensor distribute_tensor redistribute_many",
            ".factories": ("empty full linspace logspace ones rand randint randn randperm zeros"),
            ".geometry.box": "Box",
            ".geometry.irregular": "IrregularLayout",
            ".geometry.layout": "Layout",
            ".geometry.mesh": "Mesh",
            ".geometry.placement": (
                "HeadTail Packed Partial Placement Ragged Replicate Shard SplitPlacement "
                "parse_placements"
            ),
            ".mesh.device_mesh": "DeviceMesh init_device_mesh",
            ".gradients": "reduce_gradients",
            ".mesh.modes": "implicit_replication partial_gradients strict",
            ".mesh.spec": "DTensorSpec TensorMeta",
            ".mesh.torch_layouts": "layout_from_torch placements_from_torch",
            ".mesh.torch_mesh": "mesh_from_torch",
            ".modules": "distribute_module",
            ".ops.user_rules.register_sharding": "register_sharding",
            ".redistribute.explain": "Explanation explain",
            ".redistribute.parts": "redistribute_parts",
            ".state_dicts": "compute_local_shape_and_global_offset",
        },
    )


def __dir__() -> list[str]:
    return __all__


check_if_asked()
