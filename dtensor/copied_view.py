"""Views in name only: made from a copy, because the viewed tensor had to be moved to be viewed.

Such a view does not follow the tensor, so it must not be written, nor read once the tensor has
been. Torch counts the writes to a tensor and all of its views together, which tells the latter.
"""

# pyright: reportPrivateUsage=false
# `_local_tensor` and `_spec` are names that users of torch read; inside the package they are ours.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from .wrapper import Wrapper

# The storage of the attribute that the class below guards.
_LOCAL: Any = vars(Wrapper)["_local_tensor"]


class CopiedView(Wrapper):
    """A wrapper whose local tensor is read only as long as it is what it was copied from."""

    _num_writes: int | None
    """Writes to the viewed tensor before this view was made; None where torch counts none."""

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
