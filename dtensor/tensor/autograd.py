"""The differentiable ways between local tensors and distributed ones.

The gradient of each arrives in the layout that its forward input had, with one exception: an input
that was Partial gets a Replicate gradient, since every term has the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.own_copies import own_copy
from ..geometry.placement import Placement
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec, contiguous_spec, replicated_spec, spec_of
from ..redistribute import redistribute_local, redistribute_locals, start_redistribute
from ..torch_private import has_tangent, is_gradient_batch
from .awaited import awaited
from .compilers import opaque
from .wrapper import Wrapper


def gradient_spec(spec: DTensorSpec, dtype: torch.dtype | None = None) -> DTensorSpec:
    """Return the spec that gradients of a tensor of ``spec`` have: no axis of them is Partial."""
    return spec.reduced().with_dtype(dtype)


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
    def jvp(ctx: Any, *tangents: Any) -> Wrapper:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the tensor whose local parts are the tangents of those."""
        spec: DTensorSpec = ctx.spec
        _require_linear(spec)
        return cast(Wrapper, FromLocal.apply(tangents[0], ctx.cls, spec, ctx.grad_placements))

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
            made = Redistribute.apply(grad, Goal(target.mesh, target.placements), None)
            return ToLocal.apply(made, spec.placements), None, None, None
        local = redistribute_local(grad.local, grad.spec, target)
        return own_copy(local) if local is grad.local else local, None, None, None


@opaque
class ToLocal(torch.autograd.Function):
    """Unwraps; the local gradient is wrapped again."""

    @staticmethod
    def forward(ctx: Any, tensor: Wrapper, grad_placements: tuple[Placement, ...] | None) -> Tensor:
        """Return a view of the local tensor."""
        ctx.cls = type(tensor)
        ctx.spec = tensor.spec
        ctx.grad_placements = grad_placements
        local = tensor.local
        return local.view_as(local)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the tangent of this rank's part."""
        spec: DTensorSpec = ctx.spec
        _require_linear(spec)
        given = distributed(tangents[0], ctx.cls, spec)
        made = Redistribute.apply(given, Goal(spec.mesh, spec.placements), None)
        return cast(Tensor, ToLocal.apply(made, ctx.grad_placements))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient as a distributed tensor."""
        grad = cast(Tensor, grads[0])
        _refuse_batch(grad)
        spec: DTensorSpec = ctx.spec
        if ctx.grad_placements is None:
            target = gradient_spec(spec, grad.dtype)
        else:
            target = spec.with_placements(ctx.grad_placements).with_dtype(grad.dtype)
        # Autograd adds to gradients in place, and cannot see that memory inside of a wrapper is
        # shared with the gradient of another tensor, or is one number expanded.
        own = own_copy(grad)
        if torch.is_grad_enabled():
            back = gradient_spec(spec).placements
            return FromLocal.apply(own, ctx.cls, contiguous_spec(target), back), None
        return ctx.cls(own, contiguous_spec(target)), None


@opaque
class Redistribute(torch.autograd.Function):
    """Changes mesh and placements; the gradient is redistributed back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Wrapper, goal: Goal, backward_dtype: torch.dtype | None
    ) -> Wrapper:
        """Return the tensor at its goal."""
        ctx.cls = type(tensor)
        ctx.spec = tensor.spec
        ctx.backward_dtype = backward_dtype
        ctx.target = goal.of(tensor.spec)
        return moved(tensor, goal)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Wrapper:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the tangent at the same goal."""
        target: DTensorSpec = ctx.target
        given = distributed(tangents[0], ctx.cls, ctx.spec)
        goal = Goal(target.mesh, target.placements, target.dtype)
        return cast(Wrapper, Redistribute.apply(given, goal, ctx.backward_dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient with the mesh and the placements of the input, in its dtype."""
        spec: DTensorSpec = ctx.spec
        grad = distributed(grads[0], ctx.cls, ctx.target)
        back = Goal(spec.mesh, gradient_spec(spec).placements, ctx.backward_dtype)
        if torch.is_grad_enabled():
            made = Redistribute.apply(grad, back, None)
            return cast(Wrapper, made).to(spec.dtype), None, None
        return _in_dtype(moved(grad, back), spec.dtype), None, None


