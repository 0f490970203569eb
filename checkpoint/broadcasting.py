"""Sending what one replica has read to the others, in broadcasts of bounded size."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..dtensor.box import Box
from ..dtensor.collectives import Peers, broadcast
from ..dtensor.device_mesh import DeviceMesh
from .read_once import Group, Shareable
from .rendezvous import device_of
from .tensors import LocalTensor

BATCH_BYTES = 16 << 20
"""Bytes of one broadcast."""
_ALIGNMENT = 16
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Exchange:
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

    def owned(self) -> dict[str, bool]:
        """Return the names of the shared tensors, and whether this rank is to read them."""
        return {
            item.name: self._position(group, item) == self._owners[item.name]
            for group, items in self._groups.items()
            for item in items
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
                parts = [tensors[i.name].parts[0][1] for i in mine if self._owners[i.name] == owner]
                for batch in _batches(parts):
                    buffer = torch.zeros(batch.num_bytes, dtype=torch.uint8, device=device)
                    try:
                        if owner == peers.position:
                            batch.pack(buffer)
                    except BaseException as error:  # Ctrl-C too: the others are on their way in
                        failure = failure or error
                    buffer = broadcast(buffer, owner, peers)
                    on_progress()
                    try:
                        if owner != peers.position:
                            batch.unpack(buffer)
                            received += batch.num_elements_bytes
                    except BaseException as error:
                        failure = failure or error
        if failure is not None:
            raise failure
        return received

    def _peers(self, group: Group, item: Shareable) -> Peers:
        if group == "everyone":
            return Peers(self._everyone, tuple(range(self._everyone.size())))
        mesh, axis = group
        if isinstance(item.mesh, DeviceMesh):
            return item.mesh.peers((axis,))
        along = mesh.submesh((axis,), tuple(item.mesh.get_coordinate())).all_ranks()
        torchs = item.mesh.get_group(axis)
        ranks = torch.distributed.get_process_group_ranks(torchs)
        return Peers(torchs, tuple(ranks.index(rank) for rank in along))


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


class _Batch:
    """Parts of tensors that travel together, each at an aligned offset of a buffer."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_elements_bytes = 0
        self._parts: list[tuple[int, torch.Tensor]] = []

    def add(self, part: torch.Tensor) -> None:
        """Give a part, a view of the tensor, its place."""
        self._parts.append((self.num_bytes, part))
        self.num_bytes += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.num_elements_bytes += part.nbytes

    def pack(self, buffer: torch.Tensor) -> None:
        """Copy all parts into the buffer."""
        for offset, part in self._parts:
            self._view(buffer, offset, part).copy_(_opaque(part))

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copy all parts out of the buffer."""
        for offset, part in self._parts:
            _opaque(part).copy_(self._view(buffer, offset, part))

    @staticmethod
    def _view(buffer: torch.Tensor, offset: int, part: torch.Tensor) -> torch.Tensor:
        dtype = _opaque(part).dtype
        return buffer[offset : offset + part.nbytes].view(dtype).view(part.shape)


def _opaque(part: torch.Tensor) -> torch.Tensor:
    """Return the elements as ints, which torch can copy for every dtype that it stores."""
    if part.is_complex() or part.is_neg():
        return part
    return part.view(_INT_OF_SIZE[part.element_size()])


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[_Batch]:
    batch = _Batch()
    for tensor in tensors:
        plain = tensor.detach()
        if not plain.numel():
            continue
        for box in Box.whole(tuple(plain.shape)).parts(BATCH_BYTES // plain.element_size()):
            part = plain[box.slices]
            if batch.num_bytes and batch.num_bytes + part.nbytes > BATCH_BYTES:
                yield batch
                batch = _Batch()
            batch.add(part)
    if batch.num_bytes:
        yield batch
