"""Cross entropy of logits of which each rank has some classes, without ever gathering them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Placement, Replicate, Shard
from ..mesh.modes import implicit_replication, is_autocasting
from ..mesh.plain_tensors import may_be_plain
from ..mesh.spec import DTensorSpec, spec_of
from ..tensor.compilers import opaque
from ..tensor.local_parts import kind_of, require_plain
from ..tensor.wrapper import Wrapper
from .class_losses import Given, Losses

Reduction = Literal["mean", "sum", "none"]


@contextmanager
def loss_parallel() -> Generator[None]:
    """Within it, ``F.cross_entropy`` takes logits that are sharded by class, and plain targets.

    The logits are never gathered: maxima, sums and the logits of targets are reduced, one number
    for each of the batch. Plain targets and class weights are taken as equal on all ranks, without
    a comparison. All of ``cross_entropy`` works: class weights, ``label_smoothing``,
    ``ignore_index``, targets that are probabilities; outside of the block, too, where plain
    tensors are compared. The backward pass may be inside or outside of it.

    ``parallel_cross_entropy`` needs fewer collectives, and less memory.
    """
    with implicit_replication():
        yield


@opaque
def parallel_cross_entropy(
    logits: DTensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    dim: int = -1,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> DTensor:
    """Return the cross entropy of ``logits`` against ``target``, as ``F.cross_entropy``.

    ``logits`` has its classes along ``dim`` and lies anyhow. No rank holds more of it than its
    part: two reductions along the axes that shard the classes, of one and of two or three numbers
    for each element of the batch, are all that is sent; the backward pass sends nothing. Between
    them only one number for each element is kept beside the logits. It computes in fp32 where the
    logits have less.

    ``target`` has the shape of ``logits`` without ``dim``, for indices of classes, or that of
    ``logits``, for probabilities; it is a DTensor, or a plain tensor that is whole and the same
    on every rank. So is ``weight``, one number for each class. Elements whose target is
    ``ignore_index`` do not count. An index that is no class makes its loss not-a-number.

    ``label_smoothing`` mixes targets with the uniform distribution. ``z_loss`` times the squared
    log-normaliser is added to the loss of each element; its mean is that over the elements that
    count, whatever their weights [1]_.

    The result is replicated, or with ``reduction="none"`` lies as the batch does. It has the dtype
    of the logits, or within ``torch.autocast`` at least fp32, as losses have there.

    Raises PlacementError for what is no DTensor, for shapes and dtypes that do not go together, and
    for plain tensors that differ between ranks, and on ranks outside of the mesh.

    .. [1] Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, section 5.
    """
    if not isinstance(logits, Wrapper):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlacementError(
            f"parallel_cross_entropy takes logits that are a DTensor, got {kind_of(logits)}; "
            "F.cross_entropy is for plain tensors"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if logits.ndim == 0 or not logits.is_floating_point():
        raise PlacementError(
            f"logits must be floating point of at least one dim, got {logits.spec}"
        )
    if not -logits.ndim <= dim < logits.ndim:
        raise PlacementError(f"dim {dim} is none of logits of shape {list(logits.shape)}")
    dim %= logits.ndim
    if weight is not None and weight.shape != logits.shape[dim : dim + 1]:
        raise PlacementError(
            f"the weight must have one number for each of {logits.shape[dim]} classes, got shape "
            f"{list(weight.shape)}"
        )
    is_soft = _is_soft(target, logits.shape, dim)
    if logits.spec.layout.is_partial:
        logits = logits.redistribute(placements=logits.spec.reduced().placements)
    if logits.spec.layout.orders[dim] is not None:  # classes are told by their first one
        rows = [Shard(dim) if p.is_shard(dim) else p for p in logits.placements]
        logits = logits.redistribute(placements=rows)
    spec = _without(logits.spec, dim)
    dtype = spec.dtype if is_autocasting(logits.device.type) else logits.dtype
    told = _laid_out(target, "target", logits.spec if is_soft else spec)
    given = Given(
        dim=dim,
        classes=logits.shape[dim],
        of_batch=spec,
        weight=None if weight is None else _whole_weight(weight, logits),
        ignore_index=ignore_index,
        smoothing=label_smoothing,
    )
    losses, normalisers = cast("tuple[DTensor, DTensor]", Losses.apply(logits, told, given))
    counts, weights = given.counts(told)
    if z_loss:
        squares = z_loss * normalisers.square() * counts
        if reduction != "mean":
            losses = losses + squares
    if reduction == "none":
        return cast(DTensor, losses.to(dtype))
    sums = [losses.sum()]
    if reduction == "mean":
        sums.append(weights.sum())
        if z_loss:
            sums += [squares.sum(), counts.sum()]  # pyright: ignore[reportPossiblyUnboundVariable]
    whole = cast(DTensor, torch.stack(sums)).redistribute()  # in one collective
    if reduction == "mean":
        whole = whole[0::2] / whole[1::2]
    return cast(DTensor, whole.sum().to(dtype))


def _without(spec: DTensorSpec, dim: int) -> DTensorSpec:
    """Return the spec of one fp32 number (or more) for each element of the batch."""
    placements = tuple(_lowered(placement, dim) for placement in spec.placements)
    shape = (*spec.shape[:dim], *spec.shape[dim + 1 :])
    dtype = torch.promote_types(spec.dtype, torch.float32)
    return spec_of(spec.mesh, placements, shape, None, dtype)


def _lowered(placement: Placement, dim: int) -> Placement:
    if placement.is_shard(dim):
        return Replicate()
    own: int = getattr(placement, "dim", -1)
    return replace(placement, dim=own - 1) if own > dim else placement  # pyright: ignore[reportCallIssue]


def _is_soft(target: Tensor, logits: Sequence[int], dim: int) -> bool:
    """Whether a target has probabilities for logits of a shape; PlacementError for no target."""
    of_batch = (*logits[:dim], *logits[dim + 1 :])
    if target.shape == logits and target.is_floating_point():
        return True
    if target.shape == of_batch and target.dtype == torch.int64:
        return False
    raise PlacementError(
        f"the target must be int64 of shape {list(of_batch)}, or probabilities of shape "
        f"{list(logits)}, for logits of shape {list(logits)}; got "
        f"{str(target.dtype).removeprefix('torch.')} of shape {list(target.shape)}"
    )


def _laid_out(tensor: Tensor, what: str, spec: DTensorSpec) -> Wrapper:
    """Return a tensor as one of the placements of ``spec``; a plain one is whole on every rank."""
    if isinstance(tensor, Wrapper):
        if not tensor.spec.mesh.same_ranks_as(spec.mesh):
            raise PlacementError(
                f"the {what} lies on mesh {tensor.spec.mesh.layout_mesh} and the logits on "
                f"{spec.mesh.layout_mesh}; redistribute it to that one"
            )
        return cast(DTensor, tensor).redistribute(spec.mesh, spec.placements)
    require_plain(f"the {what} of parallel_cross_entropy", tensor)
    if not may_be_plain(tensor, spec.mesh):
        raise PlacementError(
            f"the {what} is a plain tensor that differs between ranks; pass it whole, or as a "
            "DTensor that says how it lies"
        )
    whole = (Replicate(),) * spec.mesh.ndim
    return DTensor.from_local(tensor, spec.mesh, whole).redistribute(placements=spec.placements)


def _whole_weight(weight: Tensor, logits: Wrapper) -> Tensor:
    mesh = logits.spec.mesh
    dtype = torch.promote_types(logits.dtype, torch.float32)
    spec = spec_of(mesh, (Replicate(),) * mesh.ndim, weight.shape, None, weight.dtype)
    return _laid_out(weight.detach(), "weight", spec).local.to(dtype)
