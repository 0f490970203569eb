"""Packed exchanges: parts of any number of tensors, sent in one collective.

What goes from one rank to another is a message: parts one after the other, which both ends list
alike. Large messages go in rounds, a slice in each, so that buffers stay small whatever the
tensors' size. A slice that lies in one stretch of memory needs none. Elements move as integers of
their width, which every dtype has and every kernel copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..geometry.box import Box, run_boxes
from .collectives import (
    Message,
    Peers,
    start_all_gather,
    start_all_to_all,
    start_messages,
    to_bytes,
)
from .collectives import broadcast as broadcast_bytes
from .costs import CostModel

_P = TypeVar("_P", bound="Part")
_T = TypeVar("_T")

Finish = Callable[[], list[BaseException]]
"""Waits for what was started. What fails on the sides of parts is returned, not raised: the other
ranks wait for as many bytes as before, in this round and the next ones."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Part(Protocol):
    """Elements of a tensor that go to another rank, or come from one."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extent in every dim."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...


class Outgoing(Part, Protocol):
    """A part that is sent."""

    def view(self, box: Box) -> Tensor:
        """Return the elements of a box of the part."""
        ...


class Incoming(Part, Protocol):
    """A part that is received."""

    def memory(self, box: Box) -> Tensor | None:
        """Return where the elements of a box of the part go, if that is ordinary memory."""
        ...

    def put(self, box: Box, items: Tensor) -> None:
        """Take the elements of a box of the part, as integers of their width."""
        ...


@dataclass(frozen=True, slots=True)
class ViewPart:
    """A view of a tensor, sent or received."""

    tensor: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple(self.tensor.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.tensor.element_size()

    def view(self, box: Box) -> Tensor:
        """Return a box of the view, its bytes the values."""
        return self._box(box).resolve_conj().resolve_neg()

    def memory(self, box: Box) -> Tensor | None:
        """Return a box of the view, unless its bytes are not the values."""
        view = self._box(box)
        return None if view.is_conj() or view.is_neg() else view

    def put(self, box: Box, items: Tensor) -> None:
        """Copy to a box of the view."""
        view = self._box(box)
        if view.is_conj() or view.is_neg():
            view.copy_(items.view(view.dtype))
        else:
            carried(view).copy_(items)

    def _box(self, box: Box) -> Tensor:
        return self.tensor if box.sizes == self.sizes else self.tensor[box.slices]


def exchange(
    sends: Sequence[Sequence[Outgoing]],
    receives: Sequence[Sequence[Incoming]],
    peers: Peers,
    device: torch.device,
    most_bytes: int,
    costs: CostModel,
    *,
    later: bool = False,
    in_rows: bool = False,
) -> Callable[[], None]:
    """Start to send to every position its parts; the result waits until all has come.

    All ranks of the group must call with the same ``most_bytes``, as many as any of them sends or
    receives. From it follow the number of rounds, of which all but the last are over when this
    returns. With ``later`` the result may be called after other exchanges, or never.
    ``in_rows`` says that on all ranks every part lies in one stretch, so that one round needs no
    memory.
    """
    direct = costs.is_direct(most_bytes) and device.type == "cpu" and not later
    rounds = costs.exchange_rounds(most_bytes, in_rows=in_rows and direct)
    return _in_rounds(
        rounds,
        lambda number: exchange_round(
            sends, receives, peers, device, number, rounds, direct=direct
        ),
    )


def exchange_round(
    sends: Sequence[Sequence[Outgoing]],
    receives: Sequence[Sequence[Incoming]],
    peers: Peers,
    device: torch.device,
    number: int,
    rounds: int,
    *,
    direct: bool = False,
) -> Finish:
    """Start one round of an ``exchange``, ``direct`` or through one buffer for all ranks."""
    out = [list(_slice(parts, number, rounds)) for parts in sends]
    into = [list(_slice(parts, number, rounds)) for parts in receives]
    if direct:
        return _start_direct(out, into, peers, device)
    failures: list[BaseException] = []
    send_bytes, receive_bytes = list(map(_num_bytes, out)), list(map(_num_bytes, into))
    sent = torch.empty(sum(send_bytes), dtype=torch.uint8, device=device)
    for memory, parts in _by_rank(sent, send_bytes, out, peers):
        _pack(memory, parts, failures)
    received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=device)
    work = start_all_to_all(sent, send_bytes, received, receive_bytes, peers)

    def finish() -> list[BaseException]:
        work.wait()
        for memory, parts in _by_rank(received, receive_bytes, into, peers):
            _unpack(memory, parts, failures)
        return failures

    return finish


def _start_direct(
    out: Sequence[Sequence[tuple[Outgoing, Box]]],
    into: Sequence[Sequence[tuple[Incoming, Box]]],
    peers: Peers,
    device: torch.device,
) -> Finish:
    """Start to send what lies in one stretch as it lies, and to receive what will."""
    failures: list[BaseException] = []
    outgoing: list[Message] = []
    for position, parts in enumerate(out):
        if parts:
            memory = _stretch(parts[0][0].view(parts[0][1]), device) if len(parts) == 1 else None
            if memory is None:
                memory = torch.empty(_num_bytes(parts), dtype=torch.uint8, device=device)
                _pack(memory, parts, failures)
            outgoing.append((position, memory))
    incoming: list[Message] = []
    packed: list[tuple[Tensor, Sequence[tuple[Incoming, Box]]]] = []
    for position, parts in enumerate(into):
        if parts:
            memory = _stretch(parts[0][0].memory(parts[0][1]), device) if len(parts) == 1 else None
            if memory is None:
                memory = torch.empty(_num_bytes(parts), dtype=torch.uint8, device=device)
                packed.append((memory, parts))
            incoming.append((position, memory))
    work = start_messages(outgoing, incoming, peers)

    def finish() -> list[BaseException]:
        work.wait()
        outgoing.clear()  # kept until it was sent
        for memory, parts in packed:
            _unpack(memory, parts, failures)
        return failures

    return finish


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
    rounds = peers.transport.costs.num_rounds(sum(map(_part_bytes, parts)))
    for number in range(rounds):
        failures: list[BaseException] = []
        boxes = list(_slice(parts, number, rounds))
        memory = torch.zeros(_num_bytes(boxes), dtype=torch.uint8, device=device)
        if source == peers.position:
            _pack(memory, boxes, failures)
        memory = broadcast_bytes(memory, source, peers)
        if source != peers.position:
            _unpack(memory, boxes, failures)
        yield failures


def gather(
    sends: Sequence[Outgoing],
    receives: Sequence[Sequence[Incoming]],
    peers: Peers,
    device: torch.device,
    costs: CostModel,
) -> Callable[[], None]:
    """Start to send the same parts to every position, by all-gathers.

    ``receives`` has the parts of every position, this one included. As with ``exchange``, in
    rounds of which all but the last are over when this returns.
    """
    widest = max(sum(map(_part_bytes, parts)) for parts in receives)
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
    into = [list(_slice(parts, number, rounds)) for parts in receives]
    width = max(map(_num_bytes, into))
    sent = torch.empty(width, dtype=torch.uint8, device=device)
    _pack(sent, list(_slice(sends, number, rounds)), failures)
    received = torch.empty(width * peers.size, dtype=torch.uint8, device=device)
    work = start_all_gather(received, sent, peers)

    def finish() -> list[BaseException]:
        work.wait()
        for rank, parts in enumerate(peers.by_group_rank(into)):
            _unpack(received[rank * width : (rank + 1) * width], parts, failures)
        return failures

    return finish


def _slice(parts: Sequence[_P], number: int, rounds: int) -> Iterator[tuple[_P, Box]]:
    """Yield the boxes of a message that move in a round.

    The widest elements come first, so that all lie in a buffer where they may.
    """
    if len(parts) > 1:
        parts = sorted(parts, key=lambda part: -part.itemsize)
    if rounds == 1:
        yield from ((part, Box.whole(part.sizes)) for part in parts if 0 not in part.sizes)
        return
    total = sum(map(_part_bytes, parts))
    low, high = total * number // rounds, total * (number + 1) // rounds
    end = 0
    for part in parts:
        start, end = end, end + _part_bytes(part)
        if end > low and start < high:
            first = max(low - start, 0) // part.itemsize
            last = min(high - start, end - start) // part.itemsize
            for box in run_boxes(Box.whole(part.sizes), first, last):
                yield part, box


def _part_bytes(part: Part) -> int:
    numel = part.itemsize
    for size in part.sizes:
        numel *= size
    return numel


def _num_bytes(boxes: Sequence[tuple[Part, Box]]) -> int:
    return sum(part.itemsize * box.numel for part, box in boxes)


def _stretch(view: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a view if it lies in one stretch of the memory of a device."""
    if view is None or not view.is_contiguous() or view.device.type != device.type:
        return None
    return view


