"""The bare wrapper tensor: a local tensor and the spec of the global one.

Everything below the public ``DTensor`` (planning, dispatch, autograd) knows this base only, and
makes results with the class of the tensors it was given.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from .spec import DTensorSpec


class Wrapper(Tensor):
    """A tensor of the global shape that holds this rank's part."""

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: Tensor
    _spec: DTensorSpec
    copied_view: ClassVar[type[Wrapper]]
    """The class of this class's views in name only."""

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
        return made
