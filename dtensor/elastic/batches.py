"""The parts of a batch that a rank needs: groups of elements, each in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.box import Box
from ..geometry.irregular import IrregularLayout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.plain_tensors import fingerprint
from ..redistribute.parts import redistribute_parts
from ..tensor.local_parts import kind_of
from ..tensor.wrapper import Wrapper
from .rounds import Rounds

GroupOf = Callable[[int], Tensor]


def num_groups(tensors: Sequence[Tensor], size: int) -> int:
    """Return how many groups of ``size`` elements a batch has; PlacementError where they differ."""
    if not tensors:
        raise PlacementError("ElasticSteps.step: a step needs the tensors of its batch")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError(
                f"ElasticSteps.step takes tensors, got {kind_of(tensor)}; pass several one by one, "
                "or the indices of elements that each rank loads in the loop"
            )
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(lengths) > 1:
        raise PlacementError(
            f"ElasticSteps.step: tensors of {sorted(lengths)} elements are not of one batch"
        )
    length = lengths.pop()
    if length == 0 or length % size:
        raise PlacementError(
            f"ElasticSteps.step: a batch of {length} elements is not made of groups of {size}; "
            "pass the whole batch, or choose another group="
        )
    return length // size


def describe(tensors: Sequence[Tensor]) -> str:
    """Return what has to be the same on all ranks: kinds of all, values of plain ones."""
    return " ".join(
        str(t.spec)
        if isinstance(t, Wrapper)
        else f"{t.dtype}{list(t.shape)} {fingerprint(t.detach())}"
        for t in tensors
    )


def group_of(tensor: Tensor, size: int, rounds: Rounds, mesh: DeviceMesh) -> GroupOf:
    """Return what gives the groups that this rank needs, of a batch that all ranks have or share.

    The elements of a DTensor are sent to those who need them; every rank has to call.
    """
    if not isinstance(tensor, Wrapper):
        plain = tensor.detach()
        return lambda group: plain[group * size : (group + 1) * size].clone()
    spec = tensor.spec
    if not spec.mesh.same_ranks_as(mesh):
        raise PlacementError(
            f"ElasticSteps.step: the batch lies on mesh {spec.mesh.layout_mesh}, the model on "
            f"{mesh.layout_mesh}"
        )
    rest = tuple(spec.shape[1:])

    def box(group: int) -> Box:
        return Box((group * size, *(0 for _ in rest)), (size, *rest))

    ranks = mesh.layout_mesh
    pieces = [
        (ranks.rank(coordinate), box(group))
        for coordinate in ranks.coordinates()
        for group in set(rounds.needed(coordinate))
    ]
    source = spec.layout
    local = tensor.local.detach()
    held = {part: local[where.slices] for part, where in spec.parts()}
    target = IrregularLayout(tuple(spec.shape), tuple(pieces))
    found = redistribute_parts(held, source, target, mesh)
    return lambda group: torch.clone(found[box(group)])
