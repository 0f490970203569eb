"""One call of an operator on distributed tensors, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..tensor.arguments import collect_tensors, substituted
from ..tensor.schemas import Op
from ..tensor.wrapper import Wrapper


@dataclass(frozen=True, slots=True)
class Call:
    """What came to the dispatcher."""

    cls: type[Wrapper]
    """The class of its distributed tensors, and of what it returns."""
    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor] = field(init=False)
    """All tensors among the arguments, those in lists, too, in the order they appear."""

    def __post_init__(self) -> None:
        found: list[Tensor] = []
        collect_tensors(self.args, found)
        if self.kwargs:
            collect_tensors(self.kwargs.values(), found)
        object.__setattr__(self, "tensors", found)

    def replaced(self, values: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``values`` in the places of the tensors, in order."""
        return substituted(self.args, self.kwargs, values)

    def without_data(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors of the meta device, and that in place of any other."""
        args, kwargs = self.replaced(tensors)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return args, kwargs
