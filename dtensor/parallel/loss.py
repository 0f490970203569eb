"""Cross entropy of logits of which each rank has some classes, without ever gathering them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Partial, Placement, Replicate, Shard
from ..mesh.modes import implicit_replication
from ..mesh.plain_tensors import may_be_plain
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_local
from ..tensor.autograd import distributed
from ..tensor.compilers import opaque
from ..tensor.local_parts import kind_of, require_plain
from ..tensor.wrapper import Wrapper

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

    The result is replicated, or with ``reduction="none"`` lies as the batch does.

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
    if logits.spec.layout.is_partial:
        logits = logits.redistribute(placements=logits.spec.reduced().placements)
    if logits.spec.layout.orders[dim] is not None:  # classes are told by their first one
        rows = [Shard(dim) if p.is_shard(dim) else p for p in logits.placements]
        logits = logits.redistribute(placements=rows)
    spec = _without(logits.spec, dim)
    told = _target_of(target, logits, spec)
    given = _Given(
        dim=dim,
        classes=logits.shape[dim],
        of_batch=spec,
        weight=None if weight is None else _whole_weight(weight, logits),
        ignore_index=ignore_index,
        smoothing=label_smoothing,
    )
    losses, normalisers = cast("tuple[DTensor, DTensor]", _Losses.apply(logits, told, given))
    counts, weights = given.counts(told)
    if z_loss:
        squares = z_loss * normalisers.square() * counts
        if reduction != "mean":
            losses = losses + squares
    if reduction == "none":
        return cast(DTensor, losses.to(logits.dtype))
    sums = [losses.sum()]
    if reduction == "mean":
        sums.append(weights.sum())
        if z_loss:
            sums += [squares.sum(), counts.sum()]  # pyright: ignore[reportPossiblyUnboundVariable]
    whole = cast(DTensor, torch.stack(sums)).redistribute()  # in one collective
    if reduction == "mean":
        whole = whole[0::2] / whole[1::2]
    return cast(DTensor, whole.sum().to(logits.dtype))


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


def _target_of(target: Tensor, logits: Wrapper, of_batch: DTensorSpec) -> Wrapper:
    """Return the target as a DTensor that lies as the batch, or with probabilities as the logits.

    Raises PlacementError where it is neither.
    """
    is_soft = target.shape == logits.shape and target.is_floating_point()
    if not is_soft and (target.shape != of_batch.shape or target.dtype != torch.int64):
        raise PlacementError(
            f"the target must be int64 of shape {list(of_batch.shape)}, or probabilities of shape "
            f"{list(logits.shape)}, for logits of shape {list(logits.shape)}; got "
            f"{str(target.dtype).removeprefix('torch.')} of shape {list(target.shape)}"
        )
    spec = logits.spec if is_soft else of_batch
    return _laid_out(target, "target", spec)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What the loss is of, beside logits and target."""

    dim: int
    classes: int
    of_batch: DTensorSpec
    weight: Tensor | None
    """Of all classes, on every rank."""
    ignore_index: int
    smoothing: float

    def counts(self, target: Wrapper) -> tuple[DTensor, DTensor]:
        """Return whether each element counts, and its weight, as numbers."""
        index = None if target.is_floating_point() else target.local
        dtype, shape = self.of_batch.dtype, self.of_batch.local_shape
        if index is None:
            counts = weights = torch.ones(shape, dtype=dtype, device=target.local.device)
        else:
            counts = (index != self.ignore_index).to(dtype)
            weights = counts * self.weight_of(index)
        return DTensor(counts, self.of_batch), DTensor(weights, self.of_batch)

    def weight_of(self, index: Tensor) -> Tensor | float:
        """Return the weight of each target."""
        if self.weight is None:
            return 1.0
        return self.weight[index.clamp(0, self.classes - 1)]

    def mixed(self, target: Tensor, first: int) -> Tensor:
        """Return what the logits of this rank's classes count: probabilities, smoothed, weighed.

        ``target`` has the classes last, from the class ``first`` on.
        """
        probabilities = target.to(self.of_batch.dtype)
        if self.smoothing:
            probabilities = probabilities * (1 - self.smoothing) + self.smooth
        return probabilities if self.weight is None else probabilities * self.own(target, first)

    @property
    def smooth(self) -> float:
        """The probability that smoothing gives each class."""
        return self.smoothing / self.classes

    def weights(self) -> Tensor | float:
        """Return the sum of the weights of all classes."""
        return self.classes if self.weight is None else self.weight.sum()

    def reduced(self, terms: Tensor, op: str, logits: DTensorSpec) -> Tensor:
        """Return numbers of the batch, perhaps several of each, reduced over the classes."""
        batch = self.of_batch
        several = terms.ndim - batch.ndim
        placements = [
            Partial(op) if own.is_shard(self.dim) else _raised(placement, several)
            for own, placement in zip(logits.placements, batch.placements, strict=True)
        ]
        shape = (*terms.shape[:several], *batch.shape)
        spec = spec_of(batch.mesh, placements, shape, None, terms.dtype)
        return redistribute_local(terms, spec, spec.reduced())

    def gradient(self, grad: Tensor | None, like: Tensor) -> Tensor:
        """Return the local gradient of numbers of the batch; zeros for none."""
        if grad is None:
            return torch.zeros_like(like)
        given = distributed(grad, DTensor, self.of_batch)
        return redistribute_local(given.local, given.spec, self.of_batch)

    def own(self, local: Tensor, first: int) -> Tensor:
        """Return the weights of this rank's classes; ones where none were given."""
        count = local.shape[-1]
        if self.weight is None:
            return torch.ones(count, dtype=self.of_batch.dtype, device=local.device)
        return self.weight[first : first + count]


