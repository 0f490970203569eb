"""Parts that lie in memory otherwise than the strides of the whole say.

``from_local`` takes the memory that it is given. Where that does not fit the strides that all ranks
know, kernels get a copy that does, what is written goes back, and a view that the memory does not
allow is made of such a copy whenever it is read. No other rank has to know.
"""

# pyright: reportPrivateUsage=false
# What ties a part to its memory is set on tensors of users, and known to this file alone.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...mesh.spec import DTensorSpec
from ...torch_private import base_of
from ..wrapper import Wrapper, fits, new_wrapper

# The storage of the attribute that the class below guards.
_LOCAL: Any = vars(Wrapper)["local"]

View = Callable[[Tensor], Tensor]


class Irregular(Wrapper):
    """A wrapper whose local tensor does not fit the strides of its spec."""

    _viewed_as: tuple[DTensorSpec, tuple[View, ...]] | None = None
    """For a view that the memory does not allow: the spec of what has the memory, and what makes
    the view of that."""

    @property
    def local(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return memory_of(self) if self._viewed_as is None else regular_local(self)

    @local.setter
    def local(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, value)

    _local_tensor = local  # pyright: ignore[reportAssignmentType]


class Doubts:
    """Whether the part of any tensor of this process may ever have been irregular.

    While there was none, nobody asks tensors for their bases, which takes long for ``detach``.
    """

    exist = False


def doubt(tensor: Wrapper) -> None:
    """Note that the part of some rank may be irregular."""
    tensor.may_be_irregular = Doubts.exist = True


def may_be_irregular(tensor: Wrapper) -> bool:
    """Return whether some rank's part may be irregular, by what all ranks know."""
    if tensor.may_be_irregular or isinstance(tensor, Irregular):
        return True
    return Doubts.exist and getattr(base_of(tensor), "may_be_irregular", False)


def keep_doubt(made: Any, source: Any) -> None:
    """Note that a tensor's part may be irregular where that of its source may be.

    Views need no note: their base has it. ``detach`` and ``.data`` give tensors without a base.
    """
    if may_be_irregular(source):
        doubt(made)


def part(cls: type[Wrapper], local: Tensor, spec: DTensorSpec) -> Wrapper:
    """Return a tensor of a class; an irregular one where ``local`` does not fit the spec."""
    made = new_wrapper(cls, local, spec, False)
    if not fits(local, spec):
        made.__class__ = cls.irregular
    return made


def fitting_copy(local: Tensor, spec: DTensorSpec) -> Tensor:
    """Return a dense copy of a part whose dims are ordered as those of the whole."""
    if spec.is_row_major:
        return local.clone(memory_format=torch.contiguous_format)
    order = sorted(range(spec.ndim), key=lambda d: (-spec.stride[d], d))
    made = local.new_empty([local.shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(spec.ndim)]).copy_(local)


def memory_of(tensor: Wrapper) -> Tensor:
    """Return the local tensor that has the memory, of which ``local`` may have to be a copy."""
    return _LOCAL.__get__(tensor) if isinstance(tensor, Irregular) else tensor.local


def share_memory(tensor: Any, other: Irregular) -> None:
    """Make a tensor of the same spec hold the memory of an irregular one."""
    tensor.__class__ = tensor.irregular
    tensor.local, tensor._viewed_as = memory_of(other), other._viewed_as


def regular_local(tensor: Tensor) -> Tensor:
    """Return what kernels take for a tensor: its local tensor, or a copy that fits the spec."""
    if not isinstance(tensor, Irregular):
        return tensor.local if isinstance(tensor, Wrapper) else tensor
    memory, viewed = memory_of(tensor), tensor._viewed_as
    if viewed is None:
        return fitting_copy(memory, tensor.spec)
    return _apply(viewed[1], fitting_copy(memory, viewed[0]))


def store(tensor: Wrapper, values: Tensor) -> None:
    """Write the values of a part to the memory that it lies in."""
    memory = memory_of(tensor)
    viewed = tensor._viewed_as if isinstance(tensor, Irregular) else None
    if viewed is None:
        memory.copy_(values)
        return
    whole = fitting_copy(memory, viewed[0])
    _apply(viewed[1], whole).copy_(values)
    memory.copy_(whole)


def views_of(tensor: Wrapper, run: Callable[[Tensor], Any], specs: Any) -> Any:
    """Return the views that ``run`` makes of the part of a tensor which may be irregular.

    Where the memory does not allow a view, it is made of a copy whenever it is needed.
    """
    memory, cls = memory_of(tensor), tensor.ordinary
    source, views = getattr(tensor, "_viewed_as", None) or (tensor.spec, ())
    given = run(regular_local(tensor) if views else memory)
    found = list(given) if isinstance(given, list | tuple) else [given]
    made: list[Wrapper] = []
    for index, (local, spec) in enumerate(zip(found, specs, strict=True)):
        if not views and _shares_memory(local, memory):
            made.append(part(cls, local, spec))
            continue
        view: Any = new_wrapper(cls, memory, spec, False)
        view.__class__ = cls.irregular
        view._viewed_as = (source, (*views, _picking(run, index)))
        made.append(view)
    return type(given)(made) if isinstance(given, list | tuple) else made[0]


def _picking(run: Callable[[Tensor], Any], index: int) -> View:
    def pick(tensor: Tensor) -> Tensor:
        given = run(tensor)
        return given[index] if isinstance(given, list | tuple) else given

    return pick


def _apply(views: tuple[View, ...], tensor: Tensor) -> Tensor:
    for view in views:
        tensor = view(tensor)
    return tensor


def _shares_memory(view: Tensor, memory: Tensor) -> bool:
    # To ask for addresses may copy.
    return view.numel() == 0 or view.untyped_storage() is memory.untyped_storage()
