"""Parameters of tensor subclasses that say by themselves what is gathered, as those of float8 do.

A local tensor with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, methods of its class or
attributes of its own, is asked for the tensors to gather, and for the whole parameter that is made
of them, each time. ``out=`` is never passed: every time a new one is made. The values of subclasses
without these are gathered, as plain tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.collectives import all_gather_ints
from ..geometry.placement import Replicate, Shard
from ..mesh.spec import DTensorSpec, spec_of
from .data_axes import DataAxes
from .held import Held
from .policies import MixedPrecisionPolicy

Move = tuple[DTensorSpec, DTensorSpec]


@dataclass(frozen=True, slots=True)
class Extended:
    """What is gathered for one parameter."""

    sources: list[Tensor]
    moves: list[Move]
    metadata: Any

    def whole(self, one: Held, gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the local tensor of the whole parameter."""
        local: Any = one.sharded.local
        made: Any = local.fsdp_post_all_gather(tuple(gathered), self.metadata, dtype)
        name, wanted = one.about.name, one.about.whole.local_shape
        if not isinstance(made, tuple) or not made or not isinstance(made[0], Tensor):
            raise PlacementError(
                f"{name!r}: fsdp_post_all_gather of a {type(local).__name__} must return the whole "
                f"tensor and the tensors that it is made of, got {made!r}"
            )
        whole = made[0]
        if whole.ndim == len(wanted) and whole.shape[:1] > wanted[:1]:
            whole = whole.narrow(0, 0, wanted[0])  # parts of unequal sizes were padded
        if tuple(whole.shape) != tuple(wanted):
            raise PlacementError(
                f"{name!r}: fsdp_post_all_gather of a {type(local).__name__} must return a tensor "
                f"of shape {list(wanted)}, got {list(made[0].shape)}"
            )
        return whole


def extended(
    one: Held, data: DataAxes, policy: MixedPrecisionPolicy, device: torch.device
) -> Extended | None:
    """Return what is gathered for a parameter that says so; None for one that does not.

    Raises PlacementError where it cannot be gathered; every rank calls.
    """
    local: Any = one.sharded.local
    has = [hasattr(local, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
    name, kind = one.about.name, type(local).__name__
    if not any(has):
        return None
    if not all(has):
        raise PlacementError(
            f"{name!r}: a {kind} must have both of fsdp_pre_all_gather and fsdp_post_all_gather"
        )
    if not local.is_meta and local.device != device:
        local = local.to(device, non_blocking=True)
    given, metadata = local.fsdp_pre_all_gather(*_arguments(one, data, policy, local))
    listed: list[Tensor] = [given] if isinstance(given, Tensor) else list(given)
    sources = [tensor.reshape(-1 if tensor.ndim == 0 else tensor.shape) for tensor in listed]
    sources = [tensor.contiguous() for tensor in sources]
    is_padded = _is_padded(one, data, sources)
    moves: list[Move] = []
    for tensor in sources:
        rows = tensor.shape[0] * data.num_shards if is_padded else one.about.whole.local_shape[0]
        meta = (rows, *tensor.shape[1:]), None, tensor.dtype
        cut = spec_of(data.mesh, data.placements(Shard(0)), *meta)
        moves.append((cut, spec_of(data.mesh, (Replicate(),) * data.mesh.ndim, *meta)))
    return Extended(sources, moves, metadata)


def _arguments(
    one: Held, data: DataAxes, policy: MixedPrecisionPolicy, local: Any
) -> tuple[Any, ...]:
    """Return the arguments of ``fsdp_pre_all_gather``, of which older ones take the mesh alone."""
    names = data.mesh.layout_mesh.axis_names[data.num_replicate :]
    mesh = data.mesh if not data.num_replicate else data.mesh[names]
    number = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
    if number == 1:
        return (mesh,)
    if number != 5:
        raise PlacementError(
            f"{one.about.name!r}: fsdp_pre_all_gather of a {type(local).__name__} must take mesh, "
            "or mesh, outer_size, outer_stride, module and mp_policy; got "
            f"{inspect.signature(local.fsdp_pre_all_gather)}"
        )
    size = torch.Size(one.about.whole.local_shape)
    stride = torch.empty(size, device="meta").stride()
    return mesh, size, stride, one.places[0][0], policy


def _is_padded(one: Held, data: DataAxes, sources: Sequence[Tensor]) -> bool:
    """Return whether what is gathered has one size on all ranks; else, the rows of their parts.

    Where the parts of the parameter are of unequal sizes, ranks tell each other the first time, and
    PlacementError is raised on all of them if it is neither.
    """
    dim, shape = one.about.dim, one.about.whole.local_shape
    if dim is None or shape[dim] % data.num_shards == 0:
        return True
    if one.is_padded is None:
        has_rows = dim == 0 and all(
            len(tensor) == one.sharded.spec.local_shape[0] for tensor in sources
        )
        # The hash is of numbers alone, and so the same in all processes.
        told = [int(has_rows), hash(tuple(tuple(one.shape) for one in sources)) % (1 << 62)]
        peers = data.mesh.peers(tuple(range(data.num_replicate, data.mesh.ndim)))
        of_ranks = all_gather_ints(told, peers, data.mesh.device)
        is_padded = len({sizes for _, sizes in of_ranks}) == 1
        if not is_padded and not all(has for has, _ in of_ranks):
            raise PlacementError(
                f"{one.about.name!r} of shape {list(shape)} is cut in {data.num_shards} parts of "
                "unequal sizes along dim "
                f"{dim}: fsdp_pre_all_gather must return tensors of one size on all ranks, or (of "
                f"dim 0) of as many rows as the part has; this rank got "
                f"{[list(tensor.shape) for tensor in sources]} for a part of "
                f"{list(one.sharded.spec.local_shape)}"
            )
        one.is_padded = is_padded
    return one.is_padded
