"""The one place that all traffic of the library goes through.

Every function takes the ``Peers`` that take part, calls the methods of their group (never the
functional API, which knows only registered groups) and waits. Everything moves as bytes, so every
dtype moves on every backend; what is also added up is in ``reductions``. Works on process groups
and on raw backends alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_private import gather_into
from .groups import ranks_of
from .traffic import BY_THREAD, Collective, asked_now, issue_observed
from .transports import Transport, transport_of

_c10d: Any = dist
"""torch's stubs leave out the option classes and the methods of groups."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of a group in the order of their mesh positions."""

    group: Any
    """A ``torch.distributed.ProcessGroup`` or a raw backend."""
    group_ranks: tuple[int, ...]
    """Group rank of every position."""
    ranks: tuple[int, ...] = ()
    """Global rank of every position, where the mesh knows it; for those who look on."""
    device_type: InitVar[str] = "cpu"
    """Where what they exchange lies."""
    transport: Transport = field(init=False, compare=False, repr=False)

    def __post_init__(self, device_type: str) -> None:
        object.__setattr__(self, "transport", transport_of(self.group, device_type))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.group_ranks)

    @property
    def is_in_order(self) -> bool:
        """Whether positions are group ranks."""
        return self.group_ranks == tuple(range(len(self.group_ranks)))

    @property
    def position(self) -> int:
        """Position of this rank."""
        return self.group_ranks.index(self.group.rank())

    def global_ranks(self) -> tuple[int, ...]:
        """Return the global ranks by group rank; those of the group where nobody knows others."""
        if self.ranks:
            return tuple(self.by_group_rank(self.ranks))
        return tuple(ranks_of(self.group) or range(self.size))

    def by_group_rank(self, values: Sequence[Any]) -> list[Any]:
        """Return values, given by position, in the order of the group ranks."""
        ordered: list[Any] = [None] * len(values)
        for rank, value in zip(self.group_ranks, values, strict=True):
            ordered[rank] = value
        return ordered


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Wait for the result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a collective moves, for those who look on. Bytes are as in ``traffic.Collective``."""

    sent_bytes: int
    received_bytes: int
    reduce_op: str = ""
    agreed: object = ""
    """What must be equal on all ranks for the call to be one collective."""
    sent_to: Sequence[int] = ()
    """Sizes by group rank where they may differ; what a rank sends to itself does not count."""
    received_from: Sequence[int] = ()
    source: int | None = None
    """A group rank that sends and from which the others receive."""


def issue(kind: str, peers: Peers, call: Callable[[], Work], moved: Callable[[], Moved]) -> Work:
    """Issue one collective: every call of a method of a group goes through here.

    ``moved`` is asked only where somebody looks on.
    """
    if not BY_THREAD:
        return call()
    rank: int = peers.group.rank()
    what = moved()
    sent_bytes, received_bytes, agreed = what.sent_bytes, what.received_bytes, str(what.agreed)
    if what.source is not None:
        sent_bytes, received_bytes = (sent_bytes, 0) if rank == what.source else (0, received_bytes)
        agreed = f"{agreed} from group rank {what.source}"
    if what.sent_to:
        sent_bytes -= what.sent_to[rank]
        received_bytes -= what.received_from[rank]
    collective = Collective(
        kind=kind,
        group=peers.group,
        ranks=peers.global_ranks(),
        rank=rank,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        reduce_op=what.reduce_op,
        agreed=agreed,
        sent_to=tuple(what.sent_to),
        received_from=tuple(what.received_from),
        started=time.perf_counter(),
        asked=asked_now(),
    )
    return issue_observed(collective, call)


def start_all_gather(received: Tensor, sent: Tensor, peers: Peers) -> Work:
    """Start to send a flat uint8 buffer to every rank and to receive theirs, by group rank."""
    width = sent.numel()
    others = width * (peers.size - 1)
    return issue(
        "all_gather",
        peers,
        lambda: gather_into(peers.group, received, sent),
        lambda: Moved(sent_bytes=others, received_bytes=others, agreed=width),
    )


def all_gather(local: Tensor, shapes: Sequence[tuple[int, ...]], peers: Peers) -> list[Tensor]:
    """Return every rank's tensor; ``shapes`` are theirs, by position, and may differ."""
    numels = [math.prod(shape) for shape in shapes]
    width = max(numels) * local.element_size()
    if width == 0:
        return [local.new_empty(shape) for shape in shapes]
    send = to_bytes(local)
    if send.numel() < width:
        send = torch.cat([send, send.new_zeros(width - send.numel())])
    received = send.new_empty(width * len(shapes))
    start_all_gather(received, send, peers).wait()
    rows = received.view(len(shapes), width)
    return [
        from_bytes(rows[rank, : n * local.element_size()], local.dtype, shape)
        for rank, n, shape in zip(peers.group_ranks, numels, shapes, strict=True)
    ]


