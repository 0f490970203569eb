"""State dicts of sharded modules: always of the sharded parameters."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..torch_private import parameters_of
from .unit import Unit


class StateDictHook:
    """Puts sharded parameters into a state dict that was asked for in a forward pass.

    No method of something else: torch marks hooks of state dicts, as it cannot mark methods.
    """

    def __init__(self, unit: Unit, *, warns: bool) -> None:
        self.unit, self.warns = unit, warns

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        unit = self.unit
        if self.warns and unit.gradients.are_pending:
            warnings.warn(
                "gradients of backward passes without synchronization wait in this module, and no "
                "state dict has them: a program that goes on from it lacks them. Save "
                "gradient_state_dict(model), too, before its state dict, or drop them by "
                "model.zero_grad()",
                stacklevel=2,
            )
        if not unit.stands:
            return
        for one in unit.held:
            for part, own in one.places:
                name = prefix + own
                if part is module and name in state_dict:
                    is_itself = state_dict[name] is parameters_of(module)[own]  # keep_vars=True
                    state_dict[name] = one.parameter if is_itself else one.parameter.detach()
