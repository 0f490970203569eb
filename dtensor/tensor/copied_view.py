"""Views in name only: made from a copy, because the viewed tensor had to be moved to be viewed.

Such a view does not follow the tensor, so it must not be read once the tensor has been written.
Torch counts the writes to a tensor and all of its views together, which tells that. A write to the
view is brought to the tensor where it is known which elements those are, and refused elsewhere.
"""

# pyright: reportPrivateUsage=false
# What ties a view to its tensor is set on tensors of users, and known to this file alone.

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..mesh.spec import DTensorSpec
from ..redistribute import redistribute_local
from ..torch_private import num_writes
from .schemas import Op
from .wrapper import Wrapper, new_wrapper

aten = torch.ops.aten

# The storage of the attribute that the class below guards.
_LOCAL: Any = vars(Wrapper)["local"]

LINKS = frozenset({"_num_writes", "_local_viewed", "_origin"})
"""Attributes that tie a tensor to the one that it is a view of."""


class CopiedView(Wrapper):
    """A wrapper whose local tensor is read only as long as it is what it was copied from."""

    _num_writes: int | None
    """Writes to the viewed tensor before this view was made; None where torch counts none."""
    _local_viewed: tuple[Tensor, int | None]
    """The local tensor that was viewed, with the writes to it that went past its wrapper."""

    @property
    def local(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        local, num_local_writes = self._local_viewed
        # Fewer writes: a view made below autograd, inside of an operator, where torch counts none.
        is_stale = self._num_writes is not None and num_writes(self) > self._num_writes
        if is_stale or _count(local) != num_local_writes:
            raise PlacementError(
                f"this view of a DTensor ({self.spec}) is a copy, since the tensor had to be "
                "redistributed to be viewed, and the tensor was written since; view it again"
            )
        return _LOCAL.__get__(self)

    @local.setter
    def local(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, value)

    _local_tensor = local  # pyright: ignore[reportAssignmentType]


def mark_copied(view: Tensor, viewed: Tensor) -> None:
    """Make a new view of ``viewed`` one in name only."""
    if isinstance(view, Wrapper) and isinstance(viewed, Wrapper):
        copied = _as_copied(view)
        if isinstance(viewed, CopiedView):
            copied._num_writes, copied._local_viewed = viewed._num_writes, viewed._local_viewed
        else:
            copied._num_writes = _count(viewed)
            copied._local_viewed = (viewed.local, _count(viewed.local))


def _count(tensor: Tensor) -> int | None:
    """Return the writes to a tensor and its views; inference tensors have no counter."""
    return None if torch.is_inference(tensor) else num_writes(tensor)


def _as_copied(tensor: Wrapper) -> CopiedView:
    tensor.__class__ = tensor.copied_view
    return cast(CopiedView, tensor)


def forget_viewed(tensor: Any, cls: type[Wrapper]) -> None:
    """Make a tensor that gets other data one of ``cls``, and no view of what it was one of."""
    if isinstance(tensor, CopiedView):
        cast(Any, tensor).__class__ = cls
    for link in LINKS:
        vars(tensor).pop(link, None)


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor that a view was made of by a move, and the call that made it."""

    viewed: Callable[[], Wrapper | None]
    op: Op
    args: tuple[Any, ...]
    """What follows the tensor."""

    def write(self, values: Tensor) -> None:
        """Write the values of the view to the viewed tensor."""
        viewed = self.viewed()
        if viewed is None:
            return
        if self.op is aten.diagonal.default:
            viewed.copy_(aten.diagonal_scatter.default(viewed, values, *self.args))
        elif self.op is aten.as_strided.default:
            viewed.copy_(aten.as_strided_scatter.default(viewed, values, *self.args))
        else:
            viewed.copy_(aten.reshape.default(values, list(viewed.shape)))


def remember_origin(view: Any, viewed: Any, op: Op, args: tuple[Any, ...]) -> None:
    """Remember where the elements of a view come from that was made by moving its tensor.

    Nobody is to write to both the argument and the result of ``_unsafe_view``, but for operators
    of torch that have an ``out=`` tensor written through it.
    """
    if op is aten._unsafe_view.default:
        view._origin = Origin(weakref.ref(viewed), op, args)
    elif isinstance(view, CopiedView) and op in (aten.view.default, aten.diagonal.default):
        view._origin = Origin(lambda: viewed, op, args)


def move_values(
    tensor: Wrapper, op: Op, args: tuple[Any, ...], values: Tensor, spec: DTensorSpec
) -> None:
    """Give a tensor the values and the spec of a moved view of it, as part of an operator in place.

    Its memory stays behind for its other views, which see what is written to it.
    """
    former = new_wrapper(type(tensor), tensor.local, tensor.spec, False)
    copied = _as_copied(tensor)
    count = _count(tensor)
    copied._num_writes = None if count is None else count + 1
    copied._local_viewed = (former.local, _count(former.local))
    copied._origin = Origin(lambda: former, op, args)
    copied.local, copied.spec = values.clone(), spec


def can_be_written(view: Any) -> bool:
    """Whether a tensor is a view in name only of which it is known where writes to it go."""
    return isinstance(view, CopiedView) and view._origin is not None


def write_view(view: CopiedView, values: Wrapper) -> None:
    """Write to a view in name only and to the viewed tensor, as part of an operator in place."""
    view._origin.write(values)
    _LOCAL.__get__(view).copy_(redistribute_local(values.local, values.spec, view.spec))
    if view._num_writes is not None:  # torch counts this write once the operator has run
        view._num_writes = num_writes(view) + 1


def write_past(tensor: Tensor, values: Tensor) -> None:
    """Write what a tensor that takes results got to the tensor that it was made of by a move."""
    if isinstance(tensor, Wrapper) and tensor._origin and not isinstance(tensor, CopiedView):
        tensor._origin.write(values)


def refuse_lost_writes(op: object, tensor: Tensor) -> None:
    """Raise PlacementError before an operator writes to a view in name only."""
    if isinstance(tensor, CopiedView):
        raise PlacementError(
            f"{op} writes to a view of a DTensor that had to be redistributed or copied to be "
            "viewed, so the write would not reach the viewed tensor; clone() the view, or write to "
            "the tensor"
        )
