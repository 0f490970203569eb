"""The packed exchange of one tensor in one round, prepared: all is known but the values.

Small tensors take as long as what Python does for them. Here that is one operator to pack, the
collective, and at most one to join what came; by ``packing`` 64 KiB between two processes took a
third longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry.box import Box
from .collectives import Peers, start_all_to_all

Slices = tuple[slice, ...]

PLAIN_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
"""Those that every kernel copies and joins."""


@dataclass(frozen=True, slots=True)
class PreparedExchange:
    """What one rank sends and receives, by group rank."""

    peers: Peers
    sends: tuple[Slices, ...]
    """What goes out, in the old local tensor, in the order of the group ranks."""
    copies: int
    """How many times over it goes out: once for each rank where all get the same."""
    send_numels: tuple[int, ...]
    """How much of it is for every group rank."""
    receive_numels: tuple[int, ...]
    receives: tuple[tuple[Slices, tuple[int, ...]], ...]
    """Where what comes goes, in the new local tensor, with its shape."""
    kept: tuple[Slices, Slices] | None
    """What this rank has already: where it was and where it goes. None where it has nothing, or
    sends it to itself."""
    joined: tuple[int, int] | None
    """The dim along which all that comes, and what is kept, follows each other in this order, and
    the place of what is kept among it."""
    lands: bool
    """Whether all that comes lies in memory as it came."""
    sizes: tuple[int, ...]
    """Shape of the new local tensor."""

    @classmethod
    def prepare(
        cls,
        peers: Peers,
        sends: Sequence[Box | None],
        receives: Sequence[Box | None],
        kept: tuple[Box, Box] | None,
        sizes: tuple[int, ...],
    ) -> PreparedExchange:
        """Return the exchange of boxes given by position, of local coordinates."""
        out, into = list(sends), list(receives)
        if kept is not None:
            out[peers.position], into[peers.position] = kept
        ordered = [box for box in peers.by_group_rank(into) if box is not None]
        dim = _joining_dim(ordered, sizes)
        lands = dim is not None and all(size == 1 for size in sizes[:dim])
        if kept is not None and not lands:
            out[peers.position] = into[peers.position] = None
        here = None if kept is None or lands else kept
        outgoing, incoming = peers.by_group_rank(out), peers.by_group_rank(into)
        came = [box for box in incoming if box is not None]
        gone = [box for box in outgoing if box is not None]
        copies = len(gone) if gone and gone.count(gone[0]) == len(gone) else 1
        return cls(
            peers=peers,
            sends=tuple(box.slices for box in (gone[:1] if copies > 1 else gone)),
            copies=copies,
            send_numels=tuple(0 if box is None else box.numel for box in outgoing),
            receive_numels=tuple(0 if box is None else box.numel for box in incoming),
            receives=tuple((box.slices, box.sizes) for box in came),
            kept=None if here is None else (here[0].slices, here[1].slices),
            joined=None if dim is None else (dim, ordered.index(here[1]) if here else -1),
            lands=lands,
            sizes=sizes,
        )

    def start(self, local: Tensor, *, later: bool = False) -> Callable[[], Tensor]:
        """Start the exchange; the result waits for it and returns the new local tensor.

        With ``later`` the old one may be written before the result is called.
        """
        flat = [local[slices].reshape(-1) for slices in self.sends]
        # One element may be contiguous with any stride, which bytes may not have.
        if self.copies > 1:
            sent = flat[0].repeat(self.copies)
        elif len(flat) == 1 and flat[0].stride(0) == 1 and not later:
            sent = flat[0]
        else:
            sent = torch.cat(flat) if flat else local.new_empty(0)
        if self.lands:
            received = local.new_empty(self.sizes)
            into = received.view(-1)
        else:
            received = into = local.new_empty(sum(self.receive_numels))
        kept = None if self.kept is None else local[self.kept[0]]
        if kept is not None and later:
            kept = kept.clone()
        itemsize = local.element_size()
        work = start_all_to_all(
            sent.view(torch.uint8),
            [itemsize * numel for numel in self.send_numels],
            into.view(torch.uint8),
            [itemsize * numel for numel in self.receive_numels],
            self.peers,
            by_group_rank=True,
        )

        def finish() -> Tensor:
            work.wait()
            return received if self.lands else self._joined(kept, received)

        return finish

    def _joined(self, kept: Tensor | None, received: Tensor) -> Tensor:
        parts = received.split([n for n in self.receive_numels if n])
        shaped = [part.view(s) for part, (_, s) in zip(parts, self.receives, strict=True)]
        if self.joined is not None:
            dim, place = self.joined
            if kept is not None:
                shaped.insert(place, kept)
            return torch.cat(shaped, dim)
        made = received.new_empty(self.sizes)
        for part, (slices, _) in zip(shaped, self.receives, strict=True):
            made[slices] = part
        if kept is not None and self.kept is not None:
            made[self.kept[1]] = kept
        return made


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
