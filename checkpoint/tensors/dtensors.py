"""DTensors, ours and torch's, and the layouts that they are saved with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dtckpt.errors import PlacementError, Unsavable

from ...dtensor.comm.caches import remembered
from ...dtensor.geometry.layout import Layout
from .announced import overrides
from .stored_placements import require_storable

_ORDER_OF_MESH = "_shard_order"
"""By which Megatron-FSDP notes on a mesh in which order axes cut a dim; placements do not tell."""


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, ours or torch's."""
    return is_dtensor_class(value.__class__)


@remembered(256)  # of a class that there is it does not change; there are very many tensors
def is_dtensor_class(cls: type) -> bool:
    """Whether a class is that of DTensors, ours or torch's, or derived from one."""
    return any(issubclass(cls, found) for found in _classes())


def layout_of(name: str, value: Any) -> Layout | None:
    """Return mesh and placements of a DTensor; None where its chunk list has to tell the boxes.

    So for placements that we cannot name, and for classes with a chunk list of their own. Raises
    Unsavable where ranks hold no elements, where files cannot name the layout, and where it is
    known not to be true.
    """
    layout = _named_layout(name, value)
    if layout is None:
        return None
    require_storable_layout(name, layout)
    if any(overrides(value, cls) for cls in _classes()):
        return None
    if _is_cut_otherwise(value, layout):
        raise Unsavable(
            f"tensor {name!r}: its mesh is one of Megatron-FSDP, which cuts in another order than "
            f"placements say ({layout}), and it does not announce what this rank holds. Give the "
            "state dict to preprocess_state_dict_for_uneven_dtensor of "
            "megatron_fsdp.uneven_dtensor first"
        )
    return layout


def require_storable_layout(name: str, layout: Layout) -> None:
    """Raise Unsavable for a layout whose ranks do not hold elements, or that files cannot name."""
    require_elements(name, layout.placements, layout)
    try:
        require_storable(layout)
    except Unsavable as error:
        raise Unsavable(f"tensor {name!r}: {error}") from error


def require_elements(name: str, placements: Sequence[Any], told: object = None) -> None:
    """Raise Unsavable for placements, ours or torch's, by which ranks hold terms of a reduction."""
    if any(placement.is_partial() for placement in placements):
        raise Unsavable(
            f"tensor {name!r} is laid out as {told or placements}: its ranks hold terms of a "
            "reduction that is still to be done. Redistribute it to Shard or Replicate before "
            "saving or loading"
        )


def _classes() -> list[Any]:
    """Return the classes of DTensors as far as they are loaded."""
    modules = (sys.modules.get(m) for m in ("dtckpt.dtensor.dtensor", "torch.distributed.tensor"))
    return [module.DTensor for module in modules if module is not None]


def _named_layout(name: str, value: Any) -> Layout | None:
    ours = sys.modules.get("dtckpt.dtensor.dtensor")
    if ours is not None and isinstance(value, ours.DTensor):
        return value.global_layout
    from ...dtensor.mesh import torch_layouts as interop  # loads all of torch.distributed.tensor

    try:
        return interop.layout_from_torch(value)
    except PlacementError as error:
        # Of blocks that are dealt out in turn torch's chunk list makes one box with other elements.
        if any(p.is_partial() or interop.split_factor(p) is not None for p in value.placements):
            raise Unsavable(f"tensor {name!r}: {error}") from error
        return None


def _is_cut_otherwise(value: Any, layout: Layout) -> bool:
    """Whether the mesh says that axes cut a dim in another order than the layout."""
    noted = getattr(value.device_mesh, _ORDER_OF_MESH, None)
    if noted is None:
        return False
    counts, places = layout.mesh.shape, {axis: place for place, axis in enumerate(noted)}
    cuts = [[s.axis for s in splits if counts[s.axis] > 1] for splits in layout.splits]
    return any(axes != sorted(axes, key=lambda axis: places.get(axis, axis)) for axes in cuts)
