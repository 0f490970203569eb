"""``DTensor``: a tensor with the shape of the whole and the memory of this rank's part."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from dtckpt.errors import PlacementError

from .calls.dispatch import dispatch
from .geometry.layout import Layout
from .geometry.placement import Placement, Replicate, format_placements, parse_placements
from .graphs.nodes import CAN_RECORD, NODES
from .mesh.device_mesh import DeviceMesh
from .mesh.resolving import AnyMesh, resolve_mesh
from .mesh.spec import DTensorSpec, spec_of
from .mesh.torch_layouts import AnyPlacement, placements_from_torch
from .redistribute import moves_nothing, require_commuting
from .state_dicts import teach_state_dicts
from .tensor.arguments import collect_tensors
from .tensor.autograd import (
    FromLocal,
    Goal,
    Redistribute,
    RedistributeMany,
    ToLocal,
    is_followed,
    moved,
    moved_together,
)
from .tensor.awaited import Awaited
from .tensor.compilers import opaque
from .tensor.leaf_gradients import PlacedGradients, follow_leaf, place_gradient
from .tensor.local_parts import (
    brought,
    kind_of,
    require_plain,
    spec_of_local,
    take_from_first,
    taken_for_even,
)
from .tensor.protocol import Checkpointable
from .tensor.scattering import agree_on_source, scatter_from
from .tensor.setitem import set_item
from .tensor.traceable import Traceable
from .tensor.views.copied_view import LINKS, CopiedView, forget_viewed, refresh, share_origin
from .tensor.views.irregular import Irregular, doubt, keep_doubt, may_be_irregular, regular_local
from .tensor.views.write_counts import counted_data, join_counts
from .tensor.wrapper import Wrapper
from .torch_private import has_tangent, is_traced, list_by_default, no_torch_function

# torch's setter knows the wrapper only, not the local tensor in it.
_DATA: Any = Tensor.data


@partial(opaque, but=("from_local", "placements", "device_mesh", "global_layout"))
class DTensor(PlacedGradients, Checkpointable, Traceable):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A tensor whose shape is global and whose memory is this rank's part of it.

    Operators compute what one device would. Make one with ``from_local``, ``distribute_tensor`` or
    an operator on another; the constructor takes a local tensor and a spec as they are and is for
    code that has both.

    A view (``x.view(-1)``, ``x[0]``) shares memory with the tensor where every rank can view its
    own part. Where the tensor has to be redistributed first the view is a copy: writes to it reach
    the tensor, and it is copied anew, by all ranks, when it is read after the tensor was written.
    ``to_local`` of such a copy gives memory that no later write reaches.
    """

    # Subclass dispatch happens below autograd only. The stubs know another signature.
    __torch_function__ = no_torch_function()

    __torch_dispatch__ = classmethod(dispatch)  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: AnyMesh | None = None,
        placements: Sequence[AnyPlacement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[AnyPlacement] | None = None,
    ) -> DTensor:
        """Return the tensor of which every rank holds its ``local_tensor``; differentiable.

        The result shares memory with ``local_tensor``, which is copied to the mesh's device first
        if it lies on another one; meta tensors stay. ``placements`` default to Replicate.
        Without ``shape`` the ranks exchange their local shapes once if a dim is sharded, and so
        they do for ``Ragged(dim)``, which takes the sizes that they have. Else nothing is
        exchanged and the local shape is checked against the layout alone. With ``run_check`` the
        ranks compare shapes, strides and ``requires_grad`` of their local tensors, and along mesh
        dims with Replicate the values of the first rank are written into those of the others. The
        gradient arrives with ``grad_placements``, or with ``placements`` where Partial has become
        Replicate.

        Raises PlacementError where placements or shapes do not fit, and for what is no
        local tensor: a DTensor, ours or torch's, or no tensor at all.
        """
        given = (local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements)
        if CAN_RECORD and torch.compiler.is_dynamo_compiling():
            from .graphs.dynamo import run_node

            return run_node("from_local", *given)
        return _from_local(*given)

    def to_local(self, *, grad_placements: Sequence[AnyPlacement] | None = None) -> Tensor:
        """Return this rank's part, which shares memory with the tensor; differentiable.

        The gradient of the result is taken to have ``grad_placements``, or the placements of the
        tensor where Partial has become Replicate.
        """
        if not torch.is_grad_enabled() and not has_tangent(self):
            return self.local
        return cast(Tensor, ToLocal.apply(self, _gradient_placements(grad_placements, self.spec)))

    def full_tensor(self, *, grad_placements: Sequence[AnyPlacement] | None = None) -> Tensor:
        """Return the whole tensor on every rank of the mesh; differentiable.

        It shares memory with the tensor where that is replicated already, as it always is on one
        rank; ``clone()`` what must stay. A rank outside of the mesh gets an empty tensor.
        """
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: AnyMesh | None = None,
        placements: Sequence[AnyPlacement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same values on another mesh or with other placements; differentiable.

        The result is a view where no rank's part changes on a mesh: the placements are equal, or
        differ along axes of one rank only. Everywhere else its values are its own.

        Placements are Replicate by default. The meshes may be of any shapes, on the same ranks, on
        some in common or on none. All ranks of both have to call, those outside of this tensor's
        mesh on the tensor that they have of it, with an empty local part; those outside of
        ``device_mesh`` get such a one.

        ``forward_dtype`` is cast to before anything moves and stays; gradients travel in
        ``backward_dtype`` and arrive in the dtype of this tensor, with its placements, Partial
        ones as Replicate. With ``async_op`` the last collective may still be under way when this
        returns; it is waited for when the local tensor is first needed.

        Raises PlacementError where placements do not fit, and for a mesh taken by name from a
        larger one where that would be another mesh on other ranks.
        """
        refresh(self)
        mesh = _goal_mesh(self, device_mesh)
        ours = resolve_placements(placements, mesh, self.ndim)
        goal = Goal(mesh, ours, forward_dtype, is_awaited=async_op)
        target = goal.of(self.spec)  # impossible ones are refused before autograd
        casts = any(dtype not in (None, self.dtype) for dtype in (forward_dtype, backward_dtype))
        stays = target is self.spec or (
            mesh is self.spec.mesh and not self.is_meta and moves_nothing(self.spec, target)
        )
        if stays and not casts:
            # A view that autograd knows of, so that writes to either are noticed.
            same = cast(DTensor, torch.ops.aten.alias(self))
            if same.requires_grad:
                place_gradient(same)  # as this tensor lies, whose gradient it becomes
            same.spec = target
            return same
        if is_followed(self):
            return cast(DTensor, Redistribute.apply(self, goal, backward_dtype))
        return cast(DTensor, moved(self, goal))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor lies on."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per axis of the mesh."""
        return self.spec.placements

    @property
    def global_layout(self) -> Layout:
        """Mesh, placements and shape as a value without a process group.

        Not called ``layout``, which in torch is the kind of storage.
        """
        return self.spec.layout

    @property
    def data(self) -> Tensor:
        """The tensor without its gradient history; what is assigned brings its own layout."""
        refresh(self)
        made = counted_data(self, _DATA.__get__)
        keep_doubt(made, self)
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Wrapper):
            raise PlacementError(
                f"the data of a DTensor must be a DTensor of dtckpt, got {kind_of(value)}; make it "
                "one with distribute_tensor, DTensor.from_local or from_torch"
            )
        refresh(value)
        local, spec = value.local, value.spec
        _DATA.__set__(self, value)
        forget_viewed(self, DTensor)
        self.local, self.spec = local, spec
        join_counts(self, value)
        share_origin(self, value)
        vars(self).pop("may_be_irregular", None)
        keep_doubt(self, value)
        follow_leaf(self)

    # The stubs call the argument otherwise than torch does.
    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Return the tensor in contiguous memory: itself where all ranks know that it is."""
        if may_be_irregular(self):
            return self.clone(memory_format=memory_format)
        return super().contiguous(memory_format=memory_format)

    def wait(self) -> DTensor:
        """Wait for a collective that ``async_op`` left under way; return the tensor."""
        _ = self.local
        return self

    def tolist(self) -> Any:
        """Return the values as Python numbers; PlacementError unless every rank has them all."""
        return _whole(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array; PlacementError unless every rank has them all."""
        return _whole(self, "numpy").numpy(force=force)

    def __setitem__(self, index: Any, value: Any) -> None:
        if not set_item(self, index, value):
            super().__setitem__(index, value)

    def __format__(self, format_spec: str) -> str:
        if self.ndim or not format_spec:
            return format(str(self), format_spec)
        if self.spec.layout.is_partial:  # one rank may print what the others do not
            raise PlacementError(
                f"{self.spec} is not reduced, and has no value for the format {format_spec!r}; "
                "format its full_tensor(), or item(), which all ranks must call"
            )
        return format(self.item(), format_spec)

    def __copy__(self) -> DTensor:
        if isinstance(self, CopiedView | Irregular):  # keeps what ties it to its memory
            made = cast(DTensor, self.detach().requires_grad_(self.requires_grad))
        else:
            made = DTensor(self.local.detach(), self.spec, requires_grad=self.requires_grad)
        for name, value in self._own_attributes():
            setattr(made, name, value)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() the tensor first")
        local = regular_local(self).detach().clone()
        made = DTensor(local, self.spec, requires_grad=self.requires_grad)
        memo[id(self)] = made
        for name, value in self._own_attributes():
            setattr(made, name, copy.deepcopy(value, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def _own_attributes(self) -> list[tuple[str, Any]]:
        """Return what was set on the tensor, such as the mark of a Parameter."""
        return [(name, value) for name, value in self.__dict__.items() if name not in LINKS]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled are this rank's part and what it is of; loaded elsewhere, that is an error."""
        spec, mesh = self.spec, self.device_mesh
        what_it_is_of = (
            mesh,
            format_placements(spec.placements),
            tuple(spec.shape),
            tuple(spec.stride),
            mesh.get_coordinate() if mesh.has_rank else None,
        )
        local = regular_local(self).detach()
        own = dict(self._own_attributes())
        return _unpickled, (local, *what_it_is_of, self.requires_grad, own)

    def __repr__(self, **_: Any) -> str:
        """Return what this rank holds, as ``str`` does; it never communicates.

        Of a Partial tensor that is a term: ``full_tensor()``, on all ranks, returns values.
        """
        if self.spec.layout.is_partial:
            return self._described(f"local_terms={self.local!r}, not reduced: see full_tensor()")
        return self._described(f"local={self.local!r}")

    def _described(self, local: str) -> str:
        placements = format_placements(self.placements)
        mesh = str(self.device_mesh.layout_mesh)
        return (
            f"DTensor({local}, shape={list(self.shape)}, placements=({placements}), mesh={mesh!r})"
        )


def _unpickled(
    local: Tensor,
    mesh: DeviceMesh,
    placements: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> DTensor:
    """Return a DTensor that was pickled; PlacementError on a rank that holds another part of it."""
    here = mesh.get_coordinate() if mesh.has_rank else None
    if here != coordinate:
        raise PlacementError(
            f"a pickled DTensor of shape {list(shape)} holds the part at {coordinate} of {mesh}, "
            f"and this rank is at {here}. Load on each rank what it has saved itself, with as many "
            "ranks; or save with dtckpt.checkpoint.save, which loads on any other mesh"
        )
    spec = spec_of(mesh, parse_placements(placements), shape, stride, local.dtype)
    made = DTensor(local, spec, requires_grad=requires_grad)
    vars(made).update(attributes)  # and no more than that: they come from a file
    return made


# It makes a tensor of a part and of numbers: a file may call it.
torch.serialization.add_safe_globals([_unpickled])


@opaque
class _Converted(DTensor):
    """A DTensor that another one became, by a change of its class."""

    def __new__(
        cls, local_tensor: Tensor, spec: DTensorSpec, *, requires_grad: bool = False
    ) -> DTensor:
        """Return a DTensor: what is made in the likeness of such a one is ordinary."""
        return DTensor(local_tensor, spec, requires_grad=requires_grad)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(DTensor, func, types, args, kwargs)


class CopiedDTensor(CopiedView, _Converted):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A view that had to be copied; see ``DTensor``."""


class IrregularDTensor(Irregular, _Converted):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A DTensor whose local part does not fit the strides of the whole."""


@opaque
class AwaitedDTensor(Awaited, _Converted):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A DTensor whose local part is still on its way."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found: list[Tensor] = []
        collect_tensors([*args, *(kwargs or {}).values()], found)
        for tensor in found:
            if isinstance(tensor, Awaited):
                _ = tensor.local
        return super().__torch_dispatch__(func, types, args, kwargs)


@opaque
def _from_local(
    local_tensor: Tensor,
    device_mesh: AnyMesh | None,
    placements: Sequence[AnyPlacement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[AnyPlacement] | None,
) -> DTensor:
    require_plain("from_local", local_tensor)
    mesh = resolve_mesh(device_mesh)
    local_tensor = brought(local_tensor, mesh)
    ours = resolve_placements(placements, mesh, local_tensor.ndim)
    require_commuting(ours)
    if is_traced(local_tensor) and shape is None and any(p.is_shard() for p in ours):
        local_tensor, shape = taken_for_even(local_tensor, mesh, ours)
    spec, is_agreed = spec_of_local(local_tensor, mesh, ours, shape, stride, compare=run_check)
    if run_check:
        take_from_first(local_tensor, spec)
    grads = _gradient_placements(grad_placements, spec)
    if is_followed(local_tensor):
        made = cast(DTensor, FromLocal.apply(local_tensor, DTensor, spec, grads))
    else:
        given = local_tensor.detach() if local_tensor.requires_grad else local_tensor
        made = DTensor(given.view_as(given), spec)
    if not is_agreed:
        doubt(made)
    return made


NODES["from_local"] = _from_local
DTensor.copied_view = CopiedDTensor
DTensor.irregular = IrregularDTensor
DTensor.ordinary = DTensor
DTensor.awaited = AwaitedDTensor


# Clipping and, on accelerators, optimizers then take lists of them without ``foreach=True``: all
# norms are one reduction, and a step some dozen operators instead of some dozen a parameter.
list_by_default(DTensor)


@opaque
def distribute_tensor(
    tensor: Tensor,
    device_mesh: AnyMesh | None = None,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return ``tensor`` laid out on a mesh, in memory of its own.

    The values are those of the rank with index ``src_data_rank`` along every axis, which sends
    to each rank its part; other ranks give shape and dtype only. With None every rank cuts its
    part from its own tensor. ``placements`` default to Replicate; a leaf's ``requires_grad``
    carries over.

    Raises PlacementError for placements that do not fit, for a DTensor that lies otherwise, and for
    what is neither a plain tensor nor a DTensor of ours.
    """
    mesh = resolve_mesh(device_mesh)
    if isinstance(tensor, Wrapper):
        ours = resolve_placements(placements, mesh, tensor.ndim)
        if tensor.spec.layout != Layout(mesh.layout_mesh, ours, tuple(tensor.shape)):
            what = "placements" if tensor.spec.mesh.same_ranks_as(mesh) else "device mesh"
            raise PlacementError(
                f"{tensor.spec} is distributed already: distribute_tensor does not bring it to a "
                f"different {what}, which redistribute does; expected {mesh!r} and {list(ours)}"
            )
        return cast(DTensor, tensor)
    require_plain("distribute_tensor", tensor)
    source = agree_on_source(tensor, mesh, placements, src_data_rank)
    ours = resolve_placements(placements, mesh, tensor.ndim)
    spec = spec_of(mesh, ours, tensor.shape, None, tensor.dtype)
    local = scatter_from(tensor, spec, source)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


teach_state_dicts(DTensor, distribute_tensor)


def redistribute_many(
    tensors: Sequence[DTensor],
    device_mesh: AnyMesh | None = None,
    placements: Sequence[AnyPlacement] | Sequence[Sequence[AnyPlacement]] | None = None,
) -> list[DTensor]:
    """Return the tensors as ``redistribute`` would, by few collectives; differentiable.

    All that goes between the same ranks goes at once, whatever the tensors' shapes and dtypes.
    ``placements`` are those of all tensors, or one sequence for each of them. Every rank must pass
    the same tensors in the same order. The results have memory of their own.
    """
    each: list[Any] = [placements] * len(tensors)
    if placements and not isinstance(placements[0], Placement | TorchPlacement):
        each = list(placements)
    if len(each) != len(tensors):
        raise PlacementError(f"{len(tensors)} tensors need as many placements, got {len(each)}")
    goals: list[Goal] = []
    for tensor, wanted in zip(tensors, each, strict=True):
        if not isinstance(tensor, Wrapper):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlacementError(
                f"redistribute_many takes DTensors of dtckpt, got {kind_of(tensor)}; make it one "
                "with distribute_tensor, DTensor.from_local or from_torch"
            )
        mesh = _goal_mesh(tensor, device_mesh)
        goal = Goal(mesh, resolve_placements(wanted, mesh, tensor.ndim))
        goal.of(tensor.spec)  # impossible ones are refused before anything moves
        goals.append(goal)
    if any(has_tangent(tensor) for tensor in tensors):
        each = [Redistribute.apply(*pair, None) for pair in zip(tensors, goals, strict=True)]
        return cast("list[DTensor]", each)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(cast("tuple[DTensor, ...]", RedistributeMany.apply(tuple(goals), *tensors)))
    return cast("list[DTensor]", moved_together(tensors, goals))


def _goal_mesh(tensor: DTensor, device_mesh: AnyMesh | None) -> DeviceMesh:
    """Return the mesh that a tensor is redistributed to: its own where that has the same ranks."""
    own = tensor.spec.mesh
    mesh = own if device_mesh is None else resolve_mesh(device_mesh)
    return own if mesh.same_ranks_as(own) else mesh


def _gradient_placements(
    placements: Sequence[AnyPlacement] | None, spec: DTensorSpec
) -> tuple[Placement, ...] | None:
    """Return the placements of a gradient; what does not fit is refused before the backward."""
    if placements is None:
        return None
    ours = resolve_placements(placements, spec.mesh, spec.ndim)
    return spec.with_placements(ours).placements


def resolve_placements(
    placements: Sequence[AnyPlacement] | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """Return placements of ours, Replicate for None; PlacementError for a wrong number of them."""
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if not isinstance(placements, Sequence) or len(placements) != mesh.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlacementError(
            f"placements and mesh dims must have the same length: mesh {mesh.layout_mesh} has "
            f"{mesh.ndim} dims, got {placements!r}"
        )
    return placements_from_torch(placements, mesh.shape, ndim)


def _whole(tensor: DTensor, method: str) -> Tensor:
    layout = tensor.spec.layout
    if not layout.lies_as(Layout.replicated(layout.mesh, layout.shape)):
        raise PlacementError(
            f"{method}() needs the whole tensor on this rank, but its placements are "
            f"({format_placements(tensor.placements)}); call full_tensor() first"
        )
    if tensor.spec.box is None and tensor.device_mesh.has_rank:
        raise PlacementError(
            f"{method}() has no values on rank {tensor.device_mesh.get_rank()}, which is not in "
            f"mesh {tensor.device_mesh.layout_mesh}; call it on ranks of the mesh"
        )
    return tensor.local
