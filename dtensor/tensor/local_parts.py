"""What ranks hold of a tensor, taken for its parts: which tensor that is, and whether they fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..comm.collectives import broadcast, to_bytes
from ..comm.message_parts import has_own_operators
from ..comm.reductions import all_reduce
from ..geometry.layout import Coordinate, Layout
from ..geometry.placement import Placement, Ragged, format_placements
from ..geometry.strides import agreed_strides, part_fits
from ..graphs.calls import record
from ..mesh.device_mesh import DeviceMesh
from ..mesh.rows import gather_rows
from ..mesh.same_mesh import code_of
from ..mesh.spec import DTensorSpec, spec_of
from ..torch_private import NotRecorded, is_traced, is_transformed
from .wrapper import Wrapper

MAX_DIMS = 15
"""Dims that a local tensor may have where its global shape is to be inferred."""


def require_plain(caller: str, tensor: object) -> None:
    """Raise PlacementError for anything but a tensor of one rank: parts of parts mean nothing."""
    if type(tensor) is Tensor:
        if is_transformed(tensor):
            raise PlacementError(
                f"{caller} takes a tensor with values, got one that stands for it within a "
                "transform of torch.func (vmap, grad, jvp ...); make the DTensor before, and pass "
                "it to the function that the transform returns"
            )
        return
    if isinstance(tensor, Wrapper):
        raise PlacementError(
            f"{caller} takes the local tensor of this rank, got the DTensor {tensor.spec}; "
            "redistribute() it, or pass its to_local()"
        )
    if hasattr(tensor, "placements"):
        raise PlacementError(
            f"{caller} takes a plain tensor, got {kind_of(tensor)}; translate a DTensor of torch "
            "with from_torch"
        )
    if not isinstance(tensor, Tensor):
        raise PlacementError(f"{caller} takes a torch.Tensor, got {type(tensor).__name__}")


ALIGNMENT = 64
"""Bytes at a multiple of which new memory begins, on every device."""


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins where one in memory of its own would."""
    return tensor.is_meta or tensor.data_ptr() % ALIGNMENT == 0


def kind_of(value: object) -> str:
    """Return the class of a value, and where that comes from, for messages."""
    return f"{type(value).__name__} of {type(value).__module__}"


def waited(local: Tensor) -> Tensor:
    """Return a tensor of which the values have come: torch's functional collectives do not wait."""
    wait: Any = getattr(local, "trigger_wait", None)
    if wait is None:
        return local
    return local.clone() if local.requires_grad else wait()  # a copy waits, and autograd knows it


