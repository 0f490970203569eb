"""The one place that all traffic of the library goes through.

Every function takes the ``Peers`` that take part, calls the methods of their group (never the
functional API, which knows only registered groups) and waits. Whatever is not reduced moves as
bytes, so every dtype moves on every backend. Works on process groups and on raw backends alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtckpt.errors import PlacementError

_c10d: Any = dist
"""torch's stubs leave out the option classes and the methods of groups."""

_TOP_BIT = -(2**63)

_BACKEND_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.complex64,
        torch.complex128,
    }
)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of a group in the order of their mesh positions."""

    group: Any
    """A ``torch.distributed.ProcessGroup`` or a raw backend."""
    group_ranks: tuple[int, ...]
    """Group rank of every position."""

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

    def by_group_rank(self, values: Sequence[Any]) -> list[Any]:
        """Return values, given by position, in the order of the group ranks."""
        ordered: list[Any] = [None] * len(values)
        for rank, value in zip(self.group_ranks, values, strict=True):
            ordered[rank] = value
        return ordered


def all_gather_even(local: Tensor, peers: Peers) -> Tensor:
    """Return every rank's tensor, all of one shape, stacked by group rank."""
    shape = (len(peers.group_ranks), *local.shape)
    send = to_bytes(local)
    received = send.new_empty(send.numel() * shape[0])
    if send.numel():
        peers.group._allgather_base(received, send).wait()
    return received.view(local.dtype).view(shape)


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
    peers.group._allgather_base(received, send).wait()
    rows = received.view(len(shapes), width)
    return [
        from_bytes(rows[rank, : n * local.element_size()], local.dtype, shape)
        for rank, n, shape in zip(peers.group_ranks, numels, shapes, strict=True)
    ]


