"""Ranks that are threads of one process: real Gloo groups, one per mesh axis and one over all.

No process group is registered anywhere; the groups are handed to the code that uses them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, DTensor, Mesh
from dtckpt.dtensor.layout import Layout

# torch's stubs leave out the stores and the options of Gloo groups.
_c10d: Any = dist

TIMEOUT = timedelta(seconds=30)


def gloo_group(
    store: object, rank: int, size: int, timeout: timedelta = TIMEOUT
) -> dist.ProcessGroup:
    """Return rank ``rank``'s end of a Gloo group that is registered nowhere."""
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_c10d.ProcessGroupGloo.create_device(interface="lo")]
    options._threads = 1
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def axis_groups(
    store: object, mesh: Mesh, rank: int, timeout: timedelta = TIMEOUT
) -> list[dist.ProcessGroup]:
    """Return one rank's ends of the groups along every axis; all ranks call it together."""
    coordinate = mesh.coordinate(rank) or ()
    groups: list[dist.ProcessGroup] = []
    for axis, size in enumerate(mesh.shape):
        row = tuple(i for a, i in enumerate(coordinate) if a != axis)
        prefix = _c10d.PrefixStore(f"axis{axis}/{row}", store)
        groups.append(gloo_group(prefix, coordinate[axis], size, timeout))
    return groups


def cut(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    here = mesh.get_coordinate() or ()
    return whole[layout.box(here).slices]


def laid_out(whole: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Tensor:
    """Return a tensor that all ranks have, laid out without any communication."""
    layout = Layout(mesh.layout_mesh, placements, tuple(whole.shape))
    local = cut(whole, layout, mesh).clone().contiguous()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape).detach()