def brought(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a local tensor on the mesh's device, itself if it is there; meta tensors stay.

    A collective that still writes to it is waited for.

    Raises PlacementError where this machine has no such device.
    """
    local = waited(local)
    if local.device == mesh.device or local.is_meta:
        return local
    try:
        return local.to(mesh.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise PlacementError(
            f"a tensor on {local.device} cannot be brought to {mesh.device}, where mesh "
            f"{mesh.layout_mesh} lies: {error}"
        ) from error


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor subclass consists of, itself if it is plain."""
    if not has_own_operators(tensor):
        return [tensor]
    described: Any = tensor
    names, _ = described.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def inner_parts(tensor: Tensor) -> str:
    """Return a description of what a tensor subclass consists of; "" for a plain tensor."""
    if not has_own_operators(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return ""
    kind = type(tensor)
    parts = [f"{inner.dtype}{list(inner.shape)}" for inner in inner_tensors(tensor)]
    return f" {kind.__module__}.{kind.__qualname__} of {', '.join(parts)}"


def spec_of_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    *,
    compare: bool,
) -> tuple[DTensorSpec, bool]:
    """Return the spec of a tensor of which every rank holds ``local``, and if strides are agreed.

    Without ``shape`` the sizes of sharded dims are summed over the ranks, and a Ragged without
    sizes gets those that the ranks have: they exchange their local shapes and strides once. Nothing
    is exchanged where both are known, unless ``compare`` asks for it. The strides are then
    row-major, unless ``stride`` is given: those of this rank's part say nothing of others. Raises
    PlacementError, on every rank that took part in an exchange, where a local shape is not that of
    its layout.
    """
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"mesh {mesh.layout_mesh} has {mesh.ndim} axes and needs as many placements, "
            f"got ({format_placements(placements)})"
        )
    own = tuple(local.shape)
    asks_sizes = any(isinstance(p, Ragged) and not p.sizes for p in placements)
    asks_shape = shape is None and any(p.is_shard() for p in placements)
    infers = asks_sizes or asks_shape
    if infers and mesh.has_rank and mesh.get_coordinate() is None:
        raise PlacementError(
            f"from_local: rank {mesh.get_rank()} is not in mesh {mesh.layout_mesh}, and does not "
            "learn the global shape from the ranks that are. Pass shape= on all ranks (and "
            "Ragged(dim, sizes) with its sizes), or call from_local on ranks of the mesh only"
        )
    reported: dict[Coordinate, tuple[int, ...]] = {}
    strides: dict[Coordinate, tuple[int, ...]] = {}
    if compare or infers:
        reported, strides = _local_shapes(local, mesh)
    if infers:
        _require_one_ndim(reported)
    if asks_sizes:
        placements = _with_sizes(placements, mesh, reported)
    if shape is None:
        shape = _summed(placements, reported) if asks_shape else own
    is_agreed = stride is not None or bool(reported) or mesh.layout_mesh.size == 1
    if stride is None and reported and len({*map(len, reported.values()), len(shape)}) == 1:
        parts = [(reported[c], strides[c]) for c in reported]
        stride = agreed_strides(parts, shape)
        is_agreed = all(part_fits(part, shape, stride) for part in parts)
    elif stride is None and is_agreed and own == tuple(shape):
        stride = local.stride()  # of the only rank
    spec = spec_of(mesh, placements, shape, stride, local.dtype)
    if reported:
        _check_shapes(spec.layout, reported)
    else:
        check_local_shape(local, spec)
    return spec, is_agreed


def check_local_shape(local: Tensor, spec: DTensorSpec) -> None:
    """Raise PlacementError where a local tensor is not what this rank holds of ``spec``."""
    if spec.box is None or spec.box.sizes == local.shape:
        return
    here = spec.mesh.get_coordinate()
    if here is not None:
        _check_shapes(spec.layout, {here: tuple(local.shape)}, _NOT_TOLD)


_NOT_TOLD = (
    ". Only this rank knows: a given shape is not compared, and others may wait for it in what "
    "comes next; with run_check=True all ranks raise this"
)


def _local_shapes(
    local: Tensor, mesh: DeviceMesh
) -> tuple[dict[Coordinate, tuple[int, ...]], dict[Coordinate, tuple[int, ...]]]:
    """Return the shapes and the strides of all ranks' local tensors."""
    if is_traced(local):
        raise NotRecorded("what ranks ask each other of their local tensors")
    own, strides = tuple(local.shape), local.stride()
    told = [*_padded(own), *_padded(strides)[1:], code_of(str(local.dtype))]
    rows = gather_rows(told, mesh)
    if len({row[-1] for row in rows.values()}) > 1:
        raise PlacementError(
            f"local tensors have different dtypes (this rank's is {local.dtype}); make them one"
        )
    if any(row[0] > MAX_DIMS for row in rows.values()):
        raise PlacementError(
            f"some local tensor has more than {MAX_DIMS} dims (this rank's has {len(own)}) and "
            "needs an explicit shape="
        )
    shapes = {at: tuple(row[1 : 1 + row[0]]) for at, row in rows.items()}
    first = 1 + MAX_DIMS
    return shapes, {at: tuple(row[first : first + row[0]]) for at, row in rows.items()}