def start_all_to_all(
    sent: Tensor,
    send_bytes: Sequence[int],
    received: Tensor,
    receive_bytes: Sequence[int],
    peers: Peers,
) -> Work:
    """Start to send a part of one buffer to every rank and to receive theirs in parts of another.

    Both are flat and uint8, and their parts lie in the order of the group ranks, as their sizes do.
    Nothing is copied on the way. Every rank must call.
    """
    outgoing, incoming = list(send_bytes), list(receive_bytes)
    return issue(
        "all_to_all",
        peers,
        lambda: peers.group.alltoall_base(received, sent, incoming, outgoing),
        lambda: Moved(
            sent_bytes=sent.numel(),
            received_bytes=received.numel(),
            sent_to=outgoing,
            received_from=incoming,
        ),
    )


Message = tuple[int, Tensor]
"""A group rank, and contiguous memory of a CPU that goes there or comes from there."""


def start_messages(sends: Sequence[Message], receives: Sequence[Message], peers: Peers) -> Work:
    """Start to send memory as it lies to some ranks, and to receive into memory what others send.

    For CPUs. At most one message goes from one rank to another, and none from a rank to itself;
    both ends know its size. Every rank must call, and must wait before it calls again: a message
    that nobody waits for would be taken for the next one.
    """
    sent_to, received_from = [0] * peers.size, [0] * peers.size
    for rank, memory in sends:
        sent_to[rank] = memory.nbytes
    for rank, memory in receives:
        received_from[rank] = memory.nbytes
    group = peers.group

    def call() -> Work:
        # Receives come first: what arrives then goes straight to its place.
        works = [group.recv([_raw(m)], rank, _TAG) for rank, m in receives if m.nbytes]
        works += [group.send([_raw(m)], rank, _TAG) for rank, m in sends if m.nbytes]
        return _Works(works)

    return issue(
        "all_to_all",
        peers,
        call,
        lambda: Moved(
            sent_bytes=sum(sent_to),
            received_bytes=sum(received_from),
            sent_to=sent_to,
            received_from=received_from,
        ),
    )


_TAG = 0x6474
"""Of the library's messages, so that they meet no others of the same group."""


def _raw(memory: Tensor) -> Tensor:
    # One element may count as contiguous with any stride, which bytes may not have.
    return memory.as_strided((memory.numel(),), (1,)).view(torch.uint8)


class _Works:
    """Several messages under way."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()


def broadcast(tensor: Tensor, source: int, peers: Peers) -> Tensor:
    """Return the tensor at position ``source``; all ranks pass one of the same shape and dtype."""
    data = to_bytes(tensor).clone()
    if data.numel():
        root = peers.group_ranks[source]
        issue(
            "broadcast",
            peers,
            lambda: peers.group.broadcast(data, root),
            lambda: Moved(
                sent_bytes=data.numel() * (peers.size - 1),
                received_bytes=data.numel(),
                agreed=data.numel(),
                source=root,
            ),
        ).wait()
    return from_bytes(data, tensor.dtype, tuple(tensor.shape))


def all_gather_ints(values: Sequence[int], peers: Peers, device: torch.device) -> list[list[int]]:
    """Return every rank's integers, as many from each."""
    local = torch.tensor(list(values), dtype=torch.int64, device=device)
    return [part.tolist() for part in all_gather(local, [(len(values),)] * peers.size, peers)]


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as a flat uint8 tensor, a view where ``tensor`` is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # one element may count as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of flat uint8 ``data``, a view where its start is aligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)
