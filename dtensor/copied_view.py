"""Views in name only: made from a copy, because the viewed tensor had to be moved to be viewed.

Such a view does not follow the tensor, so it must not be read once the tensor has been written.
Torch counts the writes to a tensor and all of its views together, which tells that. A write to the
view goes to the viewed tensor too where it is known which of its elements they are, and is refused
elsewhere.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from .redistribute import redistribute_local
from .schemas import Op
from .wrapper import Wrapper

aten = torch.ops.aten

# The storage of the attribute that the class below guards.
_LOCAL: Any = vars(Wrapper)["_local_tensor"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor that a view is of, and the call that made the view."""

    viewed: Callable[[], Wrapper | None]
    op: Op
    args: tuple[Any, ...]
    """What follows the tensor."""

    def with_values(self, viewed: Wrapper, values: Tensor) -> Tensor:
        """Return the viewed tensor, with the elements of the view replaced."""
        if self.op is aten.diagonal.default:
            return aten.diagonal_scatter.default(viewed, values, *self.args)
        return aten.reshape.default(values, list(viewed.shape))


_INVERTIBLE = frozenset({aten.view.default, aten.diagonal.default})


class CopiedView(Wrapper):
    """A wrapper whose local tensor is read only as long as it is what it was copied from."""

    _num_writes: int | None
    """Writes to the viewed tensor before this view was made; None where torch counts none."""
    _origin: Origin | None = None
    """Where writes go to; None where they are refused."""

    @property
    def _local_tensor(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._num_writes not in (None, self._version):
            raise PlacementError(
                f"this view of a DTensor ({self._spec}) is a copy, since the tensor had to be "
                "redistributed to be viewed, and the tensor was written since; view it again"
            )
        return _LOCAL.__get__(self)

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, value)


def mark_copied(view: Tensor, viewed: Tensor) -> None:
    """Make a new view of ``viewed`` one in name only."""
    if isinstance(view, Wrapper) and isinstance(viewed, Wrapper):
        view.__class__ = view.copied_view
        assert isinstance(view, CopiedView)
        if isinstance(viewed, CopiedView):
            view._num_writes = viewed._num_writes
        else:  # inference tensors have no counter
            view._num_writes = None if torch.is_inference(viewed) else viewed._version


def refuse_lost_writes(op: object, tensor: Tensor) -> None:
    """Raise PlacementError before an operator writes to a view in name only."""
    if isinstance(tensor, CopiedView):
        raise PlacementError(
            f"{op} writes to a view of a DTensor that had to be redistributed or copied to be "
            "viewed, so the write would not reach the viewed tensor; clone() the view, or write to "
            "the tensor"
        )
