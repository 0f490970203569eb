"""What a call of an operator is: its tensors, the mesh they lie on, and a key for its plan."""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.placement import Replicate
from ..mesh.device_mesh import DeviceMesh
from ..mesh.plain_tensors import may_be_plain
from ..mesh.spec import DTensorSpec, spec_of
from ..tensor.arguments import collect_tensors
from ..tensor.schemas import Op, is_foreach
from ..tensor.wrapper import Wrapper
from .numbers import mesh_of, number_for, scales_plain


@dataclass(frozen=True, slots=True)
class Binding:
    """The tensors of one call, in the order they appear, with their specs."""

    mesh: DeviceMesh
    leaves: list[Tensor]
    specs: list[DTensorSpec]
    key: tuple[Any, ...]
    """Equal for two calls that may share a plan."""
    is_flat: bool = False
    """Whether all tensors are arguments themselves, none in a list or a keyword."""


def bind(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, by_type: bool) -> Binding:
    """Return the binding of a call; ``by_type`` keys numbers by their type, not their value.

    Plain tensors are compared across the ranks (``promotion``). Raises PlacementError, alike on all
    ranks, where tensors lie on different meshes, or a plain one differs between ranks.
    """
    flat = None if kwargs else _bind_flat(op, args, by_type=by_type)
    if flat is not None:
        return flat
    leaves: list[Tensor] = []
    collect_tensors(args, leaves)
    collect_tensors(kwargs.values(), leaves)
    mesh = mesh_of(leaves)
    if is_foreach(op):  # the tensors of each place have a mesh of their own
        _check_places(op, args, leaves)
        specs = [
            leaf._spec if isinstance(leaf, Wrapper) else replicated_spec(mesh, leaf)
            for leaf in leaves
        ]
    else:
        leaves = [number_for(mesh, leaf, op) for leaf in leaves]
        specs = [spec_on(mesh, leaf, index, op, leaves) for index, leaf in enumerate(leaves)]
    remaining = iter(specs)
    key: list[Any] = [op]
    key.extend([_key(arg, remaining, by_type) for arg in args])
    key.extend([(name, _key(arg, remaining, by_type)) for name, arg in kwargs.items()])
    return Binding(mesh, leaves, specs, tuple(key))


def _bind_flat(op: Op, args: tuple[Any, ...], *, by_type: bool) -> Binding | None:
    """Return the binding of distributed tensors on one mesh and numbers: the common case."""
    leaves: list[Tensor] = []
    specs: list[DTensorSpec] = []
    key: list[Any] = [op]
    mesh: DeviceMesh | None = None
    for arg in args:
        if isinstance(arg, Wrapper):
            spec = arg._spec
            if mesh is None:
                mesh = spec.mesh
            elif mesh is not spec.mesh:
                return None
            leaves.append(arg)
            specs.append(spec)
            key.append(spec)
        elif isinstance(arg, int | float):
            key.append(type(arg) if by_type else (type(arg), arg))
        else:
            return None
    return None if mesh is None else Binding(mesh, leaves, specs, tuple(key), True)


def _key(value: Any, specs: Iterator[DTensorSpec], by_type: bool) -> Any:
    if isinstance(value, Tensor):
        return (next(specs), isinstance(value, Wrapper))
    if isinstance(value, list | tuple):
        return tuple([_key(item, specs, by_type) for item in value])
    if by_type and isinstance(value, int | float | complex):
        return type(value)
    return (type(value), value)


def _check_places(op: Op, args: tuple[Any, ...], leaves: list[Tensor]) -> None:
    """Apply the policy for plain tensors to those that stand in lists beside distributed ones."""
    if all(isinstance(leaf, Wrapper) or leaf.numel() <= 1 for leaf in leaves):
        return
    lists: list[Any] = [arg for arg in args if isinstance(arg, list | tuple)]
    for place in zip(*lists, strict=False):
        here = [item for item in place if isinstance(item, Tensor)]
        mesh = next((item._spec.mesh for item in here if isinstance(item, Wrapper)), None)
        if mesh is not None:
            for index, leaf in enumerate(here):
                spec_on(mesh, leaf, index, op, here)


def spec_on(
    mesh: DeviceMesh,
    leaf: Tensor,
    index: int,
    op: Op,
    leaves: list[Tensor],
) -> DTensorSpec:
    """Return the spec of one of the tensors of an operator on the mesh of the others."""
    if isinstance(leaf, Wrapper):
        spec = leaf._spec
        if spec.mesh is mesh:
            return spec
        if spec.mesh.same_ranks_as(mesh):
            return spec_of(mesh, spec.placements, spec.shape, spec.stride, spec.dtype)
        if spec.ndim == 0:  # a number, which is known on all ranks
            return replicated_spec(mesh, leaf)
        raise PlacementError(
            f"{op}: tensor {index} lies on {spec.mesh!r}, but tensor 0 on {mesh!r}; the tensors of "
            "one operator must lie on one mesh"
        )
    if not (index == 0 and scales_plain(op, leaves)) and not may_be_plain(leaf, mesh):
        listed = ", ".join(_described(other) for other in leaves)
        raise PlacementError(
            f"{op}({listed}): tensor {index} is a plain torch.Tensor of shape {list(leaf.shape)} "
            "beside DTensors, and differs between ranks. Make it one: distribute_tensor(tensor, "
            "mesh) if every rank is to have the same values, or DTensor.from_local(tensor, mesh, "
            "placements) if it is a local part"
        )
    return replicated_spec(mesh, leaf)


def replicated_spec(mesh: DeviceMesh, leaf: Tensor) -> DTensorSpec:
    """Return the spec of a plain tensor that is equal on all ranks."""
    return spec_of(mesh, (Replicate(),) * mesh.ndim, leaf.shape, leaf.stride(), leaf.dtype)


def _described(leaf: Tensor) -> str:
    if isinstance(leaf, Wrapper):
        return str(leaf._spec)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} plain"
