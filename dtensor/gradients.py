"""Gradients of leaves that are reduced when the program asks, together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .comm.caches import Cache
from .dtensor import DTensor
from .mesh.spec import MAX_KEPT, DTensorSpec, contiguous_spec
from .redistribute import redistribute_locals
from .tensor.autograd import gradient_spec
from .tensor.compilers import opaque
from .tensor.wrapper import new_wrapper


@opaque
def reduce_gradients(leaves: Iterable[Tensor]) -> None:
    """Redistribute the gradients of leaves to where the leaves lie, by common collectives.

    For what backward passes within ``partial_gradients()`` have added up. Leaves without a
    gradient, or whose gradient lies there, and plain tensors stay as they are. Every rank must
    pass the same leaves in the same order.

    >>> import torch
    >>> from dtckpt.dtensor import distribute_tensor, init_device_mesh, partial_gradients, Shard
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> weight = distribute_tensor(torch.ones(2, 3), mesh).requires_grad_()
    >>> x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    >>> with partial_gradients():
    ...     for _ in range(2):
    ...         (x @ weight).sum().backward()
    >>> reduce_gradients([weight])
    >>> weight.grad.placements, weight.grad.full_tensor().unique().item()
    ((Replicate(),), 8.0)
    """
    found: list[Tensor] = []
    locals_: list[Tensor] = []
    moves: list[tuple[DTensorSpec, DTensorSpec]] = []
    for leaf in leaves:
        grad = leaf.grad
        if not isinstance(leaf, DTensor) or not isinstance(grad, DTensor):
            continue
        source = grad.spec
        target = _target(source, leaf.spec)
        if target is not source:
            found.append(leaf)
            locals_.append(grad.local)
            moves.append((source, target))
    with torch.no_grad():
        results = redistribute_locals(locals_, moves)
    for leaf, local, (_, target) in zip(found, results, moves, strict=True):
        leaf.grad = new_wrapper(DTensor, local, target, False)


def _target(grad: DTensorSpec, leaf: DTensorSpec) -> DTensorSpec:
    """Return where a gradient goes, remembered: there are many in every step."""
    known: Cache[object, DTensorSpec] = leaf.mesh.cache("gradient_targets", MAX_KEPT)
    target = known.get((grad, leaf))
    if target is None:
        wanted = gradient_spec(leaf).placements
        lies = grad.placements == wanted
        target = grad if lies else contiguous_spec(grad.with_placements(wanted))
        known.put((grad, leaf), target)
    return target
