"""torch's DTensors as ours and back, without copying."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed.tensor as torch_tensor

from dtckpt.errors import PlacementError

from .dtensor import DTensor
from .mesh.device_mesh import DeviceMesh
from .mesh.spec import spec_of
from .mesh.torch_layouts import layout_from_torch, placements_to_torch
from .tensor.local_parts import check_local_shape, waited
from .torch_private import local_of_torch


def from_torch(tensor: torch_tensor.DTensor) -> DTensor:
    """Return our view of a torch DTensor: the same local memory, on the wrapped mesh.

    A leaf of its own: gradients do not flow through. Raises PlacementError where the placements
    are none of ours, and for what is no DTensor of torch.
    """
    _require("from_torch", tensor, torch_tensor.DTensor, "torch")
    layout = layout_from_torch(tensor)
    mesh = DeviceMesh.from_torch(tensor.device_mesh)
    # Not the strides of torch's tensor, which follow from the local part and differ between ranks.
    spec = spec_of(mesh, layout.placements, layout.shape, None, tensor.dtype)
    local = waited(local_of_torch(tensor))
    if spec.box is not None and spec.box.is_empty and local.numel() == 0:
        local = local.detach().view(spec.box.sizes)  # FSDP2 makes it empty along other dims too
    check_local_shape(local, spec)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


def _require(caller: str, tensor: object, cls: type[Any], whose: str) -> None:
    if not isinstance(tensor, cls):
        raise PlacementError(
            f"{caller} takes a DTensor of {whose}, got {type(tensor).__name__} of "
            f"{type(tensor).__module__}; from_torch goes from torch's to dtckpt's, to_torch back"
        )


def to_torch(tensor: DTensor) -> torch_tensor.DTensor:
    """Return a torch DTensor with the same local memory; the opposite of ``from_torch``.

    Raises PlacementError where torch cannot express the placements, and for what is no DTensor of
    ours.
    """
    _require("to_torch", tensor, DTensor, "dtckpt")
    layout = tensor.global_layout
    placements = placements_to_torch(layout)
    made = torch_tensor.DTensor.from_local(
        tensor.local.detach(),
        tensor.device_mesh.to_torch(),
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    if layout_from_torch(made) != layout:
        raise PlacementError(f"torch reads {layout} as {layout_from_torch(made)}")
    return cast(torch_tensor.DTensor, made.requires_grad_(tensor.requires_grad))
