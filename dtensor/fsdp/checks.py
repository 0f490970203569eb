"""What ``fully_shard`` is given: refused where it is something else, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from .policies import OffloadPolicy
from .state import state_of


def modules_of(given: object) -> tuple[nn.Module, ...]:
    """Return the modules that are to share their collectives."""
    listed: Any = given
    if isinstance(given, nn.Module) or not isinstance(given, Sequence) or isinstance(given, str):
        listed = (given,)
    modules: tuple[Any, ...] = tuple(listed)
    if not modules:
        raise PlacementError("fully_shard needs a module, or a list of some; got none")
    for module in modules:
        _require_module(module)
    for module in modules:
        inside = {id(part) for part in module.modules()} - {id(module)}
        if any(id(other) in inside for other in modules) or modules.count(module) > 1:
            raise PlacementError(
                "fully_shard: of modules in a list none may be in another one, or come twice"
            )
    return modules


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise PlacementError(
            f"fully_shard takes a module, or a list of some, got a {type(module).__name__}"
        )
    if state_of(module) is not None:
        raise PlacementError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"fully_shard: this {type(module).__name__} is sharded already"
        )
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_container and type(module).forward is nn.Module.forward:
        raise PlacementError(
            "fully_shard does not support containers that do not implement forward, at which "
            f"parameters are gathered: got a {type(module).__name__}. Shard the modules in it, or "
            "pass them as a list to have them gathered together"
        )


def require_policies(mp_policy: object, offload_policy: object) -> None:
    """Raise PlacementError for policies of other types."""
    if not hasattr(mp_policy, "param_dtype"):
        raise PlacementError(
            f"fully_shard: mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}; as "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    if not isinstance(offload_policy, OffloadPolicy):
        raise PlacementError(
            "fully_shard: offload_policy must be an OffloadPolicy of dtckpt.dtensor.fsdp, as "
            f"CPUOffloadPolicy(), got {offload_policy!r}"
        )


def tensors_of(ignored: Iterable[object]) -> list[Tensor]:
    """Return what is to be left as it is; PlacementError for what is no parameter, as a name."""
    given = list(ignored)
    for one in given:
        if not isinstance(one, Tensor):
            raise PlacementError(
                f"fully_shard: ignored_params has {one!r} of type {type(one).__name__}; pass the "
                "parameters themselves"
            )
    return cast("list[Tensor]", given)