def _stretches(memory: Tensor, boxes: Sequence[tuple[_P, Box]]) -> Iterator[tuple[Tensor, _P, Box]]:
    """Yield the bytes of every box in a packed message."""
    at = 0
    for part, box in boxes:
        num_bytes = part.itemsize * box.numel
        yield memory[at : at + num_bytes], part, box
        at += num_bytes


def _pack(
    memory: Tensor, boxes: Sequence[tuple[Outgoing, Box]], failures: list[BaseException]
) -> None:
    for stretch, part, box in _stretches(memory, boxes):
        try:
            view = part.view(box)
            if stretch.storage_offset() % part.itemsize:  # after narrower elements for others
                stretch.copy_(to_bytes(view))
            else:
                _items(stretch, part, box).copy_(carried(view))
        except BaseException as error:
            failures.append(error)


def _unpack(
    memory: Tensor, boxes: Sequence[tuple[Incoming, Box]], failures: list[BaseException]
) -> None:
    for stretch, part, box in _stretches(memory, boxes):
        try:
            if stretch.storage_offset() % part.itemsize:
                stretch = stretch.clone()
            part.put(box, _items(stretch, part, box))
        except BaseException as error:
            failures.append(error)


def _items(stretch: Tensor, part: Part, box: Box) -> Tensor:
    """Return bytes as integers of their width, in the shape of a box."""
    return stretch.view(_CARRIERS[part.itemsize]).view(box.sizes)


def carried(view: Tensor) -> Tensor:
    """Return elements as integers of their width, which share memory with them."""
    carrier = _CARRIERS[view.element_size()]
    return view if view.dtype == carrier else view.view(carrier)
