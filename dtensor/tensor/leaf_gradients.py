"""The gradients of leaves: they lie where the leaves do, however an operator left them.

An operator gives a gradient as it came out, often Partial and as large as the whole. Nothing later
would reduce it for good: it would stay that large, optimizers would lay out their state alike, and
every reading of it would communicate. Programs that reduce gradients themselves say so
(``partial_gradients``).
"""

from __future__ import annotations

from typing import Any, Self, cast
from weakref import ref

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.caches import BoundedDict
from ..mesh.modes import leaves_partial_gradients
from ..mesh.plain_tensors import may_be_plain
from ..mesh.spec import DTensorSpec, contiguous_spec
from ..redistribute import redistribute_local
from ..torch_private import hooks_of, is_gradient_batch
from .autograd import Goal, Redistribute, distributed, gradient_spec, moved
from .compilers import opaque
from .views.copied_view import CopiedView
from .wrapper import Wrapper, new_wrapper

_REQUIRES_GRAD: Any = Tensor.requires_grad


@opaque
class PlacedGradients(Wrapper):
    """A wrapper whose gradient, where it is a leaf, is redistributed to where the wrapper lies."""

    # The stubs call the argument otherwise than torch does.
    def requires_grad_(self, requires_grad: bool = True) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Change whether autograd records what is done to the tensor; return it."""
        super().requires_grad_(requires_grad)
        _place_gradient_of_leaf(self)
        return self

    def _set_requires_grad(self, requires_grad: bool) -> None:
        _REQUIRES_GRAD.__set__(self, requires_grad)
        _place_gradient_of_leaf(self)

    # The getter is torch's own, which is read far more often than the setter is used.
    requires_grad = property(  # pyright: ignore[reportAssignmentType]
        _REQUIRES_GRAD.__get__, _set_requires_grad, doc="Whether autograd records the tensor."
    )


@opaque
class _Placing:
    """The hook of a leaf. It holds no reference to that, which would be a cycle through C++."""

    __slots__ = ("_cls", "_spec", "_targets")

    def __init__(self, tensor: Wrapper) -> None:
        self._cls = type(tensor)
        self.follow(tensor)

    def follow(self, tensor: Wrapper) -> None:
        """Take the leaf to lie as it does now."""
        self._spec = gradient_spec(tensor.spec)
        self._targets: dict[DTensorSpec, DTensorSpec] = {}

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # as where a formula knows it to be zero
            return None
        placements = self._spec.placements
        if not isinstance(grad, Wrapper):
            if is_gradient_batch(grad):  # of which none is kept in the leaf
                return None
            _require_replicated(grad, self._spec)
            grad = distributed(grad, self._cls, self._spec)
        elif isinstance(grad, CopiedView):
            pass  # a gradient of its own, even if it lies right
        elif grad.spec.placements == placements or leaves_partial_gradients():
            return None
        elif not torch.is_grad_enabled():
            return self._moved(grad)
        goal = Goal(self._spec.mesh, placements)
        if torch.is_grad_enabled() and grad.requires_grad:
            return cast(Tensor, Redistribute.apply(grad, goal, None))
        return moved(grad, goal)

    def _moved(self, grad: Wrapper) -> Wrapper:
        """Do what ``moved`` does to what lies elsewhere; this runs for every parameter."""
        source = grad.spec
        target = self._targets.get(source)
        if target is None:
            target = contiguous_spec(source.with_placements(self._spec.placements))
            self._targets[source] = target
        local = redistribute_local(grad.local, source, target)
        return new_wrapper(grad.ordinary, local, target, False)


def _place_gradient_of_leaf(tensor: Wrapper) -> None:
    is_recorded = tensor.requires_grad and tensor.is_leaf and not torch.is_inference(tensor)
    if is_recorded and not _find(tensor):
        place_gradient(tensor)


def place_gradient(tensor: Wrapper) -> None:
    """Redistribute the gradient of a tensor, which autograd records, to where the tensor lies."""
    placing = _Placing(tensor)
    tensor.register_hook(placing)
    if hooks_of(tensor) is None:
        _PLACED.put(id(tensor), (ref(tensor), placing))


def follow_leaf(tensor: Wrapper) -> None:
    """Note that a tensor lies elsewhere now, or has another shape, as assigning ``data`` does."""
    for placing in _find(tensor):
        placing.follow(tensor)


_PLACED: BoundedDict[int, tuple[ref[Tensor], _Placing]] = BoundedDict(1 << 16)
"""The hooks of leaves, by their identity, where torch does not show hooks."""


def _find(tensor: Wrapper) -> list[_Placing]:
    hooks = hooks_of(tensor)
    if hooks is None:
        known, placing = _PLACED.get(id(tensor), (None, None))
        return [placing] if placing is not None and known is not None and known() is tensor else []
    return [hook for hook in hooks.values() if isinstance(hook, _Placing)]


def _require_replicated(grad: Tensor, spec: DTensorSpec) -> None:
    if not may_be_plain(grad, spec.mesh):
        raise PlacementError(
            f"the gradient of a leaf {spec} is a plain torch.Tensor that differs between "
            "ranks; return a DTensor from the backward of the autograd.Function that made it"
        )
