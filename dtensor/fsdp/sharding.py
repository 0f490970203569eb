"""Where one parameter lies when it is sharded, and when it is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Partial, Placement, Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import DTensorSpec, contiguous_spec, spec_of
from ..mesh.torch_layouts import AnyPlacement, is_placement
from ..redistribute import redistribute_local
from ..tensor.local_parts import require_plain
from ..tensor.wrapper import Wrapper
from .data_axes import DataAxes
from .policies import CPUOffloadPolicy, OffloadPolicy

ShardPlacementFn = Callable[[nn.Parameter], AnyPlacement | None]


@dataclass(frozen=True, slots=True)
class Reductions:
    """How gradients lie while they are reduced."""

    terms: DTensorSpec
    """As ranks have them."""
    scattered: DTensorSpec
    """Summed over the ranks that share a parameter, each of which has its part."""
    result: DTensorSpec
    """Summed over all, as the parameter lies."""


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """One parameter: its specs on the mesh of data and, where it lies on one already, model."""

    name: str
    sharded: DTensorSpec
    whole: DTensorSpec
    """The same over the axes of data; the axes of the model stay."""
    model: DTensorSpec | None
    """The spec of the whole parameter on its own mesh, where it is a DTensor by itself."""
    dim: int | None
    """Which is sharded; None for a scalar."""
    data: DataAxes

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, data: DataAxes, choose: ShardPlacementFn | None
    ) -> ShardedParameter:
        """Return where a parameter is to lie; PlacementError where it cannot."""
        dim = _dim_of(name, parameter, choose)
        if not isinstance(parameter, Wrapper):
            require_plain(f"fully_shard of {name!r}", parameter)
            mesh, model, own = data.mesh, None, ()
        else:
            model = contiguous_spec(parameter.spec)  # as all that is gathered lies in memory
            mesh = _with_model(name, data.mesh, model.mesh)
            own = model.placements
            if model.layout.is_partial:
                raise PlacementError(f"fully_shard: {name!r} has terms to be reduced: {model}")
        sharded = data.placements(Replicate() if dim is None else Shard(dim))
        cuts = [axis for axis, placement in enumerate(own) if placement.is_shard(dim)]
        if dim is not None and cuts:  # the model cuts first
            own, sharded = _after(own, cuts, dim, sharded)
        meta = parameter.shape, None, parameter.dtype
        repeated = (Replicate(),) * data.mesh.ndim
        return cls(
            name,
            spec_of(mesh, (*sharded, *own), *meta),
            spec_of(mesh, (*repeated, *(model.placements if model else ())), *meta),
            model,
            dim,
            data,
        )

    def shard(self, parameter: nn.Parameter, offload: OffloadPolicy) -> nn.Parameter:
        """Return the sharded parameter, of the values that this rank has; nothing is sent."""
        local = parameter.local if isinstance(parameter, Wrapper) else parameter
        local = local.detach()
        if not local.is_meta:
            device = self.sharded.mesh.device
            is_offloaded = isinstance(offload, CPUOffloadPolicy)
            local = local.to("cpu" if is_offloaded else device)
            if is_subclass(local):
                local = self._chunk(local).clone()
            else:
                part = redistribute_local(local, self.whole, self.sharded)
                local = part.clone(memory_format=torch.contiguous_format)
            if is_offloaded and offload.pin_memory and device.type != "cpu":
                local = local.pin_memory()
        else:
            local = local.new_empty(self.sharded.local_shape)
        made = DTensor(local, self.sharded)
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    def _chunk(self, local: Tensor) -> Tensor:
        """Return this rank's part by ``chunk``, which classes of tensors know best."""
        mesh = self.data.mesh
        here = mesh.get_coordinate()
        if self.dim is None or here is None:
            return local
        for axis in range(self.data.num_replicate, mesh.ndim):
            parts = local.chunk(mesh.shape[axis], self.dim)
            empty = parts[0].narrow(self.dim, 0, 0)
            local = parts[here[axis]] if here[axis] < len(parts) else empty
        return local

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the local gradient of the whole parameter, one of the terms of all ranks."""
        if is_subclass(grad):
            return plain_copy(grad)
        if not isinstance(grad, Wrapper):
            return grad
        # A whole parameter that is plain has a distributed gradient beside distributed inputs.
        spec = grad.spec
        target = self.model or spec.with_placements((Replicate(),) * spec.mesh.ndim)
        return redistribute_local(grad.local, spec, target.with_dtype(grad.dtype))

    def reductions(self, op: str, dtype: torch.dtype) -> Reductions:
        """Return how the gradients lie that ranks have of their parts of the batch, and then."""
        own = self.whole.placements[self.data.mesh.ndim :]
        terms = (Partial(op),) * self.data.mesh.ndim
        result = self.sharded.with_dtype(dtype)
        repeated = self.data.num_replicate
        return Reductions(
            self.whole.with_dtype(dtype).with_placements((*terms, *own)),
            result.with_placements((*terms[:repeated], *result.placements[repeated:])),
            result,
        )

    def between_passes(
        self, mesh: DeviceMesh, dtype: torch.dtype
    ) -> tuple[DTensorSpec, DTensorSpec]:
        """Return how the local part of the whole lies on a smaller mesh: cut, and whole."""
        cut: Placement = Replicate() if self.dim is None else Shard(self.dim)
        meta = self.whole.local_shape, None, dtype
        return (
            spec_of(mesh, (cut,) * mesh.ndim, *meta),
            spec_of(mesh, (Replicate(),) * mesh.ndim, *meta),
        )


def is_subclass(local: Tensor) -> bool:
    """Return whether a tensor is of a class of others' that wraps tensors, and has no memory."""
    return not isinstance(local, Wrapper) and hasattr(local, "__tensor_flatten__")


