"""Collectives that also reduce, in any dtype, alike on all ranks, not-a-number kept.

Few bytes go to everyone as terms, which each rank reduces itself; more are left to the backend, in
a dtype that it reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtckpt.errors import PlacementError

from ..torch_private import scatter_reduced
from .collectives import Moved, Peers, Work, issue
from .message_parts import JOINABLE, ViewPart, joinable
from .packing import Messages, start_packed
from .traffic import counted_as

_c10d: Any = dist
"""torch's stubs leave out the option classes."""

_TOP_BIT = -(2**63)

_BACKEND_DTYPES = JOINABLE - {torch.int16, torch.bool}


def all_reduce(local: Tensor, reduce_op: str, peers: Peers) -> Tensor:
    """Return the element-wise reduction of all ranks' tensors; ``local`` stays as it is.

    Not-a-number spreads, as it does on one device.
    """
    return start_all_reduce(local, reduce_op, peers)()


@counted_as("all_reduce")
def start_all_reduce(
    local: Tensor,
    reduce_op: str,
    peers: Peers,
    few_bytes: int | None = None,
    *,
    is_own: bool = False,
) -> Callable[[], Tensor]:
    """Start an ``all_reduce``; the result waits for it and returns it.

    ``few_bytes`` is as of the cost model; None for that of the backend. ``is_own`` says that
    ``local``, which is contiguous then, may be written.
    """
    dtype = local.dtype
    require_reducible(dtype, reduce_op)
    if local.is_meta:
        return lambda: torch.empty_like(local)
    if few_bytes is None:
        few_bytes = peers.transport.costs.few_bytes
    if _sends_terms(local.nbytes, dtype, reduce_op, peers.size, few_bytes):
        return _start_terms([local] * peers.size, reduce_op, peers)
    wide = _to_wire(local, reduce_op)
    if not is_own:
        wide = wide.clone(memory_format=torch.contiguous_format)
    divides_first = _divides_first(wide.dtype, reduce_op)
    if divides_first:
        wide.div_(peers.size)
    if wide.numel() == 0:
        return lambda: _from_wire(wide, dtype, reduce_op)
    nowhere = works = None
    if _may_lose_nan(dtype, reduce_op):
        nowhere = wide.isnan().to(torch.uint8)
        works = _start_all_reduce(nowhere, "max", peers)
    work = _start_all_reduce(wide, _wire_op(dtype, reduce_op), peers)

    def finish() -> Tensor:
        if works is not None:
            works.wait()
        work.wait()
        if nowhere is not None:
            wide.masked_fill_(nowhere.bool(), float("nan"))
        if reduce_op == "avg" and not divides_first:
            wide.div_(peers.size)
        return _from_wire(wide, dtype, reduce_op)

    return finish


def _sends_terms(
    num_bytes: int, dtype: torch.dtype, reduce_op: str, size: int, few_bytes: int
) -> bool:
    """Whether every rank gets the terms of all others, and reduces them itself."""
    lacking = dtype.is_complex and reduce_op == "product"  # backends do not have it
    return lacking or num_bytes * (size - 1) <= few_bytes


