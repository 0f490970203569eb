"""Optimizers that are spread over ranks: each rank has the state of some parameters only.

ZeroRedundancyOptimizer gives every parameter an owner, whose inner optimizer (``optim``) has its
state, whole. FSDP1 cuts parameters as one flat vector, and state that is kept beside it does not
tell of which parameter it is a part. Private fields of the vector would, until the next release;
torch's own functions give the same by names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..tensors.materialising import is_meta
from .named_state import settings_of
from .param_names import params_of
from .unwrapping import unwrapped


def state_dict_of(value: Any) -> Any:
    """Return the state dict of an object; of an optimizer with owners what this rank owns.

    That of a module is without the names of wrappers. What is owned has all groups and the numbers
    of all parameters, as if state had been gathered.
    """
    owned = owned_part(value)
    if owned is None:
        state = value.state_dict()
        return unwrapped(value, state) if isinstance(value, nn.Module) else state
    numbers = {id(param): number for number, param in enumerate(params_of(value))}
    state = {numbers.get(id(key), key): entry for key, entry in owned.state.items()}
    groups = [
        group | {"params": [numbers[id(param)] for param in group["params"]]}
        for group in value.param_groups
    ]
    return {"state": state, "param_groups": groups}


def owned_part(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer of what this rank owns, where parameters have owners; else None."""
    module = sys.modules.get("torch.distributed.optim")
    cls = getattr(module, "ZeroRedundancyOptimizer", None)
    if cls is None or not isinstance(optimizer, cls):
        return None
    return getattr(optimizer, "optim", None)  # with overlap_with_ddp it is made in the first steps


def load_owned(
    optimizer: torch.optim.Optimizer, owned: torch.optim.Optimizer, filled: Mapping[str, Any]
) -> dict[str, Any]:
    """Hand an optimizer with owners its settings; return the state dict of what is owned here."""
    groups: list[dict[str, Any]] = filled["param_groups"]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    numbers = {id(param): number for number, param in enumerate(params_of(optimizer))}
    own = {number: numbers[id(param)] for number, param in enumerate(params_of(owned))}
    state = {number: filled["state"][n] for number, n in own.items() if n in filled["state"]}
    others = {key: entry for key, entry in filled["state"].items() if not isinstance(key, int)}
    own_groups: list[dict[str, Any]] = owned.state_dict()["param_groups"]
    return {
        "state": state | others,
        "param_groups": [
            settings_of(group) | {"params": own_group["params"]}
            for group, own_group in zip(groups, own_groups, strict=True)
        ],
    }


def unknown_parts(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> str:
    """Say why state of an optimizer cannot be told apart; "" where it can.

    ``modules`` are those that the parameters may be of.
    """
    if owned_part(optimizer) is not None and any(map(is_meta, params_of(optimizer))):
        return (
            "its parameters are on the meta device, and what takes their place would have no "
            "owners; load the module by itself first, or make it on its device, and only then make "
            "the optimizer"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    params = {id(param): param for param in params_of(optimizer) if type(param) is nn.Parameter}
    if fsdp is None or not params:  # those of FSDP2 are DTensors
        return ""
    flat = any(isinstance(param, fsdp.FlatParameter) for param in params.values())
    wrappers = (
        part
        for module in modules
        for part in module.modules()
        if isinstance(part, fsdp.FullyShardedDataParallel)
    )
    if flat or any(
        part.sharding_strategy is not fsdp.ShardingStrategy.NO_SHARD
        and any(id(param) in params for param in part.parameters())
        for part in wrappers
    ):
        return (
            "its parameters are those of FullyShardedDataParallel, which are parts of flat "
            "vectors, and its own state does not say which. Have "
            "FullyShardedDataParallel.optim_state_dict(module, optimizer), or get_state_dict of "
            "torch.distributed.checkpoint.state_dict, in its place, and hand over what was loaded "
            "by their counterparts"
        )
    return ""
