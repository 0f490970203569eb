"""Collectives and memory for them that the user chooses, as by ``set_custom_all_gather``.

Collectives of the user move flat buffers of the ranks that share parameters, in the order of the
group. A buffer has a stretch of equal length for each rank: its parts of all parameters of one
dtype, one after the other, and what is left over. Unlike torch's, parts of parameters need not be
of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.collectives import Peers
from ..comm.devices import module_of
from ..geometry.box import Box
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec
from ..torch_private import allocator_of
from .data_axes import DataAxes

Move = tuple[DTensorSpec, DTensorSpec]


class Comm(Protocol):
    """A collective with buffers of its own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer."""
        ...


class AllGather(Comm, Protocol):
    """Fills ``output_tensor`` with ``input_tensor`` of every rank, by group rank."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Start or run it; returns work to wait for, or None."""
        ...


class ReduceScatter(Comm, Protocol):
    """Fills ``output_tensor`` with this rank's stretch of the sum of every ``input_tensor``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Start or run it; returns work to wait for, or None."""
        ...


def require_comm(method: str, comm: object) -> None:
    """Raise PlacementError for what cannot be called, or has no ``allocate``."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise PlacementError(
            f"{method} takes an object that can be called and has allocate(size, dtype=, "
            f"device=), got {comm!r}"
        )


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ranks that share parameters: a group, and where their parts lie."""

    peers: Peers
    axes: tuple[int, ...]
    """Axes of the mesh of the parameters along which they are cut."""

    @classmethod
    def of_data(cls, data: DataAxes) -> Sharing:
        """Return those of a unit."""
        axes = tuple(range(data.num_replicate, data.mesh.ndim))
        return cls(data.mesh.peers(axes), axes)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Sharing:
        """Return all ranks of a mesh."""
        axes = tuple(range(mesh.ndim))
        return cls(mesh.peers(axes), axes)

    def boxes(self, cut: DTensorSpec, whole: DTensorSpec) -> list[tuple[slice, ...]]:
        """Return, by group rank, where the part of each rank lies in the local tensor of this."""
        here: Any = cut.mesh.get_coordinate()
        sizes = [cut.mesh.shape[axis] for axis in self.axes]
        outer = whole.own_box()
        found: list[tuple[slice, ...]] = []
        for position in range(self.peers.size):
            coordinate, left = list(here), position
            for axis, size in zip(reversed(self.axes), reversed(sizes), strict=True):
                left, coordinate[axis] = divmod(left, size)
            found.append(_within(cut.layout.box(tuple(coordinate)), outer))
        return self.peers.by_group_rank(found)


def start_gather(
    comm: AllGather, sharing: Sharing, locals_: Sequence[Tensor], moves: Sequence[Move]
) -> Callable[[], list[Tensor]]:
    """Start to gather parameters; the result is their whole local tensors."""
    finishes: list[tuple[list[int], Callable[[], list[Tensor]]]] = []
    for places in _by_dtype(locals_):
        mine, own = [locals_[i] for i in places], [moves[i] for i in places]
        finishes.append((places, _start_gather(comm, sharing, mine, own)))

    def result() -> list[Tensor]:
        made = list(locals_)
        for places, finish in finishes:
            for i, found in zip(places, finish(), strict=True):
                made[i] = found
        return made

    return result


def _start_gather(
    comm: AllGather, sharing: Sharing, locals_: Sequence[Tensor], moves: Sequence[Move]
) -> Callable[[], list[Tensor]]:
    peers, first = sharing.peers, locals_[0]
    boxes = [sharing.boxes(cut, whole) for cut, whole in moves]
    width = max(sum(_numel(of_rank[r]) for of_rank in boxes) for r in range(peers.size))
    kind: Any = {"dtype": first.dtype, "device": first.device}
    output = comm.allocate((width * peers.size,), **kind)
    sent = output.narrow(0, width * _own(peers), width)
    at = 0
    for local in locals_:
        sent.narrow(0, at, local.numel()).copy_(local.reshape(-1))
        at += local.numel()
    work = comm(output_tensor=output, input_tensor=sent, group=peers.group, async_op=True)

    def result() -> list[Tensor]:
        if work is not None:
            work.wait()
        wholes = [torch.empty(whole.local_shape, **kind) for _, whole in moves]
        for rank, row in enumerate(output.view(peers.size, width)):
            at = 0
            for whole, of_rank in zip(wholes, boxes, strict=True):
                part = whole[of_rank[rank]]
                part.copy_(row.narrow(0, at, part.numel()).view(part.shape))
                at += part.numel()
        return wholes

    return result


