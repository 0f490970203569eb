"""Which device is this rank's.

The one place that decides it. A device type alone means the current device of whichever thread
asks, and that is device 0 in a thread that nobody told otherwise; so meshes have a device with its
index, and everything that makes memory for one asks the mesh.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.errors import PlacementError


def module_of(device: torch.device) -> Any:
    """Return torch's module of a kind of device, such as ``torch.cuda``; None where it has none."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def device_of_rank(device_type: str) -> torch.device:
    """Return the device of a type that is this process's, and select it if nobody has.

    In this order: the one that ``torch.distributed.init_process_group(device_id=)`` was told; the
    current one, where the program has begun to use devices of the type, as by
    ``torch.cuda.set_device``; number ``LOCAL_RANK`` of the environment, or the only one; by the
    rank of the process, with a warning. Without an index for the CPU, and where this machine has
    no such device, as for a mesh that is only planned with.

    Raises PlacementError where LOCAL_RANK names no device, or the ranks do not share them evenly.
    """
    module = module_of(torch.device(device_type))
    if module is None or not _count(module):
        return torch.device(device_type)
    bound = _bound(device_type)
    if bound is not None:
        return bound
    if not module.is_initialized():
        module.set_device(_index(device_type, module.device_count()))
    return torch.device(device_type, module.current_device())


def _count(module: Any) -> int:
    names = ("device_count", "current_device", "set_device", "is_initialized")
    return module.device_count() if all(hasattr(module, name) for name in names) else 0


def _bound(device_type: str) -> torch.device | None:
    if not dist.is_initialized():
        return None
    found = getattr(dist.group.WORLD, "bound_device_id", None)
    return found if isinstance(found, torch.device) and found.type == device_type else None


def _index(device_type: str, count: int) -> int:
    told = os.environ.get("LOCAL_RANK", "")
    if count == 1:  # launchers may show each process its own
        return 0
    if told.isdecimal():
        if int(told) < count:
            return int(told)
        raise PlacementError(
            f"LOCAL_RANK is {told}, but this process sees {count} devices of type {device_type!r}: "
            "start at most one process for each, or select one by torch's set_device first"
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > count and size % count:
        raise PlacementError(
            f"{size} ranks do not share {count} devices of type {device_type!r} evenly, and "
            "LOCAL_RANK is not set: select a device by torch's set_device before the mesh is made"
        )
    warnings.warn(
        f"device {rank % count} of type {device_type!r} is taken for rank {rank}, since neither "
        "the program nor LOCAL_RANK names one; a launcher such as torchrun sets LOCAL_RANK",
        stacklevel=2,
    )
    return rank % count
