"""Views in name only: made from a copy, because the viewed tensor had to be moved to be viewed.

Such a view does not follow the tensor. Torch counts the writes to a tensor and all of its views
together, which tells whether the copy is stale: operators then copy anew, and what reads one rank's
part alone is refused. A write to the view is brought to the tensor that it was made of.
"""

# pyright: reportPrivateUsage=false
# What ties a view to its tensor is set on tensors of users, and known to this file alone.

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import PlacementError, UnsupportedOp

from ...mesh.spec import DTensorSpec
from ...redistribute import redistribute_local
from ...torch_private import num_writes
from ..autograd import placed
from ..schemas import Op
from ..wrapper import Wrapper, new_wrapper
from .irregular import Irregular, memory_of, share_memory
from .write_counts import ATTRIBUTES, total_writes

aten = torch.ops.aten

# The storage of the attribute that the class below guards.
_LOCAL: Any = vars(Wrapper)["local"]

LINKS = frozenset({"_num_writes", "_local_viewed", "_origin", "_viewed_as"}) | ATTRIBUTES
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
        if _is_stale(self) or _count(local) != num_local_writes:
            raise PlacementError(
                f"this view of a DTensor ({self.spec}) is a copy, since the tensor had to be "
                "redistributed to be viewed, and the tensor was written since; view it again"
            )
        return _LOCAL.__get__(self)

    @local.setter
    def local(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, value)

    _local_tensor = local  # pyright: ignore[reportAssignmentType]


def _is_stale(view: CopiedView) -> bool:
    # Fewer writes: a view made below autograd, inside of an operator, where torch counts none.
    return view._num_writes is not None and (total_writes(view) or 0) > view._num_writes


def _count(local: Tensor) -> int | None:
    """Return the writes to a local tensor; inference tensors have no counter."""
    return None if torch.is_inference(local) else num_writes(local)


def _as_copied(tensor: Wrapper) -> CopiedView:
    tensor.__class__ = tensor.copied_view
    return cast(CopiedView, tensor)


def forget_viewed(tensor: Any, cls: type[Wrapper]) -> None:
    """Make a tensor that gets other data one of ``cls``, and no view of what it was one of."""
    if isinstance(tensor, CopiedView | Irregular):
        cast(Any, tensor).__class__ = cls
    for link in LINKS - {"_counter"}:
        vars(tensor).pop(link, None)


@dataclass(frozen=True, slots=True)
class ViewCall:
    """The call that makes a view, but for the tensor that is viewed."""

    op: Op
    args: tuple[Any, ...]
    """What follows the tensor."""
    kwargs: Mapping[str, Any]

    def of(self, viewed: Tensor) -> list[Tensor]:
        """Return what it makes of a tensor."""
        made = self.op(viewed, *self.args, **self.kwargs)
        return list(made) if isinstance(made, list | tuple) else [made]


class Source:
    """What a viewed tensor holds, as it was laid out when it was viewed."""

    __slots__ = ("_cls", "_links", "_local", "_made", "_spec", "_viewed_as")

    def __init__(self, tensor: Wrapper) -> None:
        _ = tensor.local  # waits for it, or raises where that is stale
        self._cls, self._local, self._spec = type(tensor), memory_of(tensor), tensor.spec
        is_copied = isinstance(tensor, CopiedView)
        self._links = (tensor._origin, tensor._local_viewed) if is_copied else None
        self._viewed_as = tensor._viewed_as if isinstance(tensor, Irregular) else None
        self._made: Wrapper | None = None

    def wrapper(self) -> Wrapper:
        """Return a tensor that holds it, whatever became of the one that was viewed."""
        made = self._made
        if made is None:
            made = self._made = new_wrapper(self._cls, self._local, self._spec, False)
            if self._links is not None:
                copied = cast(CopiedView, made)
                copied._origin, copied._local_viewed = self._links
                copied._num_writes = None  # who views it sees whether it is stale
            elif isinstance(made, Irregular):
                made._viewed_as = self._viewed_as
        return made


