"""``fully_shard``: ranks keep parts of parameters, which are whole only while they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from weakref import ref

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import AnyMesh
from ..mesh.resolving import resolve_mesh
from ..modules import slots
from ..tensor.compilers import opaque
from .module import FSDPModule, State, set_state, state_of, states_below
from .policies import MixedPrecisionPolicy
from .sharding import DataAxes, ShardedParameter, ShardPlacementFn
from .unit import Held, Place, Unit

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


@opaque
def fully_shard(
    module: nn.Module,
    *,
    mesh: AnyMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard the parameters of a module over the ranks of a mesh, in place; return it.

    The parameters become DTensors; names stay. They are gathered before the forward pass of
    ``module`` and before its backward pass, all in one collective each, and freed after; gradients
    are averaged over the ranks and sharded, in one collective, when those of all parameters have
    come. What ``fully_shard`` treated before within ``module`` has its own collectives: treat
    blocks first, and the whole model last. Every rank keeps its part of the values that it has, so
    that nothing is sent: they have to be the same on all of them.

    ``mesh`` has one axis, or two, over the first of which parameters are repeated (HSDP).
    Parameters that are DTensors already, as ``parallelize_module`` makes them, have to lie on an
    axis beside it in one mesh, and are sharded over both. ``shard_placement_fn`` chooses the dim,
    ``Shard(0)`` where it returns None; sizes need not divide. Scalars are whole on every rank.

    ``reshard_after_forward`` frees parameters between the passes; by default for all modules but
    the outermost, which needs them at once. ``ignored_params`` stay as they are.

    Raises PlacementError, before anything is changed, for a mesh that does not fit, for a module
    that is sharded already or has no ``forward``, and where a parameter has no such dim.
    """
    data = DataAxes(resolve_mesh(mesh))
    _check(module, reshard_after_forward, mp_policy)
    ignored = {id(parameter) for parameter in _tensors(ignored_params or ())}
    places: dict[int, list[Place]] = {}
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    names = {id(part): name for name, part in module.named_modules()}
    others = {
        id(part)
        for outer in module.modules()
        if state_of(outer) is not None
        for part in outer.modules()
    }
    for part, name, tensor in slots(module):
        if not isinstance(tensor, nn.Parameter) or id(tensor) in ignored or id(part) in others:
            continue
        whole = f"{names[id(part)]}.{name}" if names[id(part)] else name
        places.setdefault(id(tensor), []).append((part, name))
        parameters.setdefault(id(tensor), (whole, tensor))
    _check_ties(module, parameters)
    about = {
        key: ShardedParameter.of(name, parameter, data, shard_placement_fn)
        for key, (name, parameter) in parameters.items()
    }
    held: list[Held] = []
    for key, (_, parameter) in parameters.items():
        made = about[key].shard(parameter)
        for part, name in places[key]:
            setattr(part, name, made)
        held.append(Held(about[key], places[key], ref(parameter), made))
    unit = Unit(held, data, mp_policy, reshard_after_forward)
    set_state(module, State(module, unit))
    module.__class__ = _sharded_class(type(module))
    return module


def _check(module: object, reshard_after_forward: object, mp_policy: object) -> None:
    if not isinstance(module, nn.Module):
        raise PlacementError(
            f"fully_shard takes a module, got a {type(module).__name__}; call it for each"
        )
    if not isinstance(reshard_after_forward, int | None):
        raise PlacementError(
            f"fully_shard: reshard_after_forward is True, False or None, got "
            f"{reshard_after_forward!r}"
        )
    if not hasattr(mp_policy, "param_dtype"):
        raise PlacementError(
            f"fully_shard: mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}; as "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    if state_of(module) is not None:
        raise PlacementError(f"fully_shard: this {type(module).__name__} is sharded already")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise PlacementError(
            f"fully_shard: a {type(module).__name__} has no forward; shard the modules in it"
        )


def _tensors(ignored: Iterable[object]) -> list[Tensor]:
    """Return what is to be left as it is; PlacementError for what is no parameter, as a name."""
    given = list(ignored)
    for one in given:
        if not isinstance(one, Tensor):
            raise PlacementError(
                f"fully_shard: ignored_params has {one!r} of type {type(one).__name__}; pass the "
                "parameters themselves"
            )
    return cast("list[Tensor]", given)


def _check_ties(module: nn.Module, parameters: dict[int, tuple[str, nn.Parameter]]) -> None:
    """Raise PlacementError where a parameter was sharded with a part of the module already."""
    for state in states_below(module):
        for one in state.unit.held:
            original = one.original()
            if original is not None and id(original) in parameters:
                raise PlacementError(
                    f"fully_shard: {parameters[id(original)][0]!r} is tied to {one.about.name!r} "
                    "of a part that is sharded already; shard both together, with the module that "
                    "has both"
                )


def _sharded_class(cls: type[Any]) -> type[nn.Module]:
    if cls not in _CLASSES:
        made: Any = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
        _CLASSES[cls] = made
    return _CLASSES[cls]
