"""A call on its mesh: which one it is, how its tensors lie there, and whether they may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..mesh.device_mesh import DeviceMesh
from ..mesh.plain_tensors import may_be_plain
from ..mesh.spec import DTensorSpec, replicated_spec, spec_of
from ..tensor.schemas import Op, is_foreach
from ..tensor.wrapper import Wrapper
from ..torch_private import schema_of
from .call import Call
from .keys import Key, key_of
from .numbers import mesh_of, number_for, scales_plain

_COPY = torch.ops.aten.copy_.default
"""Writes all of its first tensor."""


@dataclass(frozen=True)
class Bound:
    """A call on its mesh. Without slots: its key is made for those only that need one."""

    call: Call
    mesh: DeviceMesh
    leaves: Sequence[Tensor]
    """The tensors of the call; numbers of other meshes have one value on all ranks of this one."""
    specs: Sequence[DTensorSpec]

    @cached_property
    def key(self) -> Key:
        """The key of the call, equal for two that may share a plan (``keys``)."""
        pairs = zip(self.leaves, self.specs, strict=True)
        seen = [spec if isinstance(leaf, Wrapper) else (spec, "plain") for leaf, spec in pairs]
        call = self.call
        return key_of(call.cls, call.op, *call.replaced(seen))[0]


def bind(call: Call) -> Bound:
    """Return a call on its mesh.

    Plain tensors are compared across the ranks (``plain_tensors``). Raises PlacementError, alike on
    all ranks, where tensors lie on different meshes, or a plain one differs between ranks.
    """
    op, leaves = call.op, call.tensors
    mesh = _common_mesh(leaves)
    if mesh is not None:
        return Bound(call, mesh, leaves, [cast(Wrapper, leaf).spec for leaf in leaves])
    mesh = mesh_of(leaves)
    if is_foreach(op):  # the tensors of each place have a mesh of their own
        _check_places(call)
        specs = [
            leaf.spec if isinstance(leaf, Wrapper) else replicated_spec(mesh, leaf)
            for leaf in leaves
        ]
    else:
        outs = _plain_outs(call)
        leaves = [leaf if id(leaf) in outs else number_for(mesh, leaf, op) for leaf in leaves]
        specs = [
            replicated_spec(mesh, leaf)
            if id(leaf) in outs
            else spec_on(mesh, leaf, index, op, leaves)
            for index, leaf in enumerate(leaves)
        ]
    return Bound(call, mesh, leaves, specs)


def _plain_outs(call: Call) -> set[int]:
    """Return the identities of plain tensors that the call only writes to."""
    written = only_written(call)
    plain = [leaf for leaf in call.tensors if not isinstance(leaf, Wrapper)]
    return {id(leaf) for leaf in plain if id(leaf) in written}


def only_written(call: Call) -> set[int]:
    """Return the identities of tensors that the call only writes to.

    What is in them is not read, and mostly uninitialised: it need not be the same on all ranks. One
    that is an argument, too, is read.
    """
    outs = [call.args[0]] if call.op is _COPY else []
    if call.kwargs:
        names = [arg.name for arg in schema_of(call.op).arguments if arg.is_out]
        outs += [call.kwargs[name] for name in names if name in call.kwargs]
    if not outs:
        return set()
    times = Counter(map(id, call.tensors))
    return {id(out) for out in outs if isinstance(out, Tensor) and times[id(out)] == 1}


def _common_mesh(leaves: Sequence[Tensor]) -> DeviceMesh | None:
    """Return the mesh of distributed tensors that all lie on one, as they mostly do."""
    mesh: DeviceMesh | None = None
    for leaf in leaves:
        if not isinstance(leaf, Wrapper) or (mesh is not None and leaf.spec.mesh is not mesh):
            return None
        mesh = leaf.spec.mesh
    return mesh


def _check_places(call: Call) -> None:
    """Apply the policy for plain tensors to those that stand in lists beside distributed ones."""
    if all(isinstance(leaf, Wrapper) or leaf.numel() <= 1 for leaf in call.tensors):
        return
    lists: list[Any] = [arg for arg in call.args if isinstance(arg, list | tuple)]
    for place in zip(*lists, strict=False):
        here = [item for item in place if isinstance(item, Tensor)]
        mesh = next((item.spec.mesh for item in here if isinstance(item, Wrapper)), None)
        if mesh is not None:
            for index, leaf in enumerate(here):
                spec_on(mesh, leaf, index, call.op, here)


def spec_on(
    mesh: DeviceMesh, leaf: Tensor, index: int, op: Op, leaves: Sequence[Tensor]
) -> DTensorSpec:
    """Return the spec of one of the tensors of an operator on the mesh of the others."""
    if isinstance(leaf, Wrapper):
        spec = leaf.spec
        if spec.mesh is mesh:
            return spec
        if spec.mesh.same_ranks_as(mesh):
            return spec_of(mesh, spec.placements, spec.shape, spec.stride, spec.dtype)
        if spec.ndim == 0:  # a number, which is known on all ranks
            return replicated_spec(mesh, leaf)
        raise PlacementError(
            f"Sharding propagation failed for {op}: tensor {index} lies on {spec.mesh!r}, but "
            f"tensor 0 on {mesh!r}; the tensors of one operator must lie on one mesh"
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


def _described(leaf: Tensor) -> str:
    if isinstance(leaf, Wrapper):
        return str(leaf.spec)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} plain"
