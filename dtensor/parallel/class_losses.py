"""Cross entropy of each element where every rank has the logits of some classes: passes and terms.

Softmax needs a maximum and a sum over all classes; those are reduced, and the logits stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dtensor import DTensor
from ..geometry.placement import Partial, Placement
from ..mesh.spec import DTensorSpec, spec_of
from ..redistribute import redistribute_local
from ..tensor.autograd import distributed
from ..tensor.wrapper import Wrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
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


class Losses(torch.autograd.Function):
    """The loss of each element, before it counts for anything, and its log-normaliser."""

    @staticmethod
    def forward(
        ctx: Any, logits: Wrapper, target: Wrapper, given: Given
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
        given: Given = ctx.given
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