@dataclass(slots=True)  # not frozen, which would take as long again to make for every such view
class Origin:
    """Where the elements of a view come from."""

    source: Source
    """The viewed tensor, as it was then."""
    call: ViewCall
    index: int
    """Which of the results of the call it is."""
    placements: tuple[Any, ...] | None = None
    """Those that the tensor got to be viewed, if it had to be redistributed."""

    @property
    def viewed(self) -> Wrapper:
        """The viewed tensor, or the view in name only that was viewed."""
        return self.source.wrapper()

    def read(self) -> Tensor:
        """Return the local values that the view has now."""
        if isinstance(self.viewed, CopiedView):
            _copy_anew(self.viewed)
        return cast(Wrapper, self.call.of(self.viewed)[self.index]).local

    def write(self, values: Tensor) -> None:
        """Write the values of the view to the viewed tensor."""
        viewed, op, args = self.viewed, self.call.op, self.call.args
        expanded = set(viewed.spec.expanded_dims)
        if expanded - ({args[0] % viewed.ndim} if op is aten.select.int else set()):
            raise UnsupportedOp(
                f"a write to a view of {viewed.spec}, of which several elements share memory, and "
                "which had to be redistributed or copied to be viewed; redistribute the tensor "
                "before it is expanded, or write to a clone()"
            )
        if op in _RESHAPES:
            viewed.copy_(aten.reshape.default(values, list(viewed.shape)))
        elif op is aten.select.int:
            dim, index = args[0] % viewed.ndim, args[1] % viewed.shape[args[0]]
            rows = aten.slice.Tensor(viewed, dim, index, index + 1)
            rows.copy_(aten.unsqueeze.default(values, dim))
        elif op in _SCATTERS:
            viewed.copy_(_SCATTERS[op](viewed, values, *args, **self.call.kwargs))
        else:
            whole = self._viewable()
            self.call.of(whole)[self.index].copy_(values)
            viewed.copy_(whole)

    def _viewable(self) -> Wrapper:
        """Return a copy of the viewed tensor of which each rank can view its part."""
        spec = self.viewed.spec
        for placements in (self.placements or spec.placements, spec.replicated().placements):
            made = placed(aten.clone.default(self.viewed), placements)
            if not isinstance(self.call.of(made)[self.index], CopiedView):
                break
        return made


_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
_SCATTERS: dict[Op, Op] = {
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
"""Operators that write to a view without making one."""


def mark_copied(
    views: Iterable[Tensor],
    viewed: Tensor,
    call: ViewCall,
    placements: tuple[Any, ...] | None = None,
) -> None:
    """Make new views of ``viewed`` such in name only; ``call`` has made them."""
    if not isinstance(viewed, Wrapper):
        return
    if isinstance(viewed, CopiedView):
        num_writes, local_viewed = viewed._num_writes, viewed._local_viewed
    else:
        memory = memory_of(viewed)
        num_writes, local_viewed = total_writes(viewed), (memory, _count(memory))
    source = Source(viewed)
    for index, view in enumerate(views):
        if isinstance(view, Wrapper):
            copied = _as_copied(view)
            copied._origin = Origin(source, call, index, placements)
            copied._num_writes, copied._local_viewed = num_writes, local_viewed


def share_origin(tensor: Wrapper, other: Wrapper) -> None:
    """Tie a tensor that gets the data of another one to what that is tied to."""
    if isinstance(other, CopiedView):
        copied = _as_copied(tensor)
        copied._origin, copied._local_viewed = other._origin, other._local_viewed
        copied._num_writes = total_writes(tensor)
    elif isinstance(other, Irregular):
        share_memory(tensor, other)


def refresh(tensor: Tensor) -> None:
    """Copy a view in name only anew if the viewed tensor was written; all ranks do it together."""
    if isinstance(tensor, CopiedView) and _is_stale(tensor):
        _copy_anew(tensor)
        tensor._num_writes = total_writes(tensor)


def _copy_anew(view: CopiedView) -> None:
    _LOCAL.__set__(view, view._origin.read())


def remember_written_through(view: Any, viewed: Any, call: ViewCall) -> None:
    """Remember what a result of ``_unsafe_view`` was made of by a move.

    Nobody is to write to both, but for operators of torch that have an ``out=`` tensor written
    through it.
    """
    view._origin = (weakref.ref(viewed), call)


def move_values(tensor: Wrapper, call: ViewCall, values: Tensor, spec: DTensorSpec) -> None:
    """Give a tensor the values and the spec of a moved view of it, as part of an operator in place.

    Its memory stays behind for its other views, which see what is written to it.
    """
    local, source = memory_of(tensor), Source(tensor)
    copied = _as_copied(tensor)
    count = total_writes(tensor)
    copied._num_writes = None if count is None else count + 1
    copied._local_viewed = (local, _count(local))
    copied._origin = Origin(source, call, 0)
    copied.local, copied.spec = values.clone(), spec


def write_view(view: CopiedView, values: Wrapper) -> None:
    """Write to a view in name only and to the viewed tensor, as part of an operator in place."""
    view._origin.write(values)
    local = redistribute_local(values.local, values.spec, view.spec.with_dtype(values.dtype))
    # Not into the memory of the former values, which on some rank may be that of the tensor.
    _LOCAL.__set__(view, local.to(view.dtype))
    if view._num_writes is not None:  # torch counts this write once the operator has run
        view._num_writes = (total_writes(view) or 0) + 1


def write_past(tensor: Tensor, values: Tensor) -> None:
    """Write what a tensor that takes results got to the tensor that it was made of by a move."""
    if isinstance(tensor, Wrapper) and tensor._origin and not isinstance(tensor, CopiedView):
        find, call = tensor._origin
        viewed = find()
        if viewed is not None:
            Origin(Source(viewed), call, 0).write(values)


def refuse_lost_writes(op: object, tensor: Tensor) -> None:
    """Raise PlacementError before an operator writes to a view in name only."""
    if isinstance(tensor, CopiedView):
        raise PlacementError(
            f"{op} writes to a view of a DTensor that had to be redistributed or copied to be "
            "viewed, so the write would not reach the viewed tensor; clone() the view, or write to "
            "the tensor"
        )
