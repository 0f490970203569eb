"""torch's functions for state dicts, told that our DTensors are distributed tensors, too.

``torch.distributed.checkpoint.state_dict`` gathers and cuts tensors of torch's class DTensor, and
passes on any other as it is: of ours ``get_model_state_dict`` would return shards where it is asked
for whole tensors, without a word. What the first rank sends to all it cuts by one offset and size,
which gives ranks other elements of a tensor that is dealt out in blocks, without a word either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtckpt.errors import PlacementError

from .geometry.layout import Layout
from .mesh.device_mesh import DeviceMesh
from .mesh.torch_layouts import AnyPlacement, layout_from_torch, placements_from_torch
from .mesh.torch_mesh import mesh_from_torch
from .tensor.wrapper import Wrapper
from .torch_private import state_dict_helpers

_NAMES = (
    "DTensor",
    "distribute_tensor",
    "compute_local_shape_and_global_offset",
    "_distribute_tensors",
)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: DeviceMesh | TorchDeviceMesh,
    placements: Sequence[AnyPlacement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes and the offsets of what this rank holds of a tensor.

    A rank outside of the mesh holds nothing: sizes (0,) and no offsets. PlacementError where ranks
    hold several boxes.
    """
    own = mesh.layout_mesh if isinstance(mesh, DeviceMesh) else mesh_from_torch(mesh)
    ours = placements_from_torch(placements, own.shape, len(global_shape))
    layout = Layout(own, ours, tuple(global_shape))
    if layout.is_dealt:
        raise PlacementError(
            f"{layout}: a rank holds several boxes, which no offset tells; Layout.held_by(rank) "
            "lists them"
        )
    here = mesh.get_coordinate()
    if here is None:
        return (0,), ()
    box = layout.box(tuple(here))
    return box.sizes, box.offsets


def teach_state_dicts(cls: Any, distribute: Callable[..., Any]) -> None:
    """Let torch's functions for state dicts take tensors of ``cls`` for distributed ones.

    ``distribute`` makes them of whole tensors. Warns where this torch has none of the helpers that
    are to be told.
    """
    helpers = state_dict_helpers(_NAMES)
    if helpers is None:
        warnings.warn(
            f"this torch ({torch.__version__}) is not known to gather DTensors of dtckpt in "
            "torch.distributed.checkpoint.state_dict: where full_state_dict=True asks for whole "
            "tensors they may come back as shards; call their full_tensor()",
            stacklevel=2,
        )
        return
    theirs = [getattr(helpers, name) for name in _NAMES]
    for name, value in zip(_NAMES, _of_either(cls, distribute, *theirs), strict=True):
        setattr(helpers, name, value)


def _of_either(
    cls: Any,
    distribute: Callable[..., Any],
    their_cls: Any,
    their_distribute: Any,
    their_part: Any,
    their_cut: Any,
) -> tuple[Any, Any, Any, Any]:
    """Return what stands for torch's class and functions: the same, told apart by the mesh."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, Wrapper | torch_tensor.DTensor)

    class EitherDTensor(metaclass=Meta):
        @staticmethod
        def from_local(local: Any, mesh: Any, placements: Any, **options: Any) -> Any:
            made = cls if isinstance(mesh, DeviceMesh) else their_cls
            return made.from_local(local, mesh, placements, **options)

    def distribute_either(tensor: Any, mesh: Any, placements: Any, **options: Any) -> Any:
        make = distribute if isinstance(mesh, DeviceMesh) else their_distribute
        return make(tensor, mesh, placements, **options)

    def part_of_either(shape: Any, mesh: Any, placements: Any, *options: Any) -> Any:
        if isinstance(mesh, DeviceMesh):
            return compute_local_shape_and_global_offset(shape, mesh, placements)
        return their_part(shape, mesh, placements, *options)

    def cut_either(tensors: dict[str, Any], keys: Sequence[str], *options: Any) -> None:
        left: list[str] = []
        for key in keys:
            pair: Any = tensors.get(key)  # of what a rank holds and the whole, or something else
            layout = _layout_of(pair[0]) if isinstance(pair, tuple) else None
            if layout is None:
                left.append(key)
            else:
                tensors[key] = _cut(pair[0], pair[1], layout, EitherDTensor.from_local)
        their_cut(tensors, left, *options)

    return EitherDTensor, distribute_either, part_of_either, cut_either


def _layout_of(tensor: Any) -> Layout | None:
    """Return the layout of a DTensor of either library; None where we have no name for it."""
    try:
        ours = isinstance(tensor, Wrapper)
        layout: Layout = cast(Any, tensor).global_layout if ours else layout_from_torch(tensor)
    except PlacementError:
        return None
    return None if layout.is_partial else layout


def _cut(like: Any, whole: torch.Tensor, layout: Layout, make: Callable[..., Any]) -> Any:
    """Return ``like`` with what this rank holds of a whole tensor; a new one if it is on meta."""
    here = like.device_mesh.get_coordinate()
    if here is None:
        return like
    local = like.to_local().detach()
    if like.is_meta:
        local = whole.new_empty(local.shape)
    for held, place in layout.parts(tuple(here)):
        if not held.is_empty:
            local[place.slices].copy_(whole[held.slices])
    if not like.is_meta:
        return like
    return make(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
