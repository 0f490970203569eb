"""Distributed numbers: tensors without dims go with tensors on any mesh, and with plain ones.

A norm of gradients on one mesh scales those on another. Such a number is reduced first, and then
every rank of its mesh has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dtckpt.errors import PlacementError

from ..mesh.device_mesh import DeviceMesh
from ..redistribute import redistribute_local
from ..tensor.autograd import is_followed
from ..tensor.schemas import Op, is_in_place
from ..tensor.wrapper import Wrapper


def mesh_of(leaves: Sequence[Tensor]) -> DeviceMesh:
    """Return the mesh that an operator runs on: that of its first tensor that is no number."""
    ours = [leaf for leaf in leaves if isinstance(leaf, Wrapper)]
    return next((leaf for leaf in ours if leaf.ndim), ours[0]).spec.mesh


def number_for(mesh: DeviceMesh, leaf: Tensor, op: Op) -> Tensor:
    """Return ``leaf``, with one value on all ranks if it is a number from another mesh.

    Raises PlacementError, alike on all ranks, where its mesh lacks ranks of ``mesh``, and where
    its gradient would be on the wrong one.
    """
    if not isinstance(leaf, Wrapper) or leaf.ndim or leaf.spec.mesh.same_ranks_as(mesh):
        return leaf
    spec = leaf.spec
    require_known(spec.mesh, mesh, op)
    if is_followed(leaf):
        raise PlacementError(
            f"{op}: {spec} on {spec.mesh!r} needs a gradient, which would lie on {mesh!r}; take "
            "its full_tensor() first"
        )
    whole = spec.replicated()
    if whole is spec:
        return leaf
    return type(leaf)(redistribute_local(leaf.local, spec, whole), whole)


def require_known(source: DeviceMesh, mesh: DeviceMesh, op: Op) -> None:
    """Raise PlacementError where ranks of ``mesh`` do not know a number that is on ``source``."""
    lacking = set(mesh.root.layout_mesh.all_ranks()) - set(source.root.layout_mesh.all_ranks())
    if lacking:
        raise PlacementError(
            f"{op}: a number on {source!r} has no value on ranks {sorted(lacking)[:8]} of "
            f"{mesh!r}; send it there first"
        )


def scales_plain(op: Op, leaves: Sequence[Tensor]) -> bool:
    """Whether an operator writes a plain tensor and takes nothing distributed but numbers."""
    if not is_in_place(op) or isinstance(leaves[0], Wrapper):
        return False
    numbers = [leaf for leaf in leaves if isinstance(leaf, Wrapper)]
    if any(leaf.ndim for leaf in numbers):
        return False
    for leaf in numbers:
        require_here(leaf, op)
    return True


def require_here(number: Wrapper, op: Op) -> None:
    """Raise PlacementError where this rank is not in the mesh of a number."""
    mesh = number.spec.mesh
    if mesh.has_rank and mesh.get_coordinate() is None:
        raise PlacementError(
            f"{op}: {number.spec} on {mesh!r} has no value on rank {mesh.get_rank()}, which is "
            "not in its mesh"
        )
