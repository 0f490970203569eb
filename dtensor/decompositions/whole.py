"""Operators that need all values on every rank, and whose results only the values can tell."""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.placement import Replicate
from ..mesh.spec import spec_of
from ..tensor.arguments import collect_tensors, map_tensors, substituted
from ..tensor.wrapper import Wrapper
from .pieces import replicated
from .table import Decomposition, decomposition

aten = torch.ops.aten


def run_whole(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what ``op`` returns for whole tensors, replicated.

    Raises PlacementError on a rank outside of the mesh, which cannot know the shapes.
    """
    leaves: list[Tensor] = []
    collect_tensors([*args, *kwargs.values()], leaves)
    # Random numbers are drawn in the order of memory, which is not the same for all layouts.
    wholes = [local_whole(op, leaf).contiguous() for leaf in leaves]
    first = next(leaf for leaf in leaves if isinstance(leaf, Wrapper))
    mesh, cls = first._spec.mesh, type(first)
    whole_args, whole_kwargs = substituted(args, kwargs, wholes)

    def wrap(made: Tensor) -> Tensor:
        placements = (Replicate(),) * mesh.ndim
        return cls(made, spec_of(mesh, placements, made.shape, made.stride(), made.dtype))

    return map_tensors(wrap, op(*whole_args, **whole_kwargs))


def local_whole(op: Any, leaf: Tensor) -> Tensor:
    """Return all values of a tensor on this rank, for the result of ``op``."""
    if not isinstance(leaf, Wrapper):
        return leaf
    if leaf._spec.box is None:
        raise PlacementError(
            f"{op}({leaf._spec}) has a result whose shape depends on values, and this rank, which "
            "is not in the mesh, has none; call it on ranks of the mesh"
        )
    return replicated(leaf, range(leaf._spec.mesh.ndim))._local_tensor


def _of_wholes(op: Any) -> Decomposition:
    return lambda *args, **kwargs: run_whole(op, *args, **kwargs)


for _op in (
    aten._ctc_loss.Tensor,
    aten._ctc_loss.default,
    aten._ctc_loss_backward.Tensor,
    aten._ctc_loss_backward.default,
    aten._histogramdd_bin_edges.default,
    aten._histogramdd_from_bin_cts.default,
    aten._histogramdd_from_bin_tensors.default,
    aten._segment_reduce_backward.default,
    aten._unique.default,
    aten._unique2.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.segment_reduce.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.unique_dim_consecutive.default,
):
    decomposition(_op)(_of_wholes(_op))
