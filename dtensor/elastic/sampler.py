"""Which elements of a data set a batch has, whatever the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..factories import randperm
from ..geometry.mesh import Mesh
from ..mesh.device_mesh import DeviceMesh
from ..random.seeds import seed_of_stream
from ..random.state import manual_seed


class SamplerState(TypedDict):
    """Where an ``ElasticSampler`` stands."""

    length: int
    seed: int
    position: int


class ElasticSampler:
    """Draws batches of a data set in a random order, which is another one in each epoch.

    Every rank makes it alike and gets the same indices of whole batches. The order is a function of
    seed and epoch, and the state one number, so that it goes on anywhere; save it with the model. A
    batch may begin in one epoch and end in the next one. An order takes 8 bytes for each element.

    >>> sampler = ElasticSampler(5, seed=0)
    >>> first = [sampler.next(3).tolist() for _ in range(4)]
    >>> again = ElasticSampler(5, seed=0)
    >>> again.load_state_dict({"length": 5, "seed": 0, "position": 6})
    >>> again.next(6).tolist() == first[2] + first[3]
    True
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool = True) -> None:
        if length < 1:
            raise PlacementError(f"ElasticSampler: a data set of {length} elements has no batches")
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, Tensor] | None = None
        self.position = 0
        """Elements that were drawn, of all epochs."""

    @property
    def epoch(self) -> int:
        """How often all elements have been drawn."""
        return self.position // self._length

    def next(self, batch: int) -> Tensor:
        """Return the indices of the next ``batch`` elements, int64, on the CPU."""
        if batch < 1:
            raise PlacementError(f"ElasticSampler: a batch has 1 or more elements, not {batch}")
        parts: list[Tensor] = []
        end = self.position + batch
        while self.position < end:
            start = self.position % self._length
            taken = self._order_of(self.epoch)[start : start + end - self.position]
            parts.append(taken)
            self.position += len(taken)
        return torch.cat(parts)

    def state_dict(self) -> SamplerState:
        """Return where it stands."""
        return SamplerState(length=self._length, seed=self._seed, position=self.position)

    def load_state_dict(self, state: SamplerState | Mapping[str, int]) -> None:
        """Go on where ``state_dict`` was called; PlacementError for another data set or seed."""
        for name, own in (("length", self._length), ("seed", self._seed)):
            if state[name] != own:
                raise PlacementError(
                    f"ElasticSampler: the state is of {name} {state[name]}, this one has {own}, "
                    "and would draw other batches; make it with the same"
                )
        self.position = state["position"]

    def _order_of(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        if self._order is None or self._order[0] != epoch:
            alone = DeviceMesh("cpu", Mesh((1,)), rank=0)
            manual_seed(seed_of_stream(self._seed % (1 << 64), epoch + 1), alone)
            self._order = epoch, randperm(self._length, device_mesh=alone).to_local()
        return self._order[1]