def all_reduced_bytes(
    numel: int, dtype: torch.dtype, reduce_op: str, size: int, few_bytes: int
) -> tuple[int, int]:
    """Return what a rank sends and receives in an ``all_reduce``, and what its buffers take."""
    num_bytes = numel * dtype.itemsize
    if _sends_terms(num_bytes, dtype, reduce_op, size, few_bytes):
        return num_bytes * (size - 1), 2 * num_bytes * size
    wire = _wire_dtype(dtype)
    flags = numel if _may_lose_nan(dtype, reduce_op) else 0
    moved = [2 * part * (size - 1) // size for part in (numel * wire.itemsize, flags)]
    return sum(moved), flags + (0 if wire == dtype else numel * wire.itemsize)


def _start_all_reduce(tensor: Tensor, wire_op: str, peers: Peers) -> Work:
    options = _c10d.AllreduceOptions()
    options.reduceOp = _BACKEND_OPS[wire_op]
    size = peers.size
    moved = 2 * tensor.nbytes * (size - 1) // size
    return issue(
        "all_reduce",
        peers,
        lambda: peers.group.allreduce([tensor], options),
        lambda: Moved(
            sent_bytes=moved,
            received_bytes=moved,
            reduce_op=wire_op,
            agreed=(tensor.nbytes, tensor.dtype),
        ),
    )


def reduce_scatter(terms: Sequence[Tensor], reduce_op: str, peers: Peers) -> Tensor:
    """Return the reduction of what all ranks hold for this one.

    ``terms`` are this rank's, by destination; their shapes may differ between destinations.
    """
    return start_reduce_scatter(terms, reduce_op, peers)()


@counted_as("reduce_scatter")
def start_reduce_scatter(
    terms: Sequence[Tensor], reduce_op: str, peers: Peers, *, later: bool = False
) -> Callable[[], Tensor]:
    """Start a ``reduce_scatter``; the result waits for it and returns it.

    Equal sizes use the backend's collective, but for those whose own is slower than the other way:
    each rank receives its terms and reduces them itself. That moves the same bytes, needs no
    padding and keeps not-a-number. With ``later`` the result may be called after other
    collectives, or never.
    """
    mine = terms[peers.position]
    dtype = mine.dtype
    require_reducible(dtype, reduce_op)
    even = len({term.numel() for term in terms}) == 1 and mine.numel() > 0
    lacking = dtype.is_complex and reduce_op == "product"
    transport = peers.transport
    if not even or lacking or transport.exchanges_terms or _may_lose_nan(dtype, reduce_op):
        # All ranks hold terms of the same elements, and so agree on how many bytes those are.
        most_bytes = sum(term.nbytes for term in terms)
        if transport.costs.is_direct(most_bytes) and not later:
            return _start_terms_directly(terms, reduce_op, peers, most_bytes)
        return _start_terms(terms, reduce_op, peers)
    flat = peers.by_group_rank([_to_wire(term.reshape(-1), reduce_op) for term in terms])
    divides_first = _divides_first(flat[0].dtype, reduce_op)
    may_be_written = divides_first or later
    send = None if may_be_written else _in_one_stretch(flat)
    if send is None:
        send = torch.cat(flat)
    if divides_first:
        send.div_(peers.size)
    reduced = torch.empty(mine.numel(), dtype=send.dtype, device=mine.device)
    options = _c10d.ReduceScatterOptions()
    wire_op = _wire_op(dtype, reduce_op)
    options.reduceOp = _BACKEND_OPS[wire_op]
    others = (peers.size - 1) * reduced.nbytes
    work = issue(
        "reduce_scatter",
        peers,
        lambda: scatter_reduced(peers.group, reduced, send, options),
        lambda: Moved(
            sent_bytes=others,
            received_bytes=others,
            reduce_op=wire_op,
            agreed=(reduced.nbytes, send.dtype),
        ),
    )

    def finish() -> Tensor:
        work.wait()
        if reduce_op == "avg" and not divides_first:
            reduced.div_(peers.size)
        return _from_wire(reduced, dtype, reduce_op).view(mine.shape)

    return finish


def _in_one_stretch(terms: Sequence[Tensor]) -> Tensor | None:
    """Return flat tensors as one, where they follow each other in memory."""
    first = terms[0]
    at = first.storage_offset()
    for term in terms:
        follows = term.storage_offset() == at and term.stride(0) == 1
        if not follows or term.untyped_storage() is not first.untyped_storage():
            return None
        at += term.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))


def _start_terms(terms: Sequence[Tensor], reduce_op: str, peers: Peers) -> Callable[[], Tensor]:
    """Start to send every rank its term, by position; the result reduces those of this one.

    All ranks reduce in the order of the group ranks, so that equal terms have equal results.
    """
    mine = terms[peers.position]
    size, shape, dtype = peers.size, mine.shape, mine.dtype
    given: list[Tensor] = peers.by_group_rank(terms)
    ordered = [joinable(term.resolve_conj().resolve_neg()) for term in given]
    numels = [term.numel() for term in ordered]
    received, work = start_packed(ordered, ordered[0], numels, [mine.numel()] * size, peers)

    def finish() -> Tensor:
        work.wait()
        return reduce_locally(received.view(dtype).view(size, *shape), reduce_op)

    return finish


def _start_terms_directly(
    terms: Sequence[Tensor], reduce_op: str, peers: Peers, most_bytes: int
) -> Callable[[], Tensor]:
    """Do the same by messages from rank to rank, each term right to its place."""
    here, mine = peers.group_ranks[peers.position], terms[peers.position]
    received = mine.new_empty((peers.size, *mine.shape))
    received[here].copy_(mine)
    sends = [[ViewPart(term)] for term in peers.by_group_rank(terms)]
    receives = [[ViewPart(row)] for row in received]
    sends[here], receives[here] = [], []
    messages = Messages(sends, receives, peers, mine.device)
    wait = messages.start(most_bytes, peers.transport.costs, in_rows=True)

    def finish() -> Tensor:
        wait()
        return reduce_locally(received, reduce_op)

    return finish


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
    "product": _c10d.ReduceOp.PRODUCT,
    "max": _c10d.ReduceOp.MAX,
    "min": _c10d.ReduceOp.MIN,
}


def _wire_op(dtype: torch.dtype, reduce_op: str) -> str:
    """Return what the backend does to what travels."""
    if dtype == torch.bool:  # it travels as uint8, where a sum of ones would no longer be a bool
        return {"sum": "max", "product": "min"}.get(reduce_op, reduce_op)
    return "sum" if reduce_op == "avg" else reduce_op


def _divides_first(dtype: torch.dtype, reduce_op: str) -> bool:
    """Whether a sum could leave the range of a dtype although the average does not."""
    return reduce_op == "avg" and dtype == torch.float16


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


def require_reducible(dtype: torch.dtype, reduce_op: str) -> None:
    """Raise PlacementError for a reduction that has no meaning for a dtype."""
    fractional = dtype.is_floating_point or dtype.is_complex
    if reduce_op == "avg" and not fractional:
        raise PlacementError(f"Partial('avg') needs a floating point dtype, got {dtype}")
    if reduce_op in ("max", "min") and dtype.is_complex:
        raise PlacementError(f"Partial({reduce_op!r}) has no meaning for {dtype}")
