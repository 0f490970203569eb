"""What compilers ask of a distributed tensor: its local tensor, and how to make it of another one.

A graph has local tensors only. How the whole lies is written into it as it was recorded, and
compared at every call; another layout is recorded anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from ..mesh.spec import DTensorSpec
from ..torch_private import can_record, is_traced, record_redistribute
from .wrapper import Wrapper, make_publicly, new_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence


class Traceable(Wrapper):
    """Answers compilers; a mixin of ``DTensor``."""

    def __tensor_flatten__(self) -> tuple[list[str], DTensorSpec]:
        record_redistribute(Traceable)  # compilers come here before they follow any method
        return ["local"], self.spec

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], spec: DTensorSpec, size: Sequence[int], stride: Any
    ) -> Self:
        local = inner["local"]
        if is_traced(local):
            # It stands for a tensor of this very class: results of redistributed inputs may lie
            # otherwise than their strides say without being irregular.
            return (make_publicly if local.requires_grad else new_wrapper)(cls, local, spec, False)
        return cls(local, spec)

    def __coerce_tangent_metadata__(self) -> Wrapper:
        """Return a tensor that lies as gradients of this one do."""
        from .autograd import placed

        target = self.spec.reduced()
        return self if target is self.spec else placed(self, target.placements)

    def __coerce_same_metadata_as_tangent__(
        self, spec: DTensorSpec, expected_type: Any = None
    ) -> Any:
        """Return a gradient as the graph takes it."""
        from .autograd import placed

        return type(self)(placed(self, spec.placements).local, spec)


if not can_record():  # graphs break at operators then
    del Traceable.__tensor_flatten__, Traceable.__tensor_unflatten__