def all_to_all(
    sends: Sequence[Tensor | None], receive_bytes: Sequence[int], peers: Peers, device: torch.device
) -> list[Tensor]:
    """Send one tensor (or nothing) to every rank; return the bytes that came from each.

    Everything is by position; ``receive_bytes`` says how much comes. Every rank must call.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    parts = peers.by_group_rank([empty if t is None else to_bytes(t) for t in sends])
    incoming = peers.by_group_rank(receive_bytes)
    outgoing = [part.numel() for part in parts]
    received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
    peers.group.alltoall_base(received, torch.cat(parts), incoming, outgoing).wait()
    by_rank = torch.split(received, incoming)
    return [by_rank[rank] for rank in peers.group_ranks]


def all_to_all_packed(
    sent: Tensor,
    send_bytes: Sequence[int],
    received: Tensor,
    receive_bytes: Sequence[int],
    peers: Peers,
) -> None:
    """Send a part of one buffer to every rank and receive theirs in parts of another one.

    Both are flat and uint8, and their parts lie in the order of the group ranks; the sizes are by
    position. Nothing is copied on the way. Every rank must call.
    """
    outgoing, incoming = peers.by_group_rank(send_bytes), peers.by_group_rank(receive_bytes)
    peers.group.alltoall_base(received, sent, incoming, outgoing).wait()


def all_reduce(local: Tensor, reduce_op: str, peers: Peers) -> Tensor:
    """Return the element-wise reduction of all ranks' tensors; ``local`` stays as it is.

    Not-a-number spreads, as it does on one device.
    """
    dtype = local.dtype
    _require_reducible(dtype, reduce_op)
    if dtype.is_complex and reduce_op == "product":  # which backends do not have
        parts = all_gather(local, [tuple(local.shape)] * peers.size, peers)
        return reduce_locally(torch.stack(parts), reduce_op)
    wide = _to_wire(local, reduce_op).clone(memory_format=torch.contiguous_format)
    if wide.numel():
        nowhere = None
        if _may_lose_nan(dtype, reduce_op):
            nowhere = wide.isnan().to(torch.uint8)
            _run_all_reduce(nowhere, _BACKEND_OPS["max"], peers)
        _run_all_reduce(wide, _backend_op(dtype, reduce_op), peers)
        if nowhere is not None:
            wide.masked_fill_(nowhere.bool(), float("nan"))
    if reduce_op == "avg":
        wide /= peers.size
    return _from_wire(wide, dtype, reduce_op)


def _run_all_reduce(tensor: Tensor, backend_op: Any, peers: Peers) -> None:
    options = _c10d.AllreduceOptions()
    options.reduceOp = backend_op
    peers.group.allreduce([tensor], options).wait()


def reduce_scatter(pieces: Sequence[Tensor], reduce_op: str, peers: Peers) -> Tensor:
    """Return the reduction of what all ranks hold for this one.

    ``pieces`` are this rank's terms by destination; their shapes may differ between destinations.
    Equal sizes use the backend's collective. Otherwise, and for maxima and minima of floating
    point numbers, each rank receives its terms and reduces them itself, which moves the same
    bytes, needs no padding and keeps not-a-number.
    """
    mine = pieces[peers.position]
    _require_reducible(mine.dtype, reduce_op)
    even = len({piece.numel() for piece in pieces}) == 1
    lacking = mine.dtype.is_complex and reduce_op == "product"
    if even and mine.numel() and not lacking and not _may_lose_nan(mine.dtype, reduce_op):
        flat = [_to_wire(piece.reshape(-1), reduce_op) for piece in pieces]
        wire = flat[0].dtype
        send = torch.cat(peers.by_group_rank(flat))
        reduced = torch.empty(mine.numel(), dtype=wire, device=mine.device)
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = _backend_op(mine.dtype, reduce_op)
        peers.group._reduce_scatter_base(reduced, send, options).wait()
        if reduce_op == "avg":
            reduced /= peers.size
        return _from_wire(reduced, mine.dtype, reduce_op).view(mine.shape)
    size = mine.numel() * mine.element_size()
    terms = all_to_all(pieces, [size] * len(pieces), peers, mine.device)
    stacked = torch.stack([from_bytes(term, mine.dtype, tuple(mine.shape)) for term in terms])
    return reduce_locally(stacked, reduce_op)


def broadcast(tensor: Tensor, source: int, peers: Peers) -> Tensor:
    """Return the tensor at position ``source``; all ranks pass one of the same shape and dtype."""
    data = to_bytes(tensor).clone()
    if data.numel():
        peers.group.broadcast(data, peers.group_ranks[source]).wait()
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


def reduce_locally(stacked: Tensor, reduce_op: str) -> Tensor:
    """Return the reduction over dim 0 in the dtype of ``stacked``."""
    wide = _to_wire(stacked, reduce_op)
    reduced = _LOCAL_REDUCTIONS[reduce_op](wide.to(_accumulator(wide.dtype)))
    return _from_wire(reduced.to(wide.dtype), stacked.dtype, reduce_op)


def _mean(stacked: Tensor) -> Tensor:
    return stacked.sum(0) / stacked.shape[0]


_LOCAL_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": _mean,
    "product": lambda stacked: stacked.prod(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}

_BACKEND_OPS = {
    "sum": _c10d.ReduceOp.SUM,
    "avg": _c10d.ReduceOp.SUM,
    "product": _c10d.ReduceOp.PRODUCT,
    "max": _c10d.ReduceOp.MAX,
    "min": _c10d.ReduceOp.MIN,
}


def _backend_op(dtype: torch.dtype, reduce_op: str) -> Any:
    if dtype == torch.bool:  # it travels as uint8, where a sum of ones would no longer be a bool
        reduce_op = {"sum": "max", "product": "min"}.get(reduce_op, reduce_op)
    return _BACKEND_OPS[reduce_op]


def _may_lose_nan(dtype: torch.dtype, reduce_op: str) -> bool:
    """Whether a backend's comparison may drop not-a-number."""
    return reduce_op in ("max", "min") and dtype.is_floating_point


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in _BACKEND_DTYPES:
        return dtype
    if dtype == torch.bool:
        return torch.uint8
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else torch.int64


def _to_wire(tensor: Tensor, reduce_op: str) -> Tensor:
    """Return the values in a dtype that backends and kernels reduce.

    Unsigned 64-bit integers travel as signed ones: sums and products are the same modulo 2**64, and
    with the top bit flipped so is the order.
    """
    if tensor.dtype == torch.uint64:
        signed = tensor.view(torch.int64)
        return signed ^ _TOP_BIT if reduce_op in ("max", "min") else signed
    wire = _wire_dtype(tensor.dtype)
    return tensor if wire == tensor.dtype else tensor.to(wire)


def _from_wire(tensor: Tensor, dtype: torch.dtype, reduce_op: str) -> Tensor:
    if dtype == torch.uint64:
        signed = tensor ^ _TOP_BIT if reduce_op in ("max", "min") else tensor
        return signed.view(torch.uint64)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    low_precision = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if low_precision else dtype


def _require_reducible(dtype: torch.dtype, reduce_op: str) -> None:
    fractional = dtype.is_floating_point or dtype.is_complex
    if reduce_op == "avg" and not fractional:
        raise PlacementError(f"Partial('avg') needs a floating point dtype, got {dtype}")
    if reduce_op in ("max", "min") and dtype.is_complex:
        raise PlacementError(f"Partial({reduce_op!r}) has no meaning for {dtype}")
