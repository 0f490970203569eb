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
    """What one rank sends and receives of one tensor, by group rank; None where it is nothing."""

    peers: Peers
    sends: tuple[Slices | None, ...]
    """What goes out, in the old local tensor."""
    is_one: bool
    """Whether the same goes to all who get something."""
    send_numels: tuple[int, ...]
    receives: tuple[Box | None, ...]
    """Where what comes goes, in the new local tensor."""
    receive_numels: tuple[int, ...]
    kept: tuple[Slices, Slices] | None
    """What this rank has already: where it was and where it goes."""
    joined: tuple[int, int] | None
    """The dim along which all that comes, and what is kept, follows each other in this order, and
    the place of what is kept among it."""
    lands: bool
    """Whether all that comes lies in memory as it came. What is kept is then sent too, by this rank
    to itself."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""

    @classmethod
    def prepare(
        cls,
        peers: Peers,
        sends: Sequence[Box | None],
        receives: Sequence[Box | None],
        sizes: tuple[int, ...],
    ) -> BoxExchange:
        """Return the exchange of boxes given by position, of local coordinates, none of them empty.

        What a rank keeps is what it sends to itself.
        """
        outgoing, incoming = peers.by_group_rank(sends), peers.by_group_rank(receives)
        here = peers.group_ranks[peers.position]
        old, new = outgoing[here], incoming[here]
        ordered = [box for box in incoming if box is not None]
        dim = _joining_dim(ordered, sizes)
        lands = dim is not None and all(size == 1 for size in sizes[:dim])
        if not lands:
            outgoing[here] = incoming[here] = None
        return cls(
            peers=peers,
            sends=tuple(None if box is None else box.slices for box in outgoing),
            is_one=len({box for box in outgoing if box is not None}) == 1,
            send_numels=tuple(0 if box is None else box.numel for box in outgoing),
            receives=tuple(incoming),
            receive_numels=tuple(0 if box is None else box.numel for box in incoming),
            kept=None if old is None or new is None else (old.slices, new.slices),
            joined=None if dim is None else (dim, -1 if new is None else ordered.index(new)),
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
        if kept is not None and later:
            kept = kept.clone()
        gone = [slices for slices in self.sends if slices is not None]
        parts = [local[gone[0]]] * len(gone) if self.is_one else [local[s] for s in gone]
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
            pieces = received.split_with_sizes([numel for numel in self.receive_numels if numel])
            boxes = filter(None, self.receives)
            came = [piece.view(box.sizes) for piece, box in zip(pieces, boxes, strict=True)]
            return self._join(came, kept, like=received)

        return finish

    def _kept(self, local: Tensor) -> Tensor | None:
        """Return what is kept and not sent."""
        return None if self.kept is None or self.lands else local[self.kept[0]]

    def _join(self, came: list[Tensor], kept: Tensor | None, like: Tensor) -> Tensor:
        """Return the new local tensor of what came, in the order of the group ranks."""
        if self.joined is not None:
            dim, place = self.joined
            if kept is not None:
                came.insert(place, kept)
            return torch.cat(came, dim)
        made = like.new_empty(self.sizes)
        for piece, box in zip(came, filter(None, self.receives), strict=True):
            made[box.slices] = piece
        if kept is not None and self.kept is not None:
            made[self.kept[1]] = kept
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
            kept = [None if one is None else one.clone() for one in kept]
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
            if exchange.kept is not None:
                new[exchange.kept[1]] = old[exchange.kept[0]]
            news.append(new)
            for rank in range(peers.size):
                slices, box = exchange.sends[rank], exchange.receives[rank]
                if slices is not None and rank != here:
                    sends[rank].append(ViewPart(old[slices]))
                if box is not None and rank != here:
                    receives[rank].append(ViewPart(new[box.slices]))
        messages = Messages(sends, receives, peers, locals_[0].device)
        wait = messages.start(most_bytes, costs, later=later, in_rows=in_rows)

        def finish() -> list[Tensor]:
            wait()
            return news

        return finish


def _by_rank(rows: Sequence[Sequence[_T | None]]) -> list[tuple[int, _T]]:
    """Return what there is for every rank, one after the other, with the place of its tensor."""
    columns = zip(*rows, strict=True)
    return [(i, one) for column in columns for i, one in enumerate(column) if one is not None]


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
