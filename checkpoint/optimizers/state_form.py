"""The form of new optimizer state: plain or distributed, and how it is laid out.

The checkpoint says what state was, and what its parameter was. State that lay as its parameter lies
as that does now. State that was plain beside a distributed parameter, as of optimizers that gather,
is plain again. Nothing is told from shapes where the checkpoint knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.errors import PlacementError

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.placement import Placement, Ragged, Replicate, Shard, SplitPlacement
from ..files.stored_tensor import StoredTensor
from ..tensors.dtensors import is_dtensor, layout_of
from ..tensors.memory_order import empty_in_order, strides_in_order
from ..tensors.subclasses import has_subclass_shard, is_subclass


@dataclass(frozen=True, slots=True)
class StateForm:
    """Which form state of one parameter gets."""

    param: torch.Tensor
    saved: StoredTensor | None
    """The parameter in the checkpoint, where that is known."""
    was_plain: bool | None
    """Whether the parameter was plain when it was saved; None where nothing tells."""

    @classmethod
    def of(
        cls, param: torch.Tensor, saved: StoredTensor | None, state: Iterable[StoredTensor]
    ) -> StateForm:
        """Return the form of state of a parameter, of which all saved ``state`` is given."""
        told = None if saved is None else saved.is_plain
        if told is None and any(tensor.is_plain is False for tensor in state):
            told = False  # beside plain parameters there is no distributed state
        return cls(param, saved, told)

    def is_plain(self, held: Any, saved: StoredTensor, shape: tuple[int, ...]) -> bool:
        """Whether state beside a plain parameter is there already, as it is to be filled."""
        if not isinstance(held, torch.Tensor) or held.shape != shape:
            return False
        if held.dtype != getattr(torch, saved.dtype.torch_name) or is_dtensor(self.param):
            return False
        return type(held) is torch.Tensor or not (is_dtensor(held) or is_subclass(held))

    def empty(self, saved: StoredTensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor to load saved state into; ``shape`` is what the state must have."""
        dtype = getattr(torch, saved.dtype.torch_name)
        order = saved.order if len(saved.shape) == len(shape) else None
        param = self.param
        if is_subclass(param):  # what it makes of empty_like is up to the class
            return empty_in_order(shape, order, dtype, param.device if shape else "cpu")
        if not is_dtensor(param):
            if shape == tuple(param.shape) and order is None:
                return torch.empty_like(param, dtype=dtype, requires_grad=False)
            device = param.device if shape == tuple(param.shape) else "cpu"
            return empty_in_order(shape, order, dtype, device)
        if saved.is_plain and self.was_plain is False:
            local: Any = param
            device = local.to_local().device if shape else "cpu"
            return empty_in_order(shape, order, dtype, device)
        lies_alike = shape == tuple(param.shape) and self._lay_alike(saved)
        if lies_alike and order is None:
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        if not shape and saved.is_plain is not False:
            return torch.empty(shape, dtype=dtype, device="cpu")  # a step counter
        live = layout_of("", param)
        if live is None:  # of placements that have no name here: whole on every rank
            return param.new_empty(shape, dtype=dtype)
        placements = live.placements if lies_alike else self._placements(saved, live, len(shape))
        return empty_on_mesh(param, Layout(live.mesh, placements, shape), dtype, order)

    def _lay_alike(self, saved: StoredTensor) -> bool:
        """Whether state lay as its parameter, as far as that is known."""
        beside = self.saved
        if beside is None or None in (beside.is_plain, saved.is_plain):
            return True
        return beside.is_plain == saved.is_plain and beside.layout == saved.layout

    def _placements(self, saved: StoredTensor, live: Layout, ndim: int) -> tuple[Placement, ...]:
        """Return the placements of state whose placements were not those of its parameter.

        They are those of the save if the mesh has the same shape, or if it has as many axes and the
        parameter has its placements of the save. Else the axes that cut the parameter now cut the
        same dims of the state, if those were cut.
        """
        was = saved.layout
        if not isinstance(was, Layout):
            return (Replicate(),) * live.mesh.ndim
        beside = None if self.saved is None else self.saved.layout
        moved = isinstance(beside, Layout) and beside.placements == live.placements
        if was.mesh.shape == live.mesh.shape or (moved and was.mesh.ndim == live.mesh.ndim):
            return tuple(
                placement if count == before else _for_any_count(placement)
                for placement, before, count in zip(
                    was.placements, was.mesh.shape, live.mesh.shape, strict=True
                )
            )
        cut = {p.dim for p in was.placements if isinstance(p, SplitPlacement)}
        return tuple(
            placement
            if isinstance(placement, SplitPlacement)
            and placement.dim in cut
            and placement.dim < ndim
            else Replicate()
            for placement in live.placements
        )


