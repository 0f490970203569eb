"""Where the coordinator of a process group leaves word for its members of how to reach it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dtckpt.errors import CheckpointError

from ...dtensor.comm.collectives import Peers, start_all_gather

_KEY = "dtckpt/coordinator"
_GENERATIONS = "dtckpt/introductions of rank {} of {}"
_MAX_INVITATION_BYTES = 2048


class Board(Protocol):
    """Where the coordinator leaves word for the members; all it does may hang, or fail."""

    def introduce(self, rank: int, size: int) -> int:
        """Count a rank in; return how often it has been, by groups of this name and size."""
        ...

    def post(self, word: bytes) -> None:
        """Leave word."""
        ...

    def read(self) -> bytes | None:
        """Return the word; None while there is none."""
        ...


@dataclass(frozen=True, slots=True)
class StoreBoard:
    """The store of a process group."""

    store: Any

    def introduce(self, rank: int, size: int) -> int:
        return self.store.add(_GENERATIONS.format(rank, size), 1)

    def post(self, word: bytes) -> None:
        self.store.set(_KEY, word)

    def read(self) -> bytes | None:
        return self.store.get(_KEY) if self.store.check([_KEY]) else None


class GatherBoard:
    """One collective of a group that has no store: a backend that torch knows nothing of.

    Each rank takes part once, and a rank that gives up waiting for it goes on waiting the next
    time, so the order of the group's collectives stays the same on all ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)  # what is kept for a group must not keep it
        self._work: Any = None
        self._gathered: torch.Tensor
        self._sent: torch.Tensor

    def introduce(self, rank: int, size: int) -> int:
        return 0

    def post(self, word: bytes) -> None:
        group = self._group()
        if group is None:
            raise CheckpointError("the process group is gone")
        device, size = device_of(group), group.size()
        if len(word) > _MAX_INVITATION_BYTES:
            raise CheckpointError(f"the addresses of this host take {len(word)} bytes")
        padded = bytearray(word.ljust(_MAX_INVITATION_BYTES, b" "))
        self._sent = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        self._gathered = self._sent.new_empty(_MAX_INVITATION_BYTES * size)
        peers = Peers(group, tuple(range(size)), (), device.type)
        self._work = start_all_gather(self._gathered, self._sent, peers)

    def read(self) -> bytes | None:
        if self._work is None:
            self.post(b"")
        work: Any = self._work
        if not work.is_completed():
            return None
        work.wait()
        return self._gathered[:_MAX_INVITATION_BYTES].cpu().numpy().tobytes().rstrip()


def board_of(group: Any) -> Board:
    """Return where the coordinator of a group leaves word."""
    store = group.get_group_store() if hasattr(group, "get_group_store") else None
    return GatherBoard(group) if store is None else StoreBoard(store)


def device_of(group: Any) -> torch.device:
    """Return where a group moves bytes: the CPU if it can, else the current accelerator."""
    if isinstance(group, torch.distributed.ProcessGroup):
        backends = str(torch.distributed.get_backend_config(group))
        if "cpu:" not in backends:
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None:
                return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