class _Losses(torch.autograd.Function):
    """The loss of each element, before it counts for anything, and its log-normaliser."""

    @staticmethod
    def forward(
        ctx: Any, logits: Wrapper, target: Wrapper, given: _Given
    ) -> tuple[DTensor, DTensor]:
        """Reduce a maximum, then sums; beside the logits there is one more tensor of their size."""
        spec, told = logits.spec, target.local
        first = spec.own_box().offsets[given.dim]
        x = logits.local.movedim(given.dim, -1).to(given.of_batch.dtype)
        top = given.reduced(_top(x), "max", spec)
        shifted = x - top.unsqueeze(-1)
        if target.is_floating_point():
            mixed = given.mixed(told.movedim(given.dim, -1), first)
            terms = [_dot(mixed, shifted), mixed.sum(-1)]
        else:
            terms = [_picked(shifted, told - first)]
            if given.smoothing:
                terms.append(_dot(given.own(x, first), shifted))
        terms.append(shifted.exp_().sum(-1))
        dot, *more, total = given.reduced(torch.stack(terms), "sum", spec).unbind()
        log = total.log()
        if target.is_floating_point():
            losses = log * more[0] - dot
        else:
            losses = (1 - given.smoothing) * given.weight_of(told) * (log - dot)
            if given.smoothing:
                losses = losses + given.smooth * (log * given.weights() - more[0])
            ignored = told == given.ignore_index
            is_class = (told >= 0) & (told < given.classes) | ignored
            losses = torch.where(is_class, losses.masked_fill(ignored, 0.0), torch.nan)
        normalisers = top + log
        ctx.spec, ctx.of_target, ctx.given, ctx.first = spec, target.spec, given, first
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits.local, told, normalisers, *more)
        return DTensor(losses, given.of_batch), DTensor(normalisers, given.of_batch)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Any
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of this rank's logits, and of its probabilities if asked for."""
        local, told, normalisers, *more = ctx.saved_tensors
        given: _Given = ctx.given
        of_loss, of_normaliser = (given.gradient(grad, normalisers) for grad in grads)
        slopes = local.movedim(given.dim, -1) - normalisers.unsqueeze(-1)
        of_target = None
        if not ctx.of_target.dtype.is_floating_point:
            counts = of_loss.masked_fill(told == given.ignore_index, 0.0)
            chosen = counts * (1 - given.smoothing) * given.weight_of(told)
            share = chosen + counts * given.smooth * given.weights()
            slopes.exp_().mul_((share + of_normaliser).unsqueeze(-1))
            if given.smoothing:
                slopes.sub_((counts * given.smooth).unsqueeze(-1) * given.own(slopes, ctx.first))
            _add_picked(slopes, told - ctx.first, -chosen)
        else:
            of_loss = of_loss.unsqueeze(-1)
            if ctx.needs_input_grad[1]:
                scale = given.own(slopes, ctx.first) * (given.smoothing - 1)
                slope = (slopes * scale * of_loss).movedim(-1, given.dim)
                of_target = DTensor(slope.to(told.dtype).contiguous(), ctx.of_target)
            share = of_loss * more[0].unsqueeze(-1) + of_normaliser.unsqueeze(-1)
            mixed = given.mixed(told.movedim(given.dim, -1), ctx.first)
            slopes.exp_().mul_(share).sub_(mixed * of_loss)
        made = slopes.to(local.dtype).movedim(-1, given.dim).contiguous()
        return DTensor(made, ctx.spec), of_target, None


def _top(x: Tensor) -> Tensor:
    """Return the largest logit of each element, of no classes the least of all numbers."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -torch.inf)
    return x.amax(-1)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return sums of products, in which nothing times infinity is nothing."""
    return torch.where(one == 0, 0.0, one * other).sum(-1)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements of the last dim at indices, 0 for those that lie elsewhere."""
    count = x.shape[-1]
    if count == 0:
        return x.new_zeros(index.shape)
    found = x.gather(-1, index.clamp(0, count - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((index >= 0) & (index < count), found, 0.0)


def _add_picked(into: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values to the elements of the last dim at indices, those elsewhere to none."""
    count = into.shape[-1]
    if count == 0:
        return
    here = torch.where((index >= 0) & (index < count), values, 0.0)
    into.scatter_add_(-1, index.clamp(0, count - 1).unsqueeze(-1), here.unsqueeze(-1))


def _raised(placement: Placement, by: int) -> Placement:
    own: int | None = getattr(placement, "dim", None)
    return placement if own is None else replace(placement, dim=own + by)  # pyright: ignore[reportCallIssue]
