"""Tensors laid out: every rank gets its part, of one rank's values or of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.collectives import broadcast
from ..comm.message_parts import has_own_operators
from ..comm.traffic import asking
from ..geometry.box import Box
from ..geometry.layout import Coordinate
from ..geometry.placement import Ragged, Replicate, Shard, format_placements
from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_rows
from ..mesh.same_mesh import code_of
from ..mesh.spec import DTensorSpec
from ..redistribute import redistribute_local, scatter_local
from .local_parts import inner_parts, inner_tensors

_NO_LEAF = "distribute_tensor: every rank has to distribute leaf tensors; detach() it first"


def agree_on_source(
    tensor: Tensor, mesh: DeviceMesh, placements: object, source_rank: int | None
) -> Coordinate | None:
    """Compare what all ranks of a mesh pass; return the coordinate whose values are sent.

    None where every rank takes its part of its own ``tensor``. Before anything is made of the
    arguments: PlacementError on every rank where they differ, since what follows would hang.
    """
    unfit = _unfit(tensor)
    if source_rank is None or mesh.size() == 1 or (tensor.is_meta and mesh.is_silent):
        _require_fit({(): unfit})
        return None
    if mesh.get_coordinate() is None:
        return None
    source = _source(mesh, source_rank)
    own = "" if unfit else f"{tensor.dtype}{list(tensor.shape)}{inner_parts(tensor)}"
    told = ", ".join(map(repr, placements)) if isinstance(placements, Sequence) else ""
    row = [int(tensor.is_meta), int(tensor.is_leaf), code_of(own), code_of(told), unfit]
    rows = gather_rows(row, mesh)
    if not all(other[1] for other in rows.values()):
        raise PlacementError(_NO_LEAF)
    _require_fit({at: other[4] for at, other in rows.items()})
    _require_alike(rows, 2, source, "tensors", "another shape or dtype", own)
    _require_alike(rows, 3, source, "placements", "others", told)
    return None if rows[source][0] else source


_UNFIT = (
    "",
    "sparse; pass its to_dense()",
    "quantized; pass its dequantize()",
    "nested; pass its to_padded_tensor()",
    "of a subclass without __tensor_flatten__, whose memory only its class knows",
)
"""Kinds of tensors that are not distributed."""


def _unfit(tensor: Tensor) -> int:
    """Return which of `_UNFIT` a tensor is; 0 for none of them."""
    if tensor.is_nested:
        return 3
    if tensor.layout != torch.strided:
        return 1
    if tensor.is_quantized:
        return 2
    return 4 if has_own_operators(tensor) and not hasattr(tensor, "__tensor_flatten__") else 0


def _require_fit(unfit: Mapping[Coordinate, int]) -> None:
    where = [at for at, kind in unfit.items() if kind]
    if where:
        told = _UNFIT[unfit[where[0]]]
        at = f" at coordinates {where[:4]}" if where[0] else ""
        raise PlacementError(f"distribute_tensor: the tensor{at} is {told}")


def _require_alike(
    rows: Mapping[Coordinate, Sequence[int]],
    column: int,
    source: Coordinate,
    what: str,
    difference: str,
    own: str,
) -> None:
    differing = [at for at, row in rows.items() if row[column] != rows[source][column]]
    if differing:
        raise PlacementError(
            f"distribute_tensor: the {what} at coordinates {differing[:4]} have {difference} than "
            f"those at {source}, whose values are sent (this rank has {own}); pass the same on all "
            "ranks"
        )


def scatter_from(tensor: Tensor, spec: DTensorSpec, source: Coordinate | None) -> Tensor:
    """Return this rank's local tensor of ``spec``, in memory of its own.

    The values come from the coordinate ``source``, in one exchange in which it sends to each rank
    what that holds and no more. With None every rank takes its part of its own ``tensor`` and
    nothing is sent.
    """
    device = spec.mesh.device
    if spec.box is None:
        return tensor.new_empty(
            spec.local_shape, device=tensor.device if tensor.is_meta else device
        )
    values = spec.reduced()
    if has_own_operators(tensor):
        return _part_of_subclass(tensor, spec, source)
    if source is not None:
        with asking("broadcast" if spec.layout.num_replicas == spec.mesh.size() else "scatter"):
            sent = _send_parts(tensor.detach(), values, source)
        return redistribute_local(sent, values, spec)
    if not tensor.is_leaf:
        raise PlacementError(_NO_LEAF)
    whole = tensor.detach()
    on = "meta" if whole.is_meta else device
    local = torch.empty(spec.local_shape, dtype=whole.dtype, device=on)
    for held, place in spec.parts():
        local[place.slices].copy_(whole[held.slices])
    return redistribute_local(local, values, spec)


def _part_of_subclass(tensor: Tensor, spec: DTensorSpec, source: Coordinate | None) -> Tensor:
    """Return this rank's part of a tensor subclass, cut by the operators of the subclass.

    What the values consist of is sent whole, since only the subclass knows which elements of its
    inner tensors a part needs.
    """
    if any(type(placement) not in (Shard, Ragged, Replicate) for placement in spec.placements):
        raise PlacementError(
            f"distribute_tensor: a {type(tensor).__name__} is cut by slices of its own, which give "
            f"no ({format_placements(spec.placements)}); use Shard, Ragged or Replicate"
        )
    mesh = spec.mesh
    whole = tensor.detach().to(mesh.device)
    if source is not None:
        whole = whole.clone()  # written below
        position = list(mesh.layout_mesh.coordinates()).index(source)
        peers = mesh.peers(tuple(range(mesh.ndim)))
        with asking("broadcast"):
            for inner in inner_tensors(whole):
                inner.copy_(broadcast(inner, position, peers))
    box = Box.whole(tuple(spec.shape)) if spec.box is None else spec.box
    return whole[box.slices].clone(memory_format=torch.contiguous_format)


def _source(mesh: DeviceMesh, source_rank: int) -> tuple[int, ...]:
    if not 0 <= source_rank < min(mesh.shape):
        raise PlacementError(
            f"src_data_rank={source_rank} is not an index along every axis of mesh "
            f"{mesh.layout_mesh}"
        )
    return (source_rank,) * mesh.ndim


def _send_parts(tensor: Tensor, spec: DTensorSpec, source: tuple[int, ...]) -> Tensor:
    mesh = spec.mesh
    if tensor.is_meta:  # not the source: only shape and dtype count
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
    if spec.layout.num_replicas == mesh.size():
        position = list(mesh.layout_mesh.coordinates()).index(source)
        return broadcast(tensor.to(mesh.device), position, mesh.peers(tuple(range(mesh.ndim))))
    return scatter_local(tensor, mesh.layout_mesh.rank(source), spec)
