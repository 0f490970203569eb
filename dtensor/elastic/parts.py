"""The loop of a rank over its parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from dtckpt.errors import PlacementError

from ..mesh.device_mesh import DeviceMesh
from ..mesh.modes import running_part
from .batches import GroupOf
from .contract import Buffers
from .rounds import Round, Rounds


class Gradients(Protocol):
    """Some gradients of a model during one step."""

    def begin(self) -> None:
        """Take them from now on."""
        ...

    def begin_round(self, now: Round) -> None:
        """Take those of another group."""
        ...

    def end_round(self) -> None:
        """Add those of the group; every rank calls."""
        ...

    def deliver(self, num_groups: int) -> None:
        """Let the parameters have the mean over the groups, added to what they had."""
        ...

    def end(self) -> None:
        """Leave them to the model again."""
        ...


class Parts:
    """The parts of a batch that one rank runs, as local tensors: a tuple where there are several.

    To be looped over once.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        rounds: Rounds,
        given: Sequence[GroupOf],
        gradients: Sequence[Gradients],
        seed_of: Callable[[int], int],
    ) -> None:
        self._model, self._mesh = model, mesh
        self.rounds = rounds
        self._given, self._gradients, self._seed_of = given, gradients, seed_of
        self._loop: Generator[Any] | None = None
        self.now: Round | None = None
        """The round that runs."""
        self.is_over = False
        """Whether all have been run, and the parameters have their gradients."""

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[Any]:
        if self._loop is not None:
            raise PlacementError("ElasticSteps: the parts of a batch are looped over once")
        self._loop = self._run()
        return self._loop

    def _run(self) -> Generator[Any]:
        here = self._mesh.get_coordinate() or ()
        buffers = Buffers(self._model)
        for now, group in zip(self.rounds.at(here), self.rounds.needed(here), strict=True):
            for one in self._gradients:
                one.begin_round(now)
            values = tuple(part(group) for part in self._given)
            self.now = now
            with _seeded(self._seed_of(group), self._mesh.device), running_part():
                yield values[0] if len(values) == 1 else values
            self.now = None
            buffers.require_unchanged()
            for one in self._gradients:
                one.end_round()
        for one in self._gradients:
            one.deliver(self.rounds.num_groups)
        self.is_over = True

    def begin(self) -> None:
        """Take the gradients of the model from now on."""
        for one in self._gradients:
            one.begin()

    def end(self) -> None:
        """Leave them to the model again, and random numbers to torch."""
        self.now = None
        if self._loop is not None:
            self._loop.close()
        for one in self._gradients:
            one.end()


@contextmanager
def _seeded(seed: int, device: torch.device) -> Generator[None]:
    """Let torch's own generators begin at a seed, and go on after it as if nothing had been."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield
