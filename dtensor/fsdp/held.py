"""One parameter of a unit: where it stands, and what it is at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..tensor.wrapper import Wrapper
from ..torch_private import parameters_of
from .sharding import ShardedParameter

Place = tuple[nn.Module, str]

_ORIGIN = "_dtckpt_fsdp_origin"


@dataclass(slots=True, eq=False)
class Held:
    """A parameter of a unit: where it stands, sharded, and what it is when whole."""

    about: ShardedParameter
    places: list[Place]
    origin: object
    """Stands for what it was before it was sharded, which may still be in other places, or was."""
    parameter: nn.Parameter
    keeps_dtype: bool = False
    """Whether it is computed with in its own dtype, whatever the policy of the unit says."""
    whole: Tensor | None = None
    """The local tensor of the whole parameter, while that is whole."""
    kept: Tensor | None = None
    """What of it is kept between the passes, where a smaller group gathers it again."""
    storage: Tensor | None = None
    """Where it is put whenever it is gathered, if that is to stay one place in memory."""
    is_padded: bool | None = None
    """Whether its class has parts of equal size gathered where those of the ranks are not."""
    num_replaced: int = 0
    """How often another parameter was put in its place: counts of writes begin anew with each."""

    @property
    def sharded(self) -> Wrapper:
        """The sharded parameter."""
        return cast(Wrapper, self.parameter)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of the gradients of the sharded parameter; None for any."""
        return grad_dtype_of(self.parameter)

    def in_storage(self, whole: Tensor) -> Tensor:
        """Return the whole parameter where it was before, if it was."""
        kept = self.storage
        if kept is None or kept.shape != whole.shape or kept.dtype != whole.dtype:
            self.storage = whole
            return whole
        kept.data.copy_(whole)  # no write to it: views of earlier passes count those
        return kept

    @staticmethod
    def origin_of(parameter: nn.Parameter) -> object:
        """Return what stands for a parameter after it is gone; it has it as an attribute."""
        return vars(parameter).setdefault(_ORIGIN, object())

    def follow(self) -> None:
        """Take up the parameter that stands in its place: ``to_empty`` and loads put others there.

        Raises PlacementError where that lies otherwise.
        """
        module, name = self.places[0]
        found = parameters_of(module)[name]
        if found is self.parameter or not isinstance(found, nn.Parameter):
            return
        about = self.about
        spec = found.spec if isinstance(found, Wrapper) else None
        if spec is None or spec.with_dtype(about.sharded.dtype) is not about.sharded:
            raise PlacementError(
                f"{about.name!r} was replaced by a parameter that is not sharded alike: expected "
                f"{about.sharded}, got {spec or f'a plain tensor of {list(found.shape)}'}; load "
                "state dicts without assign=True, or with DTensors that lie as the parameters"
            )
        copy_grad_dtype(self.parameter, found)
        self.parameter = found
        self.num_replaced += 1


def grad_dtype_of(parameter: Tensor) -> torch.dtype | None:
    """Return the dtype of the gradients of a tensor; None for any."""
    given: Any = parameter
    return getattr(given, "grad_dtype", given.dtype)  # torch has it since 2.10


def copy_grad_dtype(source: Tensor, target: Tensor) -> None:
    """Give the ``grad_dtype`` that was set for a tensor to one that has none of its own."""
    wanted, own = grad_dtype_of(source), grad_dtype_of(target)
    if wanted != source.dtype and own == target.dtype:
        given: Any = target
        given.grad_dtype = wanted
