"""``CheckpointTransport``: a replica that is behind gets the state of one that is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from dtckpt.errors import LayoutMismatch

from ...checkpoint import load, read_manifest, save
from ...storage.memory import MemoryStore
from ..frameworks import framework
from ..whole_state import read_whole
from .remote_store import RemoteStore
from .serving import SnapshotServer

CheckpointTransport: Any = framework("torchft", "torchft.checkpointing").CheckpointTransport


class DtckptTransport(CheckpointTransport):
    """Each rank of a replica serves its part of the state; its peer in another one fetches it.

    What is served is a checkpoint in memory, a copy made in ``send_checkpoint``, so that the
    training goes on at once; every byte that arrives is compared with its checksum, ranges are read
    in parallel, and nothing is pickled.

    ``state_dict`` returns state of the structure that is sent, as ``Manager`` collects it, and is
    needed where there are DTensors: those that are received have the meshes and placements of its
    own. They are new tensors: what is there stays as it is until the Manager gives it the state.
    """

    def __init__(
        self,
        state_dict: Callable[[], Any] | None = None,
        *,
        timeout: timedelta = timedelta(seconds=60),
        allow_pickle: bool = False,
    ) -> None:
        self._state_dict = state_dict
        self._allow_pickle = allow_pickle
        self._server = SnapshotServer(timeout.total_seconds())

    def metadata(self) -> str:
        """Return where others find the state of this rank."""
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Copy the state and serve it until the next one, or until it is disallowed.

        Raises Unsavable, naming it, for what a checkpoint does not hold.
        """
        store = MemoryStore()
        save(
            {"state": _mapped(state_dict, _local)},
            store,
            no_dist=True,
            metadata={"sharded": _sharded(state_dict)},
            allow_pickle=self._allow_pickle,
            timeout=timeout,
        )
        self._server.offer(step, store)

    def disallow_checkpoint(self) -> None:
        """Serve nothing any more."""
        self._server.withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of a step from the rank that told this ``metadata``.

        StorageError where it is not there in time, Corrupt where bytes are not those that were
        sent, LayoutMismatch where the state of this rank has another structure or shapes.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        with RemoteStore(metadata, step, deadline) as store:
            if self._state_dict is None:
                self._refuse_sharded(store)
                return read_whole(store, allow_pickle=self._allow_pickle)["state"]
            own = self._state_dict()
            into = {"state": _mapped(own, _fresh)}
            load(into, store, no_dist=True, allow_pickle=self._allow_pickle)
            return _like(own, into["state"])

    def _refuse_sharded(self, store: RemoteStore) -> None:
        """Raise LayoutMismatch where DTensors are sent, of which there are none to go by here."""
        if read_manifest(store).metadata["sharded"]:
            raise LayoutMismatch(
                f"{store.url} has DTensors. Make DtckptTransport with state_dict=, which says the "
                "meshes and placements that they have here"
            )

    def shutdown(self, wait: bool = True) -> None:
        """End the server of this rank."""
        self._server.close(wait=wait)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a state with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(part, change) for k, part in cast(dict[Any, Any], value).items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, change) for part in value)
    return value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(_local(tensor))


def _like(own: Any, received: Any) -> Any:
    """Return what was received, with a DTensor wherever this rank has one."""
    if isinstance(own, DTensor):
        return DTensor.from_local(
            received,
            own.device_mesh,
            own.placements,
            run_check=False,
            shape=own.shape,
            stride=own.stride(),
        )
    if isinstance(own, dict):
        parts = cast(dict[Any, Any], own)
        return {key: _like(parts.get(key), part) for key, part in received.items()}
    if type(own) in (list, tuple):
        return type(own)(_like(a, b) for a, b in zip(own, received, strict=True))
    return received


def _sharded(value: Any) -> int:
    """Return how many DTensors there are in a state."""
    if isinstance(value, DTensor):
        return 1
    if isinstance(value, dict):
        return sum(map(_sharded, cast(dict[Any, Any], value).values()))
    if type(value) in (list, tuple):
        return sum(map(_sharded, value))
    return 0
