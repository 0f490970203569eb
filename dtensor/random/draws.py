"""How many times a mesh has drawn random numbers, and what the next draw is."""

# pyright: reportPrivateUsage=false
# See `in_backward`.

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch

from dtckpt.errors import PlacementError

from ..device_mesh import DeviceMesh
from ..distribute import gather_rows
from .counter_rng import Keys, draw_keys, signed

MAX_TICKETS = 1 << 16
"""Draws that are remembered for activation checkpointing."""

_MASK = (1 << 64) - 1

# Torch has no public name for "a backward pass runs here". Without it nothing is replayed by
# itself, and activation checkpointing needs `replayed` as its context_fn.
in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Draws:
    """The seed of one mesh and its count of draws.

    Activation checkpointing runs a forward pass again and must draw the same numbers again. Torch
    then brings its own CPU generator back to where it was. So every draw takes a number from that
    generator as its *ticket*, and a draw within a backward pass that holds the ticket of an
    earlier one is that draw again.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.is_replaying = False
        """Whether ``offset`` has been set back, so that tickets are not needed."""
        self._seed: int | None = None
        self._agreed: int | None = None
        """The seed, once the ranks have compared theirs."""
        self._tickets: dict[int, int] = {}
        self._ticket = torch.empty(1, dtype=torch.int64)
        self._ticket_number = memoryview(cast(Any, self._ticket.numpy()))

    def restart(self, seed: int, offset: int) -> None:
        """Take another seed and count."""
        self._seed, self.offset, self._agreed = seed & _MASK, offset, None
        self._tickets.clear()

    def seed(self, mesh: DeviceMesh) -> int:
        """Return the seed; every rank of the mesh must call, for the ranks agree on it here.

        Raises PlacementError on all of them where they were given different ones.
        """
        if self._agreed is None:
            self._seed = self._agreed = self._agree(mesh)
        return self._agreed

    def _agree(self, mesh: DeviceMesh) -> int:
        seed = torch.initial_seed() if self._seed is None else self._seed
        outside = not mesh.has_rank or mesh.get_coordinate() is None
        if outside or mesh.size() == 1 or mesh.is_silent:
            return seed
        rows = gather_rows([int(self._seed is None), signed(seed), self.offset], mesh)
        first = next(iter(rows.values()))
        is_default = first[0] == 1
        differing = [
            at
            for at, row in rows.items()
            if row[:1] != first[:1] or (row != first and not is_default)
        ]
        if differing:
            raise PlacementError(
                f"the random numbers of mesh {mesh.layout_mesh} differ between ranks: those at "
                f"{differing[:4]} have another seed or offset than the first (this rank has "
                f"seed {seed} and offset {self.offset}); call manual_seed or set_rng_state with "
                "the same values on every rank"
            )
        return first[1] & _MASK

    def next(self, mesh: DeviceMesh) -> Keys:
        """Return the keys of the next draw, and count it; or those of a draw that is repeated."""
        seed = self._agreed if self._agreed is not None else self.seed(mesh)
        offset = self.offset
        if not self.is_replaying:
            self._ticket.random_()
            ticket: int = self._ticket_number[0]
            if in_backward() != -1:
                earlier = self._earlier(ticket)
                if earlier is not None:
                    return draw_keys(seed, earlier)
            self._tickets[ticket] = offset
            if len(self._tickets) > MAX_TICKETS:
                self._forget()
        self.offset = offset + 1
        return draw_keys(seed, offset)

    def _earlier(self, ticket: int) -> int | None:
        """Return the draw that is repeated in a backward pass; None for one that is not."""
        if ticket not in self._tickets and torch.is_grad_enabled():
            raise PlacementError(_UNKNOWN)
        return self._tickets.get(ticket)

    def _forget(self) -> None:
        for old in list(islice(self._tickets, MAX_TICKETS // 2)):
            del self._tickets[old]


_UNKNOWN = (
    "random numbers are drawn in a backward pass that records gradients, as by activation "
    "checkpointing, but it is not known which numbers the forward pass drew here. Use "
    "torch.utils.checkpoint with preserve_rng_state=True, or pass it "
    "context_fn=lambda: replayed(mesh) from dtckpt.dtensor.random"
)


def draws_of(mesh: DeviceMesh) -> Draws:
    """Return the draws of a mesh: one object for all code of this rank."""
    return mesh.cache("draws", Draws)


@contextmanager
def noting_offset(draws: Draws, noted: list[int]) -> Generator[None]:
    """Remember where the draws stand."""
    noted[:] = [draws.offset]
    yield


@contextmanager
def repeating_from(draws: Draws, noted: list[int]) -> Generator[None]:
    """Within it, draw again what was drawn after ``noted``."""
    before = draws.offset, draws.is_replaying
    draws.offset, draws.is_replaying = noted[0], True
    try:
        yield
    finally:
        draws.offset, draws.is_replaying = before
