"""``context_parallel``: a model of plain tensors whose sequence the ranks share within a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtckpt.errors import PlacementError, UnsupportedOp

from ..geometry.placement import HeadTail
from ..mesh.device_mesh import DeviceMesh
from ..mesh.modes import attending_by, shared_attention
from ..mesh.resolving import AnyMesh, resolve_mesh
from ..tensor.compilers import opaque
from ..tensor.local_parts import kind_of
from .rotation import rotate_method_of
from .shared import TORCHS, SharedSequence


@contextmanager
def context_parallel(
    mesh: AnyMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
) -> Generator[None]:
    """Within it each rank has a part of the sequence, and attention sees all of it.

    ``mesh`` has one axis, as ``mesh["cp"]``. ``buffers`` are plain tensors with the sequence along
    the dims ``buffer_seq_dims``, whole and the same on every rank: inputs, labels, positions. Each
    becomes this rank's part, in place, as ``HeadTail`` cuts it, of any length. At the end, also
    after an exception, it is what it was, with what was written to it lost, unless it is among
    ``no_restore_buffers``, whose whole is let go.

    ``scaled_dot_product_attention`` of plain tensors takes their sequence as shared then, of a
    length that a buffer has, or of any where there are no buffers. The ranks tell each other at
    every call what they have, and raise PlacementError alike; but for GPUs, which would have to be
    waited for, where each goes by its own part of the buffers, if there are any.
    So does that of DTensors on other meshes, as of tensor parallelism, whose heads or batch are
    sharded there; DTensors with the sequence sharded along ``mesh`` are
    ``context_parallel_attention``. In this thread it goes by whatever name; where activation
    checkpointing runs a forward pass again, by that in ``torch.nn.functional``. How keys go round
    is what ``set_rotate_method`` has set. An ``attn_mask`` and dropout are ``UnsupportedOp``, and
    so are weights that ``MultiheadAttention`` is to return. Run the backward pass within the block:
    tensors that are restored count as written.

    Raises, before anything changes, TypeError for what is no plain tensor, Parameters among them;
    ValueError where buffers and dims are not as many, for a buffer that is given twice, requires
    grad, or is to be kept without being one; PlacementError for a mesh of several axes, a dim that
    a buffer does not have, and lengths that ranks could not tell apart by their parts.

    >>> from dtckpt.dtensor import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> tokens = torch.arange(6)
    >>> with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0]):
    ...     print(tokens.tolist())
    [0, 1, 2, 3, 4, 5]
    """
    ours = one_axis(mesh)
    kept = {id(tensor) for tensor in no_restore_buffers or ()}
    given = _checked(buffers, buffer_seq_dims, kept)
    placement = HeadTail(0)
    lengths = _lengths(given, placement, ours)
    sequence = SharedSequence(ours, placement, lengths, rotate_method_of(None))
    wholes: list[tuple[Tensor, Tensor]] = []
    parts = [_part_of(buffer, dim, ours) for buffer, dim in given]
    try:
        for (buffer, _), part in zip(given, parts, strict=True):
            if id(buffer) not in kept:
                wholes.append((buffer, buffer.detach()))
            _put(buffer, part)
        parts.clear()
        with attending_by(sequence.attend), _in_backward_passes(), _Routed():
            yield
    finally:
        for buffer, whole in wholes:
            _put(buffer, whole)


def one_axis(mesh: AnyMesh) -> DeviceMesh:
    """Return a mesh of ours with one axis, which this rank is in; PlacementError for another."""
    ours = resolve_mesh(mesh)
    if ours.ndim != 1:
        names = ", ".join(map(repr, ours.layout_mesh.axis_names))
        raise PlacementError(
            f"context_parallel takes a mesh of one axis, got {ours.layout_mesh}; pass a slice by "
            f"name, one of {names}"
        )
    if ours.get_coordinate() is None:
        raise PlacementError(
            f"context_parallel: rank {ours.get_rank()} is not in mesh {ours.layout_mesh}"
        )
    return ours


def buffers_by_dim(
    buffers: Sequence[Tensor], dims: Sequence[int], names: str
) -> list[tuple[Tensor, int]]:
    """Return plain tensors with dims of theirs, counted from the first."""
    if len(buffers) != len(dims):
        raise ValueError(
            f"{names}: {len(buffers)} buffers and {len(dims)} dims; give one dim for each"
        )
    found: list[tuple[Tensor, int]] = []
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if type(buffer) is not Tensor:
            raise TypeError(
                f"{names}: buffer {number} is {kind_of(buffer)}, expected a plain torch.Tensor; "
                "parameters are the same on every rank, and are no part of a sequence"
            )
        if not -buffer.ndim <= dim < buffer.ndim:
            raise PlacementError(
                f"{names}: buffer {number} of shape {tuple(buffer.shape)} has no dim {dim}"
            )
        found.append((buffer, dim % buffer.ndim))
    return found


def _checked(
    buffers: Sequence[Tensor] | None,
    dims: Sequence[int] | None,
    kept: set[int],
) -> list[tuple[Tensor, int]]:
    found = buffers_by_dim(list(buffers or ()), list(dims or ()), "context_parallel")
    known = {id(buffer) for buffer, _ in found}
    if len(known) != len(found):
        raise ValueError("context_parallel: a buffer is given twice; give each once")
    for number, (buffer, _) in enumerate(found):
        if buffer.requires_grad:
            raise ValueError(
                f"context_parallel: buffer {number} requires grad and cannot become a part of "
                "itself; pass a tensor that does not, or shard it as a DTensor with HeadTail"
            )
    if not kept <= known:
        raise ValueError("context_parallel: no_restore_buffers must be among the buffers")
    return found


def _lengths(
    buffers: Sequence[tuple[Tensor, int]], placement: HeadTail, mesh: DeviceMesh
) -> tuple[int, ...]:
    """Return the lengths of buffers; PlacementError for two that have parts of one size."""
    lengths = tuple(sorted({buffer.shape[dim] for buffer, dim in buffers}))
    sizes = [placement.sizes_over(length, mesh.size()) for length in lengths]
    for i, several in enumerate(sizes):
        for j, others in enumerate(sizes[:i]):
            if any(a == b for a, b in zip(several, others, strict=True)):
                raise PlacementError(
                    f"context_parallel: sequences of {lengths[j]} and {lengths[i]} have parts of "
                    f"one size on some of {mesh.size()} ranks, which could not tell them apart; "
                    "make them one length, or multiples of the number of ranks"
                )
    return lengths


def _part_of(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return a copy of this rank's part of a tensor that all have whole."""
    ranges = HeadTail(dim).ranges_over(tensor.shape[dim], mesh.size())[mesh.get_local_rank()]
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return torch.cat([tensor.narrow(dim, start, size) for start, size in ranges], dim)