def _padded(shape: tuple[int, ...]) -> list[int]:
    """Return the number of dims and the sizes in as many ints for any shape."""
    sizes = shape[:MAX_DIMS]
    return [len(shape), *sizes] + [0] * (MAX_DIMS - len(sizes))


def _require_one_ndim(reported: dict[Coordinate, tuple[int, ...]]) -> None:
    if len({len(shape) for shape in reported.values()}) > 1:
        raise PlacementError(f"local tensors have different numbers of dims: {_listed(reported)}")


def _with_sizes(
    placements: Sequence[Placement], mesh: DeviceMesh, reported: dict[Coordinate, tuple[int, ...]]
) -> tuple[Placement, ...]:
    """Return placements in which a Ragged without sizes has those that the ranks reported."""
    found = list(placements)
    ndim = len(next(iter(reported.values())))
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Ragged) or placement.sizes:
            continue
        if not -ndim <= placement.dim < ndim:  # the layout will say so
            continue
        dim = placement.dim % ndim
        further = _axes_that_cut(dim, ndim, placements) - {axis}
        pieces = [
            sum(reported[c][dim] for c in _along(further, reported, {axis: index}))
            for index in range(mesh.shape[axis])
        ]
        found[axis] = Ragged(dim, tuple(pieces))
    return tuple(found)


