"""How many times a mesh has drawn random numbers, and what the next draw is."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch

from dtckpt.errors import PlacementError

from ..comm.streams import refuse_capture
from ..mesh.device_mesh import DeviceMesh
from ..mesh.modes import require_no_part
from ..torch_private import has_modes, in_backward, outside_modes
from .counter_rng import Keys, draw_keys
from .seeds import Seeds

MAX_TICKETS = 1 << 16
"""Draws that are remembered for activation checkpointing, and for seeds that are set again."""

Noted = tuple[int | None, int]
"""A seed, None before there is one, and an offset."""


class Draws:
    """The seed of one mesh and its count of draws.

    Activation checkpointing runs a forward pass again and must draw the same numbers again. Torch
    then brings its own CPU generator back to where it was. So every draw takes a number from that
    generator as its *ticket*, and a draw within a backward pass that holds the ticket of an
    earlier one is that draw again. So is any other draw of a mesh that follows torch's seed.
    """

    def __init__(self, device_type: str) -> None:
        self.offset = 0
        self._device_type = device_type
        self._lock = threading.RLock()  # a signal handler may come in between
        self._is_replaying = False
        """Whether ``offset`` has been set back, so that tickets are not needed."""
        self._is_noting = False
        """Whether what is drawn will be repeated from an offset, which may not move now."""
        self._seeds = Seeds()
        self._seed: int | None = None
        """What the ranks have agreed on."""
        self._tickets: dict[int, tuple[int, int]] = {}
        with outside_modes():
            self._ticket = torch.empty(1, dtype=torch.int64, device="cpu")
            self._ticket_number = memoryview(cast(Any, self._ticket.numpy()))

    def restart(self, seed: int, offset: int) -> None:
        """Take another seed and count."""
        with self._lock:
            self._seeds.give(seed)
            self.offset, self._seed = offset, None

    def state(self, mesh: DeviceMesh) -> tuple[int, int]:
        """Return seed and count; every rank of the mesh must call, for they agree on these here.

        Raises PlacementError on all of them where they were given different ones.
        """
        with self._lock:
            if self._seed is None or (not self._is_noting and self._seeds.have_moved()):
                self._agree(mesh, None)
            return cast(int, self._seed), self.offset

    def next(self, mesh: DeviceMesh) -> Keys:
        """Return the keys of the next draw, and count it; or those of a draw that is repeated.

        Raises UnsupportedOp where the current stream is captured: a graph that is replayed would
        repeat the numbers, and PlacementError within a part of a step of ``ElasticSteps``.
        """
        refuse_capture(self._device_type)
        if mesh.layout_mesh.size > 1:
            require_no_part()
        with self._lock:
            if self._is_replaying:
                seed = self._seed if self._seed is not None else self.state(mesh)[0]
                self.offset += 1
                return draw_keys(seed, self.offset - 1)
            ticket = self._take_ticket()
            if in_backward():
                earlier = self._earlier(ticket)
                if earlier is not None:
                    return draw_keys(*earlier)
            seeds = self._seeds
            if self._seed is None or (
                seeds.follow_torch
                and not self._is_noting
                and (ticket in self._tickets or seeds.have_moved())
            ):
                self._agree(mesh, ticket)
            drawn = cast(int, self._seed), self.offset
            self._tickets[ticket] = drawn
            if len(self._tickets) > MAX_TICKETS:
                self._forget()
            self.offset += 1
        return draw_keys(*drawn)

    def _agree(self, mesh: DeviceMesh, ticket: int | None) -> None:
        before, self._seed = self._seed, None  # until they have agreed every draw comes here
        known = None if ticket is None or before is None else self._tickets.get(ticket)
        self._seed, self.offset = self._seeds.agree(
            mesh, before, self.offset, known=known, ticket=ticket
        )

    def _take_ticket(self) -> int:
        try:
            if has_modes():
                raise _InModes
            self._ticket.random_()
        except RuntimeError:  # as of a transform, which takes the ticket for a tensor of its own
            with outside_modes():
                self._ticket.random_()
        return self._ticket_number[0]

    def _earlier(self, ticket: int) -> tuple[int, int] | None:
        """Return the draw that is repeated in a backward pass; None for one that is not."""
        if ticket not in self._tickets and torch.is_grad_enabled():
            raise PlacementError(_UNKNOWN)
        return self._tickets.get(ticket)

    def _forget(self) -> None:
        for old in list(islice(self._tickets, MAX_TICKETS // 2)):
            del self._tickets[old]

    @contextmanager
    def noting(self, mesh: DeviceMesh, noted: list[Noted]) -> Generator[None]:
        """Remember where the draws stand, and let no other seed of torch count within it."""
        seed, offset = self.state(mesh)
        noted[:] = [(seed, offset)]
        before, self._is_noting = self._is_noting, True
        try:
            yield
        finally:
            self._is_noting = before

    @contextmanager
    def repeating(self, noted: list[Noted]) -> Generator[None]:
        """Within it, draw again what was drawn after ``noted``."""
        before = self._seed, self.offset, self._is_replaying
        (self._seed, self.offset), self._is_replaying = noted[0], True
        try:
            yield
        finally:
            self._seed, self.offset, self._is_replaying = before


class _InModes(RuntimeError):
    """A mode may keep the ticket from being drawn."""


_UNKNOWN = (
    "random numbers are drawn in a backward pass that records gradients, as by activation "
    "checkpointing, but it is not known which numbers the forward pass drew here. Use "
    "torch.utils.checkpoint with preserve_rng_state=True, or pass it "
    "context_fn=lambda: replayed(mesh) from dtckpt.dtensor.random"
)


def draws_of(mesh: DeviceMesh) -> Draws:
    """Return the draws of a mesh: one object for all code of this rank."""
    return mesh.state("draws", lambda: Draws(mesh.device_type))
