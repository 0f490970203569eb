"""State dicts of sharded modules: always of the sharded parameters."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from .unit import Unit


class StateDictHook:
    """Puts sharded parameters into a state dict that was asked for while they are whole.

    No method of something else: torch marks hooks of state dicts, as it cannot mark methods.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        unit = self.unit
        if unit.gradients.are_pending:
            warnings.warn(
                "gradients of backward passes without synchronization wait in this module, and no "
                "state dict has them: a program that goes on from it lacks them. Save "
                "gradient_state_dict(model), too, before its state dict, or drop them by "
                "model.zero_grad()",
                stacklevel=2,
            )
        if not unit.stands:
            return
        names = {id(part): name for name, part in module.named_modules()}
        for one in unit.held:
            for part, own in one.places:
                outer = names.get(id(part))
                if outer is None:  # of another module of the unit
                    continue
                name = f"{prefix}{outer}.{own}" if outer else prefix + own
                if name in state_dict:
                    state_dict[name] = one.parameter.detach()
