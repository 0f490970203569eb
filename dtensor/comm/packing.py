"""Packed exchanges: parts of any number of tensors, sent in one collective.

Large messages go in rounds, a slice in each, so that buffers stay small whatever the tensors' size.
A slice that lies in one stretch of memory needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..geometry.box import Box
from .collectives import (
    Message,
    Peers,
    start_all_gather,
    start_all_to_all,
    start_messages,
)
from .collectives import broadcast as broadcast_bytes
from .costs import CostModel
from .parts import Incoming, Outgoing, ViewPart, num_bytes_of, pack, part_bytes, slice_of, unpack

_T = TypeVar("_T")
_Slices = Sequence[Sequence[tuple[_T, Box]]]

Finish = Callable[[], list[BaseException]]
"""Waits for what was started. What fails on the sides of parts is returned, not raised: the other
ranks wait for as many bytes as before, in this round and the next ones."""


@dataclass(frozen=True, slots=True)
class Messages:
    """What one rank sends and receives, by the position that it goes to or comes from."""

    sends: Sequence[Sequence[Outgoing]]
    receives: Sequence[Sequence[Incoming]]
    peers: Peers
    device: torch.device
    """Where buffers lie."""

    def start(
        self, most_bytes: int, costs: CostModel, *, later: bool = False, in_rows: bool = False
    ) -> Callable[[], None]:
        """Start to send to every position its parts; the result waits until all has come.

        All ranks of the group must call with the same ``most_bytes``, as many as any of them sends
        or receives. From it follow the number of rounds, of which all but the last are over when
        this returns. With ``later`` the result may be called after other exchanges, or never.
        ``in_rows`` says that on all ranks every part lies in one stretch, so that one round needs
        no memory.
        """
        direct = costs.is_direct(most_bytes) and self.device.type == "cpu" and not later
        rounds = costs.exchange_rounds(most_bytes, in_rows=in_rows and direct)
        return _in_rounds(rounds, lambda number: self.start_round(number, rounds, direct=direct))

    def start_round(self, number: int, rounds: int, *, direct: bool = False) -> Finish:
        """Start one of some rounds, ``direct`` or through one buffer for all ranks."""
        out = [list(slice_of(parts, number, rounds)) for parts in self.sends]
        into = [list(slice_of(parts, number, rounds)) for parts in self.receives]
        start = self._start_direct if direct else self._start_buffered
        return start(out, into)

    def _start_buffered(self, out: _Slices[Outgoing], into: _Slices[Incoming]) -> Finish:
        peers, failures = self.peers, list[BaseException]()
        send_bytes, receive_bytes = list(map(num_bytes_of, out)), list(map(num_bytes_of, into))
        sent = torch.empty(sum(send_bytes), dtype=torch.uint8, device=self.device)
        for memory, parts in _by_rank(sent, send_bytes, out, peers):
            pack(memory, parts, failures)
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=self.device)
        work = start_all_to_all(sent, send_bytes, received, receive_bytes, peers)

        def finish() -> list[BaseException]:
            work.wait()
            for memory, parts in _by_rank(received, receive_bytes, into, peers):
                unpack(memory, parts, failures)
            return failures

        return finish

    def _start_direct(self, out: _Slices[Outgoing], into: _Slices[Incoming]) -> Finish:
        """Start to send what lies in one stretch as it lies, and to receive what will."""
        device, failures = self.device, list[BaseException]()
        outgoing: list[Message] = []
        for position, parts in enumerate(out):
            if parts:
                view = parts[0][0].view(parts[0][1]) if len(parts) == 1 else None
                memory = _stretch(view, device)
                if memory is None:
                    memory = torch.empty(num_bytes_of(parts), dtype=torch.uint8, device=device)
                    pack(memory, parts, failures)
                outgoing.append((position, memory))
        incoming: list[Message] = []
        packed: list[tuple[Tensor, Sequence[tuple[Incoming, Box]]]] = []
        for position, parts in enumerate(into):
            if parts:
                view = parts[0][0].memory(parts[0][1]) if len(parts) == 1 else None
                memory = _stretch(view, device)
                if memory is None:
                    memory = torch.empty(num_bytes_of(parts), dtype=torch.uint8, device=device)
                    packed.append((memory, parts))
                incoming.append((position, memory))
        work = start_messages(outgoing, incoming, self.peers)

        def finish() -> list[BaseException]:
            work.wait()
            outgoing.clear()  # kept until it was sent
            for memory, parts in packed:
                unpack(memory, parts, failures)
            return failures

        return finish


def _stretch(view: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a view if it lies in one stretch of the memory of a device."""
    if view is None or not view.is_contiguous() or view.device.type != device.type:
        return None
    return view


