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
    Work,
    start_all_gather,
    start_all_to_all,
    start_messages,
)
from .collectives import broadcast as broadcast_bytes
from .costs import CostModel
from .message_parts import Incoming, ViewPart, num_bytes_of, pack, part_bytes, slice_of, unpack

_P = TypeVar("_P", ViewPart, Incoming)
_Boxes = Sequence[tuple[_P, Box]]

Finish = Callable[[], list[BaseException]]
"""Waits for what was started. What fails on the sides of parts is returned, not raised: the other
ranks wait for as many bytes as before, in this round and the next ones."""


def start_packed(
    parts: Sequence[Tensor],
    like: Tensor,
    send_numels: Sequence[int],
    receive_numels: Sequence[int],
    peers: Peers,
    *,
    into: Tensor | None = None,
    as_it_lies: bool = False,
) -> tuple[Tensor, Work]:
    """Start to send parts, joined in the order of the group ranks, and to receive such ones.

    All have the dtype and the device of ``like``; it is one that every kernel joins. What comes
    lies in the tensor that is returned, once the work is waited for: flat, and ``into`` where that
    is given. ``as_it_lies`` allows a single part to be sent from where it is. Sizes are by group
    rank, in elements.
    """
    flat = [part.reshape(-1) for part in parts]
    # One element may be contiguous with any stride, which bytes may not have.
    if as_it_lies and len(flat) == 1 and flat[0].stride(0) == 1:
        sent = flat[0]
    else:
        sent = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(receive_numels)) if into is None else into
    itemsize = like.element_size()
    work = start_all_to_all(
        sent.view(torch.uint8),
        [itemsize * numel for numel in send_numels],
        received.view(torch.uint8),
        [itemsize * numel for numel in receive_numels],
        peers,
    )
    return received, work


@dataclass(frozen=True, slots=True)
class Messages:
    """What one rank sends and receives, by the group rank that it goes to or comes from.

    For what is large, lies on several devices, or may fail where it is taken: in rounds, or from
    rank to rank as it lies.
    """

    sends: Sequence[Sequence[ViewPart]]
    receives: Sequence[Sequence[Incoming]]
    peers: Peers
    device: torch.device
    """Where buffers lie."""

    @property
    def num_bytes(self) -> int:
        """How much this rank sends or receives, whichever is more."""
        ways = (self.sends, self.receives)
        return max(sum(part_bytes(part) for parts in way for part in parts) for way in ways)

    def start(
        self, most_bytes: int, costs: CostModel, *, later: bool = False, in_rows: bool = False
    ) -> Callable[[], None]:
        """Start to send every rank its parts; the result waits until all has come.

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

    def _start_buffered(
        self, out: Sequence[_Boxes[ViewPart]], into: Sequence[_Boxes[Incoming]]
    ) -> Finish:
        failures: list[BaseException] = []
        send_bytes, receive_bytes = list(map(num_bytes_of, out)), list(map(num_bytes_of, into))
        sent = self._buffer(sum(send_bytes))
        pack(sent, [box for boxes in out for box in boxes], failures)
        received, work = start_packed(
            [sent], sent, send_bytes, receive_bytes, self.peers, as_it_lies=True
        )

        def finish() -> list[BaseException]:
            work.wait()
            unpack(received, [box for boxes in into for box in boxes], failures)
            return failures

        return finish

    def _start_direct(
        self, out: Sequence[_Boxes[ViewPart]], into: Sequence[_Boxes[Incoming]]
    ) -> Finish:
        """Start to send what lies in one stretch as it lies, and to receive what will."""
        failures: list[BaseException] = []
        outgoing: list[Message] = []
        incoming: list[Message] = []
        packed: list[tuple[Tensor, _Boxes[Incoming]]] = []
        for rank, (parts, wanted) in enumerate(zip(out, into, strict=True)):
            if parts:
                memory = self._stretch(parts[0][0].view(parts[0][1]) if len(parts) == 1 else None)
                if memory is None:
                    memory = self._buffer(num_bytes_of(parts))
                    pack(memory, parts, failures)
                outgoing.append((rank, memory))
            if wanted:
                memory = self._stretch(
                    wanted[0][0].memory(wanted[0][1]) if len(wanted) == 1 else None
                )
                if memory is None:
                    memory = self._buffer(num_bytes_of(wanted))
                    packed.append((memory, wanted))
                incoming.append((rank, memory))
        work = start_messages(outgoing, incoming, self.peers)

        def finish() -> list[BaseException]:
            work.wait()
            outgoing.clear()  # kept until it was sent
            for memory, parts in packed:
                unpack(memory, parts, failures)
            return failures

        return finish

    def _buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _stretch(self, view: Tensor | None) -> Tensor | None:
        """Return a view if it lies in one stretch of the memory of the device."""
        if view is None or not view.is_contiguous() or view.device.type != self.device.type:
            return None
        return view


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
    sends: Sequence[ViewPart],
    receives: Sequence[Sequence[Incoming]],
    peers: Peers,
    device: torch.device,
    costs: CostModel,
) -> Callable[[], None]:
    """Start to send the same parts to every rank, by all-gathers.

    ``receives`` has the parts of every group rank, this one included. As ``Messages`` are, in
    rounds of which all but the last are over when this returns.
    """
    widest = max(sum(map(part_bytes, parts)) for parts in receives)
    rounds = costs.num_rounds(peers.size * widest)

    def start(number: int) -> Finish:
        failures: list[BaseException] = []
        into = [list(slice_of(parts, number, rounds)) for parts in receives]
        width = max(map(num_bytes_of, into))
        sent = torch.empty(width, dtype=torch.uint8, device=device)
        pack(sent, list(slice_of(sends, number, rounds)), failures)
        received = torch.empty(width * peers.size, dtype=torch.uint8, device=device)
        work = start_all_gather(received, sent, peers)

        def finish() -> list[BaseException]:
            work.wait()
            for rank, parts in enumerate(into):
                unpack(received[rank * width : (rank + 1) * width], parts, failures)
            return failures

        return finish

    return _in_rounds(rounds, start)


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
