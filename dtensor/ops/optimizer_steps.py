"""Optimizer steps in one kernel, and the check and unscaling of gradients.

Both are pointwise, so one call does the local tensors of all parameters, on whatever meshes they
lie, and the plain ones. Where and how a parameter lies decides it for its gradient and states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dtckpt.errors import PlacementError

from ..comm.reductions import all_reduce
from ..mesh.spec import DTensorSpec
from ..redistribute import redistribute_local, redistribute_locals
from ..tensor.schemas import Op
from ..tensor.views.copied_view import refuse_lost_writes
from ..tensor.views.irregular import store
from ..tensor.wrapper import Wrapper
from .engine.table import across_meshes

aten = torch.ops.aten

GRADIENTS = 1
"""Place of the gradients among the lists of a step; the parameters come first."""


class LocalLists:
    """The local tensors of one call; those that had to be copies are written back."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._copies: list[tuple[Wrapper, Tensor, DTensorSpec]] = []
        self._written: list[Wrapper] = []

    def take(self, wanted: Sequence[tuple[Wrapper, DTensorSpec, bool]]) -> list[Tensor]:
        """Return this rank's parts of tensors under other specs, contiguous, as kernels take them.

        The third value is whether the tensor is written.
        """
        for tensor, _, _ in wanted:
            refuse_lost_writes(self._op, tensor)
        own = [tensor.local for tensor, _, _ in wanted]
        moved = redistribute_locals(own, [(tensor.spec, spec) for tensor, spec, _ in wanted])
        found = [local.contiguous() for local in moved]
        for (tensor, spec, is_written), here, local in zip(wanted, own, found, strict=True):
            if is_written:
                self._written.append(tensor)
                if local is not here:
                    self._copies.append((tensor, local, spec))
        return found

    def write_back(self) -> None:
        """Write what was computed on copies to the tensors that they stand for."""
        computed = redistribute_locals(
            [found for _, found, _ in self._copies],
            [(spec, tensor.spec) for tensor, _, spec in self._copies],
        )
        for (tensor, _, _), local in zip(self._copies, computed, strict=True):
            store(tensor, local)
        increment_version(self._written)  # which torch does not do for these operators


def fused_step(op: Op, *args: Sequence[Tensor], **kwargs: Any) -> None:
    """Run a step: parameters, gradients and states in lists, numbers by name.

    Raises PlacementError where a gradient or state has not the mesh and shape of its parameter.
    """
    taken = LocalLists(op)
    lists: list[list[Tensor]] = [[] for _ in args]
    places: list[tuple[list[Tensor], int]] = []
    wanted: list[tuple[Wrapper, DTensorSpec, bool]] = []
    for index, parameter in enumerate(args[0]):
        if isinstance(parameter, Wrapper) and _is_elsewhere(parameter.spec):
            continue
        for place, (many, out) in enumerate(zip(args, lists, strict=True)):
            if not many:  # a state that this optimizer does not keep
                continue
            tensor = many[index]
            spec = _wanted(op, parameter, tensor)
            if isinstance(tensor, Wrapper) and spec is not None:
                places.append((out, len(out)))
                # Gradients are written only to be unscaled.
                is_written = place != GRADIENTS or kwargs.get("grad_scale") is not None
                wanted.append((tensor, spec, is_written))
            out.append(tensor)
    for (out, i), local in zip(places, taken.take(wanted), strict=True):
        out[i] = local
    if lists[0]:
        op(*lists, **{name: _number(value) for name, value in kwargs.items()})
    taken.write_back()


def _wanted(op: Op, parameter: Tensor, tensor: Tensor) -> DTensorSpec | None:
    """Return the spec in which a gradient or state is used; None for plain ones."""
    lead = parameter.spec if isinstance(parameter, Wrapper) else None
    if not isinstance(tensor, Wrapper):
        if lead is None or tensor.ndim == 0:
            return None
    elif tensor.ndim == 0 and parameter.ndim > 0:  # a count of steps
        return tensor.spec.replicated()
    elif (
        lead is not None
        and lead.mesh.same_ranks_as(tensor.spec.mesh)
        and lead.shape == tensor.shape
    ):
        return tensor.spec.with_placements(lead.reduced().placements)
    raise PlacementError(
        f"{op}: a gradient or state of {_described(parameter)} is {_described(tensor)}; it must be "
        "distributed where the parameter is, on the same mesh and with the same shape"
    )


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, Wrapper):
        return f"{tensor.spec} on {tensor.spec.mesh!r}"
    return f"a plain tensor of shape {list(tensor.shape)}"


def _number(value: Any) -> Any:
    """Return a setting of a step; a tensor of one element may be distributed, too."""
    if not isinstance(value, Wrapper):
        return value
    return redistribute_local(value.local, value.spec, value.spec.replicated())


def _is_elsewhere(spec: DTensorSpec) -> bool:
    return spec.box is None and spec.mesh.has_rank


@across_meshes(aten._amp_foreach_non_finite_check_and_unscale_.default)
def check_and_unscale(
    gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor
) -> None:
    """Unscale gradients, and set ``found_inf`` on all ranks where one of them finds no number."""
    op = aten._amp_foreach_non_finite_check_and_unscale_.default
    taken = LocalLists(op)
    ours = [g for g in gradients if isinstance(g, Wrapper)]
    here = [g for g in ours if not _is_elsewhere(g.spec)]
    locals_ = taken.take([(g, g.spec.reduced(), True) for g in here])
    locals_ += [g for g in gradients if not isinstance(g, Wrapper)]
    found = _number(found_inf)
    if locals_:
        op(locals_, found, _number(inverse_scale))
    taken.write_back()
    for mesh in dict.fromkeys(g.spec.mesh for g in here):
        for axis in range(mesh.ndim):
            if mesh.shape[axis] > 1:
                flag = all_reduce((found != 0).to(torch.int32), "max", mesh.peers((axis,)))
                found.copy_(flag)


for _name in ("adagrad", "adam", "adamw", "sgd"):
    for _overload in ("default", "tensor_lr"):
        _op = getattr(getattr(aten, f"_fused_{_name}_"), _overload)
        across_meshes(_op)(partial(fused_step, _op))
