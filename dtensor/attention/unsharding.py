"""``context_parallel_unshard``: whole tensors from the parts of a sequence that ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..dtensor import DTensor, redistribute_many
from ..geometry.placement import HeadTail, Replicate, Shard
from ..mesh.resolving import AnyMesh
from ..torch_private import restoring_order
from .context import buffers_by_dim, one_axis


@torch.no_grad()
def context_parallel_unshard(
    mesh: AnyMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Any = None,
) -> list[Tensor]:
    """Return the whole of plain tensors of which each rank has its part, as ``context_parallel``.

    ``seq_dims`` are the dims of the sequence. The parts are those of ``HeadTail``: results of a
    model within a block of ``context_parallel``, say. With a ``load_balancer`` of torch they are
    equal chunks of the sequence in its order. All come by one exchange. Every rank of ``mesh``,
    which has one axis, must call. Nothing is recorded for autograd; a DTensor with ``HeadTail`` is
    redistributed with gradients.

    Raises TypeError for what is no plain tensor and for a ``load_balancer`` that has no order;
    ValueError where buffers and dims are not as many; PlacementError for a mesh of several axes,
    and, on all ranks, for parts that are not those of the placement.

    >>> from dtckpt.dtensor import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> context_parallel_unshard(mesh, [torch.arange(3)], [0])
    [tensor([0, 1, 2])]
    """
    ours = one_axis(mesh)
    order = None if load_balancer is None else restoring_order(load_balancer)
    kind = HeadTail if order is None else Shard
    given = buffers_by_dim(buffers, seq_dims, "context_parallel_unshard")
    parts = [DTensor.from_local(buffer, ours, [kind(dim)]) for buffer, dim in given]
    if not parts:
        return []
    wholes = [whole.to_local() for whole in redistribute_many(parts, None, [Replicate()])]
    if order is None:
        return wholes
    return [_restored(whole, dim, order) for whole, (_, dim) in zip(wholes, given, strict=True)]


def _restored(whole: Tensor, dim: int, order: Tensor) -> Tensor:
    """Return a sequence in its own order: one for all of a batch, or one for each of its rows."""
    rows = order.to(whole.device).view(-1, order.shape[-1])
    if len(rows) == 1:
        return whole.index_select(dim, rows[0])
    if len(rows) != whole.shape[0]:
        raise PlacementError(
            f"context_parallel_unshard: the load_balancer has orders for {len(rows)} sequences, "
            f"the batch has {whole.shape[0]}"
        )
    each = zip(whole, rows, strict=True)
    return torch.stack([row.index_select(dim - 1, index) for row, index in each])
