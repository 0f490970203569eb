"""The differentiable ways between local tensors and distributed ones.

The gradient of each arrives in the layout that its forward input had, with one exception: an input
that was Partial gets a Replicate gradient, since every term has the gradient of the whole.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .compilers import opaque
from .placement import Placement, Replicate
from .redistribute import redistribute_local
from .spec import DTensorSpec, contiguous_spec, spec_of
from .wrapper import Wrapper


def gradient_spec(spec: DTensorSpec, dtype: torch.dtype | None = None) -> DTensorSpec:
    """Return the spec that gradients of a tensor of ``spec`` have: no axis of them is Partial."""
    return _typed(spec.reduced(), dtype)


def _typed(spec: DTensorSpec, dtype: torch.dtype | None) -> DTensorSpec:
    if dtype is None or dtype == spec.dtype:
        return spec
    return spec_of(spec.mesh, spec.placements, spec.shape, spec.stride, dtype)


@opaque
class FromLocal(torch.autograd.Function):
    """Wraps local data; the gradient is that of the local data."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        cls: type[Wrapper],
        spec: DTensorSpec,
        grad_placements: tuple[Placement, ...] | None,
    ) -> Wrapper:
        """Return a wrapper around a view of ``local``."""
        ctx.cls = cls
        ctx.spec = spec
        ctx.grad_placements = grad_placements
        return cls(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the local part of the gradient."""
        spec: DTensorSpec = ctx.spec
        grad = distributed(grads[0], ctx.cls, spec)
        if ctx.grad_placements is None:
            target = gradient_spec(spec)
        else:
            target = spec.with_placements(ctx.grad_placements)
        if torch.is_grad_enabled():  # the gradient will have one: that of the way there
            placed = Redistribute.apply(grad, target.placements, None, None)
            return ToLocal.apply(placed, spec.placements), None, None, None
        local = redistribute_local(grad._local_tensor, grad._spec, target)
        return _own(local) if local is grad._local_tensor else local, None, None, None


@opaque
class ToLocal(torch.autograd.Function):
    """Unwraps; the local gradient is wrapped again."""

    @staticmethod
    def forward(ctx: Any, tensor: Wrapper, grad_placements: tuple[Placement, ...] | None) -> Tensor:
        """Return a view of the local tensor."""
        ctx.cls = type(tensor)
        ctx.spec = tensor._spec
        ctx.grad_placements = grad_placements
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient as a distributed tensor."""
        grad = cast(Tensor, grads[0])
        spec: DTensorSpec = ctx.spec
        if ctx.grad_placements is None:
            target = gradient_spec(spec, grad.dtype)
        else:
            target = _typed(spec.with_placements(ctx.grad_placements), grad.dtype)
        if torch.is_grad_enabled():
            back = gradient_spec(spec).placements
            return FromLocal.apply(_own(grad), ctx.cls, contiguous_spec(target), back), None
        return ctx.cls(_own(grad), contiguous_spec(target)), None


@opaque
class Redistribute(torch.autograd.Function):
    """Changes the placements; the gradient is redistributed back."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Wrapper,
        placements: tuple[Placement, ...],
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> Wrapper:
        """Return the tensor with other placements, in ``forward_dtype`` if given."""
        ctx.cls = type(tensor)
        ctx.spec = tensor._spec
        ctx.backward_dtype = backward_dtype
        return moved(tensor, placements, forward_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient with the placements of the input, in its dtype."""
        spec: DTensorSpec = ctx.spec
        grad = distributed(grads[0], ctx.cls, spec)
        placements = gradient_spec(spec).placements
        if torch.is_grad_enabled():
            placed = Redistribute.apply(grad, placements, ctx.backward_dtype, None)
            return cast(Wrapper, placed).to(spec.dtype), None, None, None
        back = moved(grad, placements, ctx.backward_dtype or grad.dtype)
        if back.dtype != spec.dtype:
            target = _typed(back._spec, spec.dtype)
            back = type(back)(back._local_tensor.to(spec.dtype), target)
        return back, None, None, None


def distributed(grad: Tensor, cls: type[Wrapper], spec: DTensorSpec) -> Wrapper:
    """Return a gradient of a tensor of ``spec``; torch's formulas make some constants plain."""
    if isinstance(grad, Wrapper):
        return grad
    whole = spec_of(
        spec.mesh, (Replicate(),) * spec.mesh.ndim, grad.shape, grad.stride(), grad.dtype
    )
    return cast(Wrapper, FromLocal.apply(grad, cls, whole, None))


def _own(local: Tensor) -> Tensor:
    """Return a contiguous copy.

    Autograd cannot see that the memory inside of a wrapper is shared with the gradient of another
    tensor, or is one number expanded, and would add to it in place.
    """
    return local.clone(memory_format=torch.contiguous_format)


def moved(
    tensor: Wrapper, placements: tuple[Placement, ...], dtype: torch.dtype | None = None
) -> Wrapper:
    """Return the tensor with other placements and dtype, outside of autograd."""
    source = _typed(tensor._spec, dtype)
    target = source.with_placements(placements)
    local = tensor._local_tensor if dtype is None else tensor._local_tensor.to(dtype)
    result = redistribute_local(local, source, target)
    if result is tensor._local_tensor:
        return type(tensor)(_own(result), contiguous_spec(target))
    return type(tensor)(result, target if result is local else contiguous_spec(target))