def _for_any_count(placement: Placement) -> Placement:
    """Return a placement on an axis of another size: one without the sizes of all parts."""
    return Shard(placement.dim) if isinstance(placement, Ragged) else placement


def empty_on_mesh(
    param: Any, layout: Layout, dtype: torch.dtype, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a distributed tensor of the class of ``param``, on its mesh; nobody is asked.

    ``order`` is that of its dims in memory, if it is not row-major.
    """
    from ...dtensor import dtensor as ours  # loads all of torch.distributed.tensor

    mesh: Any = param.device_mesh
    here = mesh.get_coordinate()
    whole: dict[str, Any] = {
        "shape": torch.Size(layout.shape),
        "stride": strides_in_order(layout.shape, order),
    }
    if here is None:
        local = torch.empty(0, dtype=dtype, device=mesh.device_type)
    else:
        sizes = layout.box(tuple(here)).sizes
        local = empty_in_order(sizes, order, dtype, mesh.device_type)
    if isinstance(param, ours.DTensor):
        return ours.DTensor.from_local(local, mesh, layout.placements, run_check=False, **whole)
    from torch.distributed.tensor import DTensor

    from ...dtensor.mesh.torch_layouts import placements_to_torch

    try:
        placements = placements_to_torch(layout)
    except PlacementError:  # torch has none of the kind
        return param.new_empty(layout.shape, dtype=dtype)
    return DTensor.from_local(local, mesh, placements, run_check=False, **whole)


def wrapped_as(param: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor that lies as ``param``, of which ``local`` is this rank's part.

    Nobody is asked.
    """
    from ...dtensor import dtensor as ours  # loads all of torch.distributed.tensor

    kind: Any = ours.DTensor
    arguments: dict[str, Any] = {"shape": param.shape, "stride": param.stride()}
    if not isinstance(param, kind):
        from torch.distributed.tensor import DTensor

        kind, arguments = DTensor, {**arguments, "run_check": False}
    made = kind.from_local(local, param.device_mesh, param.placements, **arguments)
    # Torch makes a view of it, of which classes may note less than they know.
    made._local_tensor = local
    return made


def empty_as_saved(saved: StoredTensor, device: torch.device | str) -> torch.Tensor:
    """Return a new plain tensor of the shape, dtype and order in memory of a saved one."""
    dtype = getattr(torch, saved.dtype.torch_name)
    return empty_in_order(saved.shape, saved.order, dtype, device)


def local_device(param: Any) -> torch.device:
    """Return where the elements of a parameter lie that this rank has."""
    return param.to_local().device if is_dtensor(param) else param.device


def is_whole(param: Any) -> bool:
    """Whether this rank, as all others, holds all of a distributed parameter."""
    layout = layout_of("", param)
    if layout is None:
        return False
    pairs = zip(layout.placements, layout.mesh.shape, strict=True)
    return all(placement == Replicate() or count == 1 for placement, count in pairs)


def are_of_one_form(held: Any, made: torch.Tensor) -> bool:
    """Whether a tensor that is there can be filled in the place of a new one."""
    if is_subclass(held) or has_subclass_shard(held):
        return False
    if not isinstance(held, torch.Tensor) or (held.dtype, held.shape) != (made.dtype, made.shape):
        return False
    if not is_dtensor(made):
        return not is_dtensor(held)
    if type(held) is not type(made):
        return False
    one: Any = held
    other: Any = made
    return one.device_mesh == other.device_mesh and one.placements == other.placements