def reduce_scatter(
    comm: ReduceScatter,
    sharing: Sharing,
    locals_: Sequence[Tensor],
    moves: Sequence[Move],
    *,
    averages: bool,
) -> list[Tensor]:
    """Return this rank's parts of the sums of whole gradients, or of their means."""
    made = list(locals_)
    for places in _by_dtype(locals_):
        mine, own = [locals_[i] for i in places], [moves[i] for i in places]
        for i, found in zip(
            places, _reduce_scatter(comm, sharing, mine, own, averages), strict=True
        ):
            made[i] = found
    return made


def _reduce_scatter(
    comm: ReduceScatter,
    sharing: Sharing,
    locals_: Sequence[Tensor],
    moves: Sequence[Move],
    averages: bool,
) -> list[Tensor]:
    peers, first = sharing.peers, locals_[0]
    boxes = [sharing.boxes(cut, terms) for terms, cut in moves]
    width = max(sum(_numel(of_rank[r]) for of_rank in boxes) for r in range(peers.size))
    kind: Any = {"dtype": first.dtype, "device": first.device}
    sent = comm.allocate((width * peers.size,), **kind)
    sent.zero_()  # what is left over is added up, too
    for rank, row in enumerate(sent.view(peers.size, width)):
        at = 0
        for local, of_rank in zip(locals_, boxes, strict=True):
            part = local[of_rank[rank]]
            row.narrow(0, at, part.numel()).view(part.shape).copy_(part)
            at += part.numel()
    # A sum of many ranks may exceed what float16 can hold.
    divides_first = averages and first.dtype == torch.float16
    if divides_first:
        sent.div_(peers.size)
    output = comm.allocate((width,), **kind)
    work = comm(
        output_tensor=output,
        input_tensor=sent,
        group=peers.group,
        op=dist.ReduceOp.SUM,
        async_op=True,
    )
    if work is not None:
        work.wait()
    made: list[Tensor] = []
    at = 0
    for (_, cut), of_rank in zip(moves, boxes, strict=True):
        numel = _numel(of_rank[_own(peers)])
        # A copy: the buffer may be used again.
        made.append(output.narrow(0, at, numel).clone().view(cut.local_shape))
        at += numel
    if averages and not divides_first:
        for part in made:
            part.div_(peers.size)
    return made


def _by_dtype(locals_: Sequence[Tensor]) -> list[list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for i, local in enumerate(locals_):
        found.setdefault(local.dtype, []).append(i)
    return list(found.values())


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    starts = [own - first for own, first in zip(box.offsets, outer.offsets, strict=True)]
    if box.is_empty:
        starts = [0] * len(starts)
    return tuple(slice(at, at + n) for at, n in zip(starts, box.sizes, strict=True))


def _numel(box: tuple[slice, ...]) -> int:
    return math.prod(part.stop - part.start for part in box)


def _own(peers: Peers) -> int:
    return peers.group_ranks[peers.position]


def memory_of_group(
    group: Any, device: torch.device
) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what makes a context in which tensors lie in memory that a group can send as it is.

    None where its backend allocates none.
    """
    module: Any = module_of(device)
    allocator = allocator_of(group, device)
    if module is None or allocator is None or not hasattr(module, "MemPool"):
        return None
    pool = module.MemPool(allocator)
    return lambda: module.use_mem_pool(pool, device=device)