@opaque
class RedistributeMany(torch.autograd.Function):
    """Changes mesh and placements of several tensors in common collectives, and so back."""

    @staticmethod
    def forward(ctx: Any, goals: tuple[Goal, ...], *tensors: Wrapper) -> tuple[Wrapper, ...]:
        """Return the tensors at their goals."""
        ctx.classes = [type(tensor) for tensor in tensors]
        ctx.specs = [tensor.spec for tensor in tensors]
        ctx.targets = [goal.of(tensor.spec) for goal, tensor in zip(goals, tensors, strict=True)]
        ctx.set_materialize_grads(False)
        made = tuple(moved_together(tensors, goals))
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *[m for m, is_needed in zip(made, needed, strict=True) if not is_needed]
        )
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients with the meshes and the placements of the inputs."""
        there = [i for i, grad in enumerate(grads) if grad is not None]
        given = [distributed(grads[i], ctx.classes[i], ctx.targets[i]) for i in there]
        specs: list[DTensorSpec] = [ctx.specs[i] for i in there]
        goals = tuple(Goal(spec.mesh, gradient_spec(spec).placements, None) for spec in specs)
        found: list[Tensor | None] = [None] * len(grads)
        if torch.is_grad_enabled():
            several = cast("tuple[Wrapper, ...]", RedistributeMany.apply(goals, *given))
            for i, back, spec in zip(there, several, specs, strict=True):
                found[i] = back.to(spec.dtype)
        else:
            for i, back, spec in zip(there, moved_together(given, goals), specs, strict=True):
                found[i] = _in_dtype(back, spec.dtype)
        return None, *found


def _in_dtype(tensor: Wrapper, dtype: torch.dtype) -> Wrapper:
    if tensor.dtype == dtype:
        return tensor
    return type(tensor)(tensor.local.to(dtype), tensor.spec.with_dtype(dtype))


def is_followed(tensor: Tensor) -> bool:
    """Whether reverse or forward mode follows what is computed with a tensor."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor)


def _require_linear(spec: DTensorSpec) -> None:
    """Raise PlacementError where the tangent of the whole is none that local tangents make."""
    if any(
        p.is_partial() and not (p.is_partial("sum") or p.is_partial("avg")) for p in spec.placements
    ):
        raise PlacementError(
            f"forward-mode derivatives do not go from local tensors to {spec}, or back: it is "
            "reduced by other means than sums; redistribute it before"
        )


def _refuse_batch(grad: Tensor) -> None:
    if is_gradient_batch(grad):
        raise PlacementError(
            "gradients for is_grads_batched (vectorize=True) do not pass redistribute, from_local "
            "and to_local; pass them one by one"
        )


def distributed(grad: Tensor, cls: type[Wrapper], spec: DTensorSpec) -> Wrapper:
    """Return a gradient of a tensor of ``spec``; torch's formulas make some constants plain."""
    if isinstance(grad, Wrapper):
        return grad
    _refuse_batch(grad)
    return cast(Wrapper, FromLocal.apply(grad, cls, replicated_spec(spec.mesh, grad), None))


@dataclass(frozen=True, slots=True)
class Goal:
    """Where a tensor is redistributed to, and how."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dtype: torch.dtype | None = None
    """Cast to before anything moves; None keeps that of the tensor."""
    is_awaited: bool = False
    """Whether the result may come before its values have."""

    def of(self, spec: DTensorSpec) -> DTensorSpec:
        """Return the spec that a tensor of ``spec`` gets."""
        dtype = spec.dtype if self.dtype is None else self.dtype
        return spec_of(self.mesh, self.placements, spec.shape, spec.stride, dtype)


def moved(tensor: Wrapper, goal: Goal) -> Wrapper:
    """Return the tensor elsewhere or in another dtype, outside of autograd."""
    source, target = tensor.spec.with_dtype(goal.dtype), goal.of(tensor.spec)
    local = tensor.local if goal.dtype is None else tensor.local.to(goal.dtype)
    if goal.is_awaited:
        finish = start_redistribute(local, source, target)
        if finish is not None:
            return awaited(type(tensor), finish, contiguous_spec(target), source.mesh.device)
    return _rewrapped(tensor, local, redistribute_local(local, source, target), target)


def placed(tensor: Wrapper, placements: tuple[Placement, ...]) -> Wrapper:
    """Return the tensor with other placements, outside of autograd."""
    return moved(tensor, Goal(tensor.spec.mesh, placements))


def moved_together(tensors: Sequence[Wrapper], goals: Sequence[Goal]) -> list[Wrapper]:
    """Return every tensor at its goal, outside of autograd, by packed collectives."""
    pairs = list(zip(tensors, goals, strict=True))
    moves = [(tensor.spec.with_dtype(goal.dtype), goal.of(tensor.spec)) for tensor, goal in pairs]
    locals_ = [
        tensor.local if goal.dtype is None else tensor.local.to(goal.dtype)
        for tensor, goal in pairs
    ]
    results = redistribute_locals(locals_, moves)
    return [
        _rewrapped(tensor, local, result, target)
        for tensor, local, result, (_, target) in zip(tensors, locals_, results, moves, strict=True)
    ]


def _rewrapped(tensor: Wrapper, local: Tensor, result: Tensor, target: DTensorSpec) -> Wrapper:
    if result is tensor.local:
        return type(tensor)(own_copy(result), contiguous_spec(target))
    return type(tensor)(result, target if result is local else contiguous_spec(target))