def plain_copy(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of such a class, which knows how to be copied, not sent."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _dim_of(name: str, parameter: nn.Parameter, choose: ShardPlacementFn | None) -> int | None:
    """Return the dim to shard; None for a scalar, which is repeated."""
    if parameter.ndim == 0:
        return None
    chosen: Any = Shard(0) if choose is None else choose(parameter)
    chosen = Shard(0) if chosen is None else chosen
    where = f"for {name!r} of shape {list(parameter.shape)}"
    if not is_placement(chosen) or not chosen.is_shard():
        raise PlacementError(
            f"fully_shard: shard_placement_fn must return Shard(dim) or None, got {chosen!r} "
            f"{where}"
        )
    if not -parameter.ndim <= chosen.dim < parameter.ndim:
        raise PlacementError(
            f"Shard dim {chosen.dim} is invalid for {parameter.ndim}D tensor: shard_placement_fn "
            f"of fully_shard returned {chosen!r} {where}"
        )
    return chosen.dim % parameter.ndim


def _with_model(name: str, data: DeviceMesh, model: DeviceMesh) -> DeviceMesh:
    """Return the mesh of both axes."""
    try:
        return DeviceMesh.concat([data, model])
    except (PlacementError, ValueError) as error:
        raise PlacementError(
            f"fully_shard: {name!r} lies on mesh {model.layout_mesh}, which is no part of one mesh "
            f"with {data.layout_mesh}: make one mesh of all axes and pass parts of it, as "
            "mesh['dp'] here and mesh['tp'] to parallelize_module"
        ) from error


def _after(
    own: tuple[Placement, ...], cuts: list[int], dim: int, data: tuple[Placement, ...]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Return placements in which axes of the model cut a dim before the axes of data do."""
    cutting: list[Any] = [own[axis] for axis in cuts]
    if any(not isinstance(placement, Shard) for placement in cutting):
        return own, data  # a Ragged cuts first anyhow
    ordered = sorted(cuts, key=lambda axis: (cast(Any, own[axis]).order or 0, axis))
    changed, sharded = list(own), list(data)
    for order, axis in enumerate(ordered):
        changed[axis] = Shard(dim, order=order)
    later = [axis for axis, placement in enumerate(data) if placement.is_shard()]
    for order, axis in enumerate(later, len(cuts)):
        sharded[axis] = Shard(dim, order=order)
    return tuple(changed), tuple(sharded)
