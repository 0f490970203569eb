"""The bare wrapper tensor: a local tensor and the spec of the global one.

Everything below the public ``DTensor`` (planning, dispatch, autograd) knows this base only, and
makes results with the class of the tensors it was given.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from .spec import DTensorSpec


class Wrapper(Tensor):
    """A tensor of the global shape that holds this rank's part."""

    __slots__ = ("_local_tensor", "_lost_writes", "_spec")

    _local_tensor: Tensor
    _spec: DTensorSpec
    _lost_writes: bool
    """Whether this is a view in name only: made from a copy, so writes would be lost."""

    if TYPE_CHECKING:  # the stubs of Tensor's own constructor do not fit

        def __init__(
            self, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False
        ) -> None: ...

    def __new__(
        cls, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False
    ) -> Self:
        meta = spec.tensor_meta
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=local_tensor.device,
            layout=local_tensor.layout,
            requires_grad=requires_grad,
        )
        made._spec = spec
        made._local_tensor = local_tensor
        made._lost_writes = False
        return made


def mark_lost_writes(tensor: Tensor) -> None:
    """Remember that a view is one in name only."""
    if isinstance(tensor, Wrapper):
        tensor._lost_writes = True


def refuse_lost_writes(op: object, tensor: Tensor) -> None:
    """Raise PlacementError before an operator writes to a view in name only."""
    if isinstance(tensor, Wrapper) and tensor._lost_writes:
        raise PlacementError(
            f"{op} writes to a view of a DTensor that had to be redistributed or copied to be "
            "viewed, so the write would not reach the viewed tensor; clone() the view, or write to "
            "the tensor"
        )