def _by_rank(
    memory: Tensor, num_bytes: Sequence[int], parts: Sequence[_T], peers: Peers
) -> Iterator[tuple[Tensor, _T]]:
    """Yield what of a buffer is for each rank that has a part in it; they lie by group rank."""
    at = 0
    for position in peers.by_group_rank(range(peers.size)):
        if num_bytes[position]:
            yield memory[at : at + num_bytes[position]], parts[position]
            at += num_bytes[position]


def broadcast(
    parts: Sequence[ViewPart], source: int, peers: Peers, device: torch.device
) -> Iterator[list[BaseException]]:
    """Send views of the position ``source`` into those of all others, in rounds.

    Yields after each round what has failed in it on this rank; all ranks have to take all of them.
    """
    rounds = peers.transport.costs.num_rounds(sum(map(part_bytes, parts)))
    for number in range(rounds):
        failures: list[BaseException] = []
        boxes = list(slice_of(parts, number, rounds))
        memory = torch.zeros(num_bytes_of(boxes), dtype=torch.uint8, device=device)
        if source == peers.position:
            pack(memory, boxes, failures)
        memory = broadcast_bytes(memory, source, peers)
        if source != peers.position:
            unpack(memory, boxes, failures)
        yield failures


def gather(
    sends: Sequence[Outgoing],
    receives: Sequence[Sequence[Incoming]],
    peers: Peers,
    device: torch.device,
    costs: CostModel,
) -> Callable[[], None]:
    """Start to send the same parts to every position, by all-gathers.

    ``receives`` has the parts of every position, this one included. As ``Messages`` are, in
    rounds of which all but the last are over when this returns.
    """
    widest = max(sum(map(part_bytes, parts)) for parts in receives)
    rounds = costs.num_rounds(peers.size * widest)
    return _in_rounds(
        rounds, lambda number: _gather_round(sends, receives, peers, device, number, rounds)
    )


def _in_rounds(rounds: int, start: Callable[[int], Finish]) -> Callable[[], None]:
    """Run all rounds but the last, and start that; what failed is raised when all is over."""
    failures: list[BaseException] = []
    for number in range(rounds - 1):
        failures += start(number)()
    finish = start(rounds - 1)

    def last() -> None:
        failures.extend(finish())
        if failures:
            raise failures[0]

    return last


def _gather_round(
    sends: Sequence[Outgoing],
    receives: Sequence[Sequence[Incoming]],
    peers: Peers,
    device: torch.device,
    number: int,
    rounds: int,
) -> Finish:
    failures: list[BaseException] = []
    into = [list(slice_of(parts, number, rounds)) for parts in receives]
    width = max(map(num_bytes_of, into))
    sent = torch.empty(width, dtype=torch.uint8, device=device)
    pack(sent, list(slice_of(sends, number, rounds)), failures)
    received = torch.empty(width * peers.size, dtype=torch.uint8, device=device)
    work = start_all_gather(received, sent, peers)

    def finish() -> list[BaseException]:
        work.wait()
        for rank, parts in enumerate(peers.by_group_rank(into)):
            unpack(received[rank * width : (rank + 1) * width], parts, failures)
        return failures

    return finish
