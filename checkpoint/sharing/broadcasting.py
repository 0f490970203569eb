"""Sending what one replica has read to the others, in broadcasts of bounded size."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...dtensor.comm.collectives import Peers
from ...dtensor.comm.message_parts import ViewPart
from ...dtensor.comm.packing import broadcast
from ...dtensor.mesh.device_mesh import DeviceMesh
from ..ranks.boards import device_of
from ..tensors.local_tensor import LocalTensor
from .read_once import Group, Shareable


class Broadcasts:
    """The broadcasts of one load, as one rank takes part in them."""

    def __init__(
        self,
        shareable: Sequence[Shareable],
        tensors: Mapping[str, LocalTensor],
        everyone: Any,
    ) -> None:
        """``everyone`` is the process group of the load."""
        self._everyone = everyone
        self._groups: dict[Group, list[Shareable]] = {}
        for item in shareable:
            self._groups.setdefault(item.group, []).append(item)
        self._owners: dict[str, int] = {}
        for items in self._groups.values():
            self._owners |= _deal(items, tensors)

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors that are sent or received."""
        return self._owners

    def read_elsewhere(self) -> set[str]:
        """Return the names of those that another rank reads."""
        return {
            item.name
            for group, items in self._groups.items()
            for item in items
            if self._position(group, item) != self._owners[item.name]
        }

    def _position(self, group: Group, item: Shareable) -> int:
        if group == "everyone":
            return self._everyone.rank()
        coordinate = item.mesh.get_coordinate()
        return -1 if coordinate is None else coordinate[group[1]]

    def run(self, tensors: Mapping[str, LocalTensor], on_progress: Callable[[], None]) -> int:
        """Send what this rank has read and receive the rest; return the bytes received.

        Collective. A failure of this rank to copy is raised after the last broadcast, so that no
        other rank waits for it.
        """
        received = 0
        failure: BaseException | None = None
        for group, items in self._groups.items():
            mine = [item for item in items if tensors[item.name].parts]
            if not mine:  # not a rank of the mesh
                continue
            peers = self._peers(group, mine[0])
            device = device_of(peers.group)
            for owner in range(peers.size):
                owned = [i.name for i in mine if self._owners[i.name] == owner]
                parts = [ViewPart(tensors[name].parts[0][1].detach()) for name in owned]
                if owner != peers.position:
                    received += sum(part.tensor.nbytes for part in parts)
                for failures in broadcast(parts, owner, peers, device):
                    failure = failure or next(iter(failures), None)
                    try:
                        on_progress()
                    except BaseException as error:  # Ctrl-C too: the others are on their way in
                        failure = failure or error
        if failure is not None:
            raise failure
        return received

    def _peers(self, group: Group, item: Shareable) -> Peers:
        if group == "everyone":
            positions = tuple(range(self._everyone.size()))
            return Peers(self._everyone, positions, device_type=device_of(self._everyone).type)
        mesh, axis = group
        if isinstance(item.mesh, DeviceMesh):
            return item.mesh.peers((axis,))
        along = mesh.submesh((axis,), tuple(item.mesh.get_coordinate())).all_ranks()
        torchs = item.mesh.get_group(axis)
        ranks = torch.distributed.get_process_group_ranks(torchs)
        positions = tuple(ranks.index(rank) for rank in along)
        return Peers(torchs, positions, device_type=device_of(torchs).type)


def _deal(items: Sequence[Shareable], tensors: Mapping[str, LocalTensor]) -> dict[str, int]:
    """Return the position of the reader of every tensor: largest first, to the least loaded."""
    sizes = {
        item.name: sum(tensor.nbytes for _, tensor in tensors[item.name].parts) for item in items
    }
    heap = [(0, position) for position in range(items[0].num_replicas)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        load, position = heap[0]
        heapq.heapreplace(heap, (load + sizes[name], position))
        owners[name] = position
    return owners
