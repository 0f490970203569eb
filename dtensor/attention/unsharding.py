"""``context_parallel_unshard``: whole tensors from the parts of a sequence that ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dtensor import DTensor, redistribute_many
from ..geometry.placement import HeadTail, Replicate
from ..mesh.resolving import AnyMesh
from .context import buffers_by_dim, one_axis


@torch.no_grad()
def context_parallel_unshard(
    mesh: AnyMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: None = None,
) -> list[Tensor]:
    """Return the whole of plain tensors of which each rank has its part, as ``context_parallel``.

    ``seq_dims`` are the dims of the sequence. The parts are those of ``HeadTail``: results of a
    model within a block of ``context_parallel``, say. All come by one exchange. Every rank of
    ``mesh``, which has one axis, must call. Nothing is recorded for autograd; a DTensor with
    ``HeadTail`` is redistributed with gradients.

    Raises TypeError for what is no plain tensor and for a ``load_balancer`` of torch, which cuts in
    another way; ValueError where buffers and dims are not as many; PlacementError for a mesh of
    several axes, and, on all ranks, for parts that are not those of ``HeadTail``.

    >>> from dtckpt.dtensor import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> context_parallel_unshard(mesh, [torch.arange(3)], [0])
    [tensor([0, 1, 2])]
    """
    ours = one_axis(mesh)
    if load_balancer is not None:
        raise TypeError(
            f"context_parallel_unshard: load_balancer is {type(load_balancer).__name__}; parts are "
            "cut by HeadTail, leave it out"
        )
    given = buffers_by_dim(buffers, seq_dims, "context_parallel_unshard")
    parts = [DTensor.from_local(buffer, ours, [HeadTail(dim)]) for buffer, dim in given]
    if not parts:
        return []
    return [whole.to_local() for whole in redistribute_many(parts, None, [Replicate()])]
