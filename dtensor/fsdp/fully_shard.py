"""``fully_shard``: ranks keep parts of parameters, which are whole only while they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from dtckpt.errors import PlacementError

from ..dtensor import AnyMesh
from ..mesh.resolving import mesh_of_all_ranks, resolve_mesh
from ..modules import slots
from ..tensor.compilers import opaque
from .checks import modules_of, require_policies, tensors_of
from .data_axes import DataAxes, DataParallelMeshDims
from .gradients import Gradients
from .held import Held, Place, copy_grad_dtype
from .module import FSDPModule, resharding
from .policies import MixedPrecisionPolicy, OffloadPolicy, keeps_dtype
from .sharding import ShardedParameter, ShardPlacementFn
from .state import State, state_of, states_below
from .unit import Unit

M = TypeVar("M", nn.Module, Sequence[nn.Module])

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


@opaque
def fully_shard(
    module: M,
    *,
    mesh: AnyMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard the parameters of a module over the ranks of a mesh, in place; return it.

    The parameters become DTensors; names stay. They are gathered before the forward pass of
    ``module`` and before its backward pass, all in one collective each, and freed after; gradients
    are averaged over the ranks and sharded, in one collective, when those of all parameters have
    come. What ``fully_shard`` treated before within ``module`` has its own collectives: treat
    blocks first, and the whole model last. Every rank keeps its part of the values that it has, so
    that nothing is sent: they have to be the same on all of them. Several modules in a list share
    their collectives: they are gathered as the first of them runs, and freed after the last one.

    Without ``mesh``, all ranks of the default process group share the parameters, on the current
    accelerator or the CPU; an active mesh is not asked. torch.distributed is initialised where it
    is not.

    ``mesh`` has one axis, or two, over the first of which parameters are repeated (HSDP); of a mesh
    with others, ``dp_mesh_dims`` names those over which they are sharded or repeated, any number.
    Parameters that are DTensors already, as ``parallelize_module`` makes them, have to lie on an
    axis beside them in one mesh, and are sharded over both. ``shard_placement_fn`` chooses the dim,
    ``Shard(0)`` where it returns None; sizes need not divide. Scalars are whole on every rank.

    ``reshard_after_forward`` frees parameters between the passes; by default for all modules but
    the outermost, which needs them at once. A number keeps them gathered among so many ranks that
    follow each other, those of a machine for instance, which gather them again without the
    others; 1 is False, and the number of all ranks that share a parameter True.
    ``offload_policy`` may keep sharded parameters on the CPU. ``ignored_params`` stay as they are.

    Raises PlacementError, before anything is changed, for a mesh that does not fit, for a module
    that is sharded already or has no ``forward``, and where a parameter has no such dim.
    """
    modules = modules_of(module)
    data = DataAxes.of(mesh_of_all_ranks() if mesh is None else resolve_mesh(mesh), dp_mesh_dims)
    require_policies(mp_policy, offload_policy)
    ignored = {id(parameter) for parameter in tensors_of(ignored_params or ())}
    places: dict[int, list[Place]] = {}
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    for one in modules:
        _collect(one, ignored, places, parameters)
    _check_ties(modules, parameters.values())
    about = {
        key: ShardedParameter.of(name, parameter, data, shard_placement_fn)
        for key, (name, parameter) in parameters.items()
    }
    keeps = {key: keeps_dtype(mp_policy, *named) for key, named in parameters.items()}
    unit = Unit(
        held=[],
        data=data,
        precision=mp_policy,
        number=next(data.mesh.state("fsdp_units", itertools.count)),
        gradients=Gradients(data),
        reshard_after_forward=reshard_after_forward,
    )
    unit.reshard_after_forward, unit.smaller = resharding(unit, reshard_after_forward)
    for key, (_, parameter) in parameters.items():
        made = about[key].shard(parameter, offload_policy)
        for part, name in places[key]:
            setattr(part, name, made)
        copy_grad_dtype(parameter, made)
        origin = Held.origin_of(parameter)
        unit.held.append(Held(about[key], places[key], origin, made, keeps[key]))
    State(modules, unit)
    for one in modules:
        one.__class__ = _sharded_class(type(one))
    return module


def _collect(
    module: nn.Module,
    ignored: set[int],
    places: dict[int, list[Place]],
    parameters: dict[int, tuple[str, nn.Parameter]],
) -> None:
    """Note the parameters of a module that no sharded one in it has, and where they stand."""
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


def _check_ties(
    modules: Sequence[nn.Module], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise PlacementError where a parameter is, or was, in two units."""
    names = {Held.origin_of(parameter): name for name, parameter in parameters}
    paths = {id(part): path for module in modules for path, part in module.named_modules()}
    states = {id(state): state for module in modules for state in states_below(module)}
    for one in itertools.chain.from_iterable(state.unit.held for state in states.values()):
        inside = (f"{paths[id(part)]}.{own}" for part, own in one.places if id(part) in paths)
        name = next(inside, None)
        if name is None:  # of another module of the unit
            continue
        if one.origin in names:
            raise PlacementError(
                f"fully_shard: {names[one.origin]!r} is tied to {name!r} of a part that is sharded "
                "already; shard both together, as a list of modules or with one that has both"
            )
        names[one.origin] = name


def _sharded_class(cls: type[Any]) -> type[nn.Module]:
    if cls not in _CLASSES:
        made: Any = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
        _CLASSES[cls] = made
    return _CLASSES[cls]