def _put(buffer: Tensor, values: Tensor) -> None:
    """Make a tensor hold other values, of another shape, in memory of their own.

    Autograd then knows that what it has noted of the tensor is no longer there.
    """
    buffer.data = values
    if not buffer.is_inference():
        torch.autograd.graph.increment_version(buffer)


class _Routed(TorchFunctionMode):
    """Sends calls of torch's attention in this thread to what stands for it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is TORCHS:
            return _attended(args, given)
        if func is F.multi_head_attention_forward and given.get("need_weights", True):
            raise UnsupportedOp(
                "attention within context_parallel has no weights to return, of which no rank has "
                "a row; call MultiheadAttention with need_weights=False"
            )
        return func(*args, **given)


@opaque
def _attended(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attention = shared_attention()
    return (attention or TORCHS)(*args, **kwargs)


@opaque
def _in_any_thread(*args: Any, **kwargs: Any) -> Any:
    """Stand for ``F.scaled_dot_product_attention`` in all threads while any is in a block."""
    return _attended(args, kwargs)


_before: list[Any] = []
"""What stood under the name in ``torch.nn.functional``, once for each block that is entered."""
_lock = threading.Lock()


@contextmanager
def _in_backward_passes() -> Generator[None]:
    """Within it, calls by the name in ``torch.nn.functional`` find what stands for attention.

    Function modes end where a backward pass begins, in which activation checkpointing may run
    forward passes again; on accelerators that is in other threads.
    """
    with _lock:
        _before.append(_before[0] if _before else F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = _in_any_thread
    try:
        yield
    finally:
        with _lock:
            found = _before.pop()
            if not _before:
                F.scaled_dot_product_attention = found
