"""Exchanges of boxes: what one rank sends and receives of a tensor, prepared but for the values.

One form for all sizes. What goes in one round is one operator to pack, the collective, and at most
one to join what came, since small tensors take as long as what Python does for them; the boxes of
larger ones become ``Messages``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..geometry.box import Box
from .collectives import Peers, from_bytes, to_bytes
from .costs import CostModel
from .message_parts import JOINABLE, ViewPart, carried, joinable
from .packing import Messages, start_packed

Slices = tuple[slice, ...]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BoxExchange:
    """What one rank sends and receives of one tensor, by group rank: any number of boxes each."""

    peers: Peers
    sends: tuple[tuple[Slices, ...], ...]
    """What goes out, in the old local tensor."""
    is_one: bool
    """Whether the same goes to all who get something."""
    send_numels: tuple[int, ...]
    receives: tuple[tuple[Box, ...], ...]
    """Where what comes goes, in the new local tensor."""
    receive_numels: tuple[int, ...]
    kept: tuple[tuple[Slices, Slices], ...]
    """What this rank has already: where it was and where it goes."""
    joined: tuple[int, int] | None
    """The dim along which all that comes, and what is kept, follows each other in this order, and
    the place of what is kept among it, which is one box then."""
    lands: bool
    """Whether all that comes lies in memory as it came. What is kept is then sent too, by this rank
    to itself."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""

    @classmethod
    def prepare(
        cls,
        peers: Peers,
        sends: Sequence[Sequence[Box]],
        receives: Sequence[Sequence[Box]],
        sizes: tuple[int, ...],
    ) -> BoxExchange:
        """Return the exchange of boxes given by position, of local coordinates, none of them empty.

        Boxes that one rank sends another are in one order in both. What a rank keeps is what it
        sends to itself.
        """
        outgoing = [tuple(boxes) for boxes in peers.by_group_rank(sends)]
        incoming = [tuple(boxes) for boxes in peers.by_group_rank(receives)]
        here = peers.group_ranks[peers.position]
        old, new = outgoing[here], incoming[here]
        ordered = [box for boxes in incoming for box in boxes]
        dim = _joining_dim(ordered, sizes) if len(new) <= 1 else None
        lands = dim is not None and all(size == 1 for size in sizes[:dim])
        if not lands:
            outgoing[here] = incoming[here] = ()
        return cls(
            peers=peers,
            sends=tuple(tuple(box.slices for box in boxes) for boxes in outgoing),
            is_one=len({boxes for boxes in outgoing if boxes}) == 1,
            send_numels=tuple(sum(box.numel for box in boxes) for boxes in outgoing),
            receives=tuple(incoming),
            receive_numels=tuple(sum(box.numel for box in boxes) for boxes in incoming),
            kept=tuple((a.slices, b.slices) for a, b in zip(old, new, strict=True)),
            joined=None if dim is None else (dim, ordered.index(new[0]) if new else -1),
            lands=lands,
            sizes=sizes,
        )

    @property
    def given_numel(self) -> int:
        """How much goes to other ranks."""
        here = self.peers.group_ranks[self.peers.position]
        return sum(self.send_numels) - self.send_numels[here]

    def start(self, local: Tensor, *, later: bool = False) -> Callable[[], Tensor]:
        """Start it in one round; the result waits and returns the new local tensor.

        With ``later`` the old one may be written before the result is called.
        """
        if local.dtype not in JOINABLE:
            wait = self.start(carried(local), later=later)
            return lambda: wait().view(local.dtype)
        kept = self._kept(local)
        if later:
            kept = [part.clone() for part in kept]
        gone = [row for row in self.sends if row]
        if self.is_one:
            parts = [local[slices] for slices in gone[0]] * len(gone)
        else:
            parts = [local[slices] for row in gone for slices in row]
        made = local.new_empty(self.sizes) if self.lands else None
        received, work = start_packed(
            parts,
            local,
            self.send_numels,
            self.receive_numels,
            self.peers,
            into=None if made is None else made.view(-1),
            as_it_lies=not later,
        )

        def finish() -> Tensor:
            work.wait()
            if made is not None:
                return made
            boxes = [box for row in self.receives for box in row]
            pieces = received.split_with_sizes([box.numel for box in boxes])
            came = [piece.view(box.sizes) for piece, box in zip(pieces, boxes, strict=True)]
            return self._join(came, kept, like=received)

        return finish

    def _kept(self, local: Tensor) -> list[Tensor]:
        """Return what is kept and not sent."""
        return [] if self.lands else [local[old] for old, _ in self.kept]

    def _join(self, came: list[Tensor], kept: list[Tensor], like: Tensor) -> Tensor:
        """Return the new local tensor of what came, in the order of the group ranks."""
        if self.joined is not None:
            dim, place = self.joined
            if kept:
                came.insert(place, kept[0])
            return torch.cat(came, dim)
        made = like.new_empty(self.sizes)
        boxes = (box for row in self.receives for box in row)
        for piece, box in zip(came, boxes, strict=True):
            made[box.slices] = piece
        for part, (_, new) in zip(kept, self.kept, strict=False):
            made[new] = part
        return made

    @classmethod
    def start_all(
        cls, exchanges: Sequence[BoxExchange], locals_: Sequence[Tensor], *, later: bool = False
    ) -> Callable[[], list[Tensor]]:
        """Start those of several tensors between the same ranks as one, as bytes.

        With ``later`` the old ones may be written before the result is called.
        """
        olds = [joinable(local) for local in locals_]
        like = olds[0].new_empty(0, dtype=torch.uint8)
        kept = [e._kept(old) for e, old in zip(exchanges, olds, strict=True)]
        if later:
            kept = [[part.clone() for part in parts] for parts in kept]
        received, work = start_packed(
            [to_bytes(olds[i][slices]) for i, slices in _by_rank([e.sends for e in exchanges])],
            like,
            _sum_bytes([e.send_numels for e in exchanges], olds),
            _sum_bytes([e.receive_numels for e in exchanges], olds),
            exchanges[0].peers,
        )

        def finish() -> list[Tensor]:
            work.wait()
            boxes = _by_rank([e.receives for e in exchanges])
            pieces = received.split_with_sizes(
                [box.numel * olds[i].element_size() for i, box in boxes]
            )
            came: list[list[Tensor]] = [[] for _ in olds]
            for (i, box), piece in zip(boxes, pieces, strict=True):
                came[i].append(from_bytes(piece, olds[i].dtype, box.sizes))
            return [
                exchange._join(came[i], kept[i], like=olds[i]).view(locals_[i].dtype)
                for i, exchange in enumerate(exchanges)
            ]

        return finish

    @classmethod
    def start_in_rounds(
        cls,
        exchanges: Sequence[BoxExchange],
        locals_: Sequence[Tensor],
        most_bytes: int,
        costs: CostModel,
        *,
        later: bool = False,
        in_rows: bool = False,
    ) -> Callable[[], list[Tensor]]:
        """Start them as ``Messages.start`` does: in rounds, or from rank to rank as they lie."""
        peers = exchanges[0].peers
        here = peers.group_ranks[peers.position]
        news: list[Tensor] = []
        sends: list[list[ViewPart]] = [[] for _ in range(peers.size)]
        receives: list[list[ViewPart]] = [[] for _ in range(peers.size)]
        for exchange, old in zip(exchanges, locals_, strict=True):
            new = old.new_empty(exchange.sizes)
            for was, goes in exchange.kept:
                new[goes] = old[was]
            news.append(new)
            for rank in range(peers.size):
                if rank != here:
                    sends[rank] += (ViewPart(old[slices]) for slices in exchange.sends[rank])
                    receives[rank] += (ViewPart(new[b.slices]) for b in exchange.receives[rank])
        messages = Messages(sends, receives, peers, locals_[0].device)
        wait = messages.start(most_bytes, costs, later=later, in_rows=in_rows)

        def finish() -> list[Tensor]:
            wait()
            return news

        return finish


def _by_rank(rows: Sequence[Sequence[Sequence[_T]]]) -> list[tuple[int, _T]]:
    """Return what there is for every rank, one after the other, with the place of its tensor."""
    columns = zip(*rows, strict=True)
    return [(i, one) for column in columns for i, several in enumerate(column) for one in several]


def _sum_bytes(numels: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of all tensors by rank."""
    widths = [tensor.element_size() for tensor in tensors]
    columns = zip(*numels, strict=True)
    return [sum(map(operator.mul, column, widths)) for column in columns]


def _joining_dim(boxes: Sequence[Box], sizes: tuple[int, ...]) -> int | None:
    """Return the dim along which boxes follow each other and make up a tensor, if there is one."""
    for dim in range(len(sizes)):
        at = 0
        for box in boxes:
            others = box.sizes[:dim] + box.sizes[dim + 1 :]
            if box.offsets[dim] != at or others != sizes[:dim] + sizes[dim + 1 :]:
                break
            at += box.sizes[dim]
        else:
            if at == sizes[dim] and boxes:
                return dim
    return None