def _summed(
    placements: Sequence[Placement], reported: dict[Coordinate, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the global shape: sizes of dims, summed over the axes that cut them."""
    ndim = len(next(iter(reported.values())))
    axes = [_axes_that_cut(dim, ndim, placements) for dim in range(ndim)]
    return tuple(
        sum(reported[c][dim] for c in _along(axes[dim], reported, {})) for dim in range(ndim)
    )


def _axes_that_cut(dim: int, ndim: int, placements: Sequence[Placement]) -> set[int]:
    return {a for a, p in enumerate(placements) if p.is_shard(dim) or p.is_shard(dim - ndim)}


def _along(
    axes: set[int], coordinates: Iterable[Coordinate], fixed: Mapping[int, int]
) -> Iterator[Coordinate]:
    """Yield the coordinates that differ along ``axes`` only: ``fixed`` says where, else 0."""
    for coordinate in coordinates:
        if all(a in axes or i == fixed.get(a, 0) for a, i in enumerate(coordinate)):
            yield coordinate


def _check_shapes(
    layout: Layout, reported: dict[Coordinate, tuple[int, ...]], rest: str = ""
) -> None:
    wrong = {c: shape for c, shape in reported.items() if layout.box(c).sizes != shape}
    if wrong:
        expected = {c: layout.box(c).sizes for c in wrong}
        raise PlacementError(
            f"local shapes do not fit a tensor of shape {layout.shape} with placements "
            f"({format_placements(layout.placements)}) on mesh {layout.mesh}: expected "
            f"{_listed(expected)}, got {_listed(wrong)}. Shard cuts as torch.chunk does; use "
            "Ragged(dim, sizes) for other sizes, or Ragged(dim) to take those of the local tensors"
            + rest
        )


def _listed(shapes: dict[Coordinate, tuple[int, ...]]) -> str:
    parts = [
        f"{shape} at {coordinate}" for coordinate, shape in itertools.islice(shapes.items(), 4)
    ]
    return ", ".join(parts) + (", ..." if len(shapes) > len(parts) else "")


def check_parts(local: Tensor, spec: DTensorSpec) -> None:
    """Raise PlacementError on every rank where local tensors are not the parts of one tensor.

    Shapes and the values of replicas are compared, which is collective.
    """
    shapes, _ = _local_shapes(local, spec.mesh)
    _check_shapes(spec.layout, shapes)
    _check_replicas(local, spec)


def take_from_first(local: Tensor, spec: DTensorSpec) -> None:
    """Write the values of the first rank along each replicated mesh dim into ``local``.

    Raises PlacementError on every rank, before anything is written, where the local tensors differ
    in more than their values.
    """
    mesh = spec.mesh
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    # Strides of dims of size 1, and of nothing, are anything.
    strides = [n if size > 1 else 1 for n, size in zip(local.stride(), local.shape, strict=True)]
    strides = strides if local.numel() else []
    told = f"strides {strides} requires_grad={local.requires_grad}{inner_parts(local)}"
    copies: dict[Coordinate, set[int]] = {}
    for at, (code,) in gather_rows([code_of(told)], mesh).items():
        part = tuple(0 if p.is_replicate() else i for i, p in zip(at, spec.placements, strict=True))
        copies.setdefault(part, set()).add(code)
    if any(len(codes) > 1 for codes in copies.values()):
        raise PlacementError(
            "from_local(run_check=True): copies of one part differ between ranks in strides, "
            f"requires_grad or class (this rank's: {told}); make them alike"
        )
    inner = [tensor.detach() for tensor in inner_tensors(local.detach())]
    values = inner
    for axis, placement in enumerate(spec.placements):
        if placement.is_replicate() and mesh.shape[axis] > 1:
            values = [broadcast(tensor, 0, mesh.peers((axis,))) for tensor in values]
    if values is not inner:
        for tensor, value in zip(inner, values, strict=True):
            tensor.copy_(value)


def _check_replicas(local: Tensor, spec: DTensorSpec) -> None:
    several = [axis for axis, count in enumerate(spec.mesh.shape) if count > 1]
    axes = [axis for axis in several if spec.placements[axis].is_replicate()]
    bits = to_bytes(local)
    differs = torch.zeros(spec.mesh.ndim, dtype=torch.int32, device=local.device)
    for axis in axes:
        peers = spec.mesh.peers((axis,))
        top = all_reduce(bits, "max", peers)
        differs[axis] = int(not torch.equal(top, all_reduce(bits, "min", peers)))
    for axis in several:
        differs = all_reduce(differs, "max", spec.mesh.peers((axis,)))
    names = [spec.mesh.layout_mesh.axis_names[axis] for axis in axes if differs[axis]]
    if names:
        raise PlacementError(f"run_check: replicas differ along {names} of {spec}")


def taken_for_even(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return a traced local tensor, and the shape of the whole if parts are of one size.

    Ranks do not ask each other while a graph is recorded: one that records anew, since its part has
    another size, would ask alone. The graph asks whenever it runs, and where the parts are not of
    one size all ranks raise PlacementError. Raises NotRecorded for a Ragged, whose sizes are those
    that the ranks have.
    """
    if any(isinstance(placement, Ragged) for placement in placements):
        raise NotRecorded(f"the sizes of parts that lie as ({format_placements(placements)})")
    sizes = [int(size) for size in local.shape]
    for axis, placement in enumerate(placements):
        for dim in range(local.ndim):
            if placement.is_shard(dim):
                sizes[dim] *= mesh.shape[axis]
    shape = tuple(sizes)

    def run(given: list[Tensor]) -> list[Tensor]:
        spec, _ = spec_of_local(given[0], mesh, placements, None, None, compare=False)
        found = spec.shape
        if tuple(found) != shape:
            raise PlacementError(
                f"from_local in a compiled graph takes parts of one size, got those of a tensor "
                f"of shape {tuple(found)} with placements ({format_placements(placements)}) on "
                f"mesh {mesh.layout_mesh}; pass shape=, or a DTensor (use_local_output=False in "
                "the layer before)"
            )
        return _ones(given)

    told = f"parts of {shape} ({format_placements(placements)})"
    key = (id(mesh), shape, tuple(placements), local.dtype)
    (one,) = record(key, told, [local.detach()], run, _ones)
    return local * one, shape  # what is not used is left out of a graph


def _ones(given: list[Tensor]) -> list[Tensor]:
    return [torch.ones((), dtype=given[0].dtype, device=given[0].device)]
