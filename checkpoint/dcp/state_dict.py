"""``get_state_dict`` and its relatives under the name of torch's module.

But for two of them, which take what torch's do not, they are torch's own: these take our DTensors
for distributed tensors once dtckpt's are imported (``dtensor/state_dicts.py``). What they return is
right for modules of torch and of dtckpt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)

from ...dtensor.dtensor import DTensor as _  # noqa: F401  makes torch's functions know ours

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: Any,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load optimizers, as torch's function of this name does.

    torch's raises a KeyError for a flat state dict of whole tensors (``full_state_dict`` with
    ``flatten_optimizer_state_dict``); here it is loaded. RuntimeError where parts are missing.
    """
    if options is not None and options.full_state_dict and options.flatten_optimizer_state_dict:
        those = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        form: Any = get_optimizer_state_dict(model, those)  # on all ranks, as it may make state
        optim_state_dict = _nested(form, optim_state_dict) if optim_state_dict else {}
        optimizers, options = those, replace(options, flatten_optimizer_state_dict=False)
    theirs.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


def set_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: Any,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a model and its optimizers, as torch's function of this name does; return the same.

    With ``broadcast_from_rank0`` torch's does not take part on ranks whose model state dict is
    empty, for which the first one then waits; here they do.
    """
    if options is None or not options.full_state_dict:
        return theirs.set_state_dict(
            model,
            optimizers,
            model_state_dict=model_state_dict,
            optim_state_dict=optim_state_dict,
            options=options,
        )
    those = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    has_model = [bool(model_state_dict)]
    if options.broadcast_from_rank0:
        dist.broadcast_object_list(has_model, src=0)
    if those:
        set_optimizer_state_dict(model, those, optim_state_dict, options=options)
    if not has_model[0]:  # which says that the optimizers alone are meant
        return nn.Module().load_state_dict({})  # nothing is missing, nothing unexpected
    return set_model_state_dict(model, model_state_dict, options=options)


def _nested(form: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state dict of optimizers in the form of another one; lists are copied."""

    def found(name: str, like: Any) -> Any:
        if isinstance(like, dict):
            return {key: found(f"{name}.{key}", item) for key, item in like.items()}
        if name not in flat:
            raise RuntimeError(f"the state dict of the optimizers has no {name!r}")
        return flat[name]

    groups = [
        {"params": list(group["params"])}
        | {
            key: found(f"param_groups.{group['params'][0]}.{key}", None)
            for key in group
            if key != "params" and group["params"]
        }
        for group in form["param_groups"]
    ]
    return {"state": found("state", form["state"]), "param_groups": groups}
